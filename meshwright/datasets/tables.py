"""Rows of tables: which columns are read, and what becomes of a value that can't be."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.system.errors import first_line

Row = dict[str, Any]

UNREADABLE = (OSError, ValueError, EOFError, ArithmeticError, LookupError, NotImplementedError)
"""Errors of libraries that read files, or convert their values."""


@dataclass(frozen=True)
class Unreadable:
    """Stands in a row for a value that is damaged, that Python can't hold, or that nobody asked
    for."""

    reason: str

    def __str__(self) -> str:
        raise ValueError(f"a column {self.reason}")

    __repr__ = __str__
    """The text of a whole row would have it."""


class TableRow(Row):
    """A row of a table. To ask it for a value that can't be read is a `ValueError`."""

    def __getitem__(self, column: str) -> Any:
        value = super().__getitem__(column)
        if isinstance(value, Unreadable):
            raise ValueError(f"its {column!r} {value.reason}")
        return value

    def get(self, column: str, default: Any = None) -> Any:
        return self[column] if column in self else default  # noqa: SIM401  (dict's is blind)


def asked_for(
    columns: Sequence[str] | None, beside: Sequence[str], schema: Any
) -> tuple[list[str] | None, Row]:
    """Return the columns of a table that are read, None for all; and what its rows have in place of
    the others.

    Args:
        columns: the wanted ones; None: all.
        beside: columns that are wanted as well if the first of `columns` is a list of tables.
    """
    if columns is None:
        return None, {}
    from pyarrow.types import is_struct  # here: most files need it not, and it takes long

    kinds = [schema.types[number] for number in schema.get_all_field_indices(columns[0])]
    is_conversation = any(is_struct(getattr(kind, "value_type", kind)) for kind in kinds)
    wanted = {*columns, *(beside if is_conversation else ())}
    others = [name for name in schema.names if name not in wanted]
    kept = dict.fromkeys(name for name in schema.names if name in wanted)
    return list(kept), dict.fromkeys(others, Unreadable("is not read"))


def table_rows(batch: Any, others: Row) -> Iterator[Row]:
    """Yield the rows of a record batch.

    Args:
        others: each row's keys of columns that aren't read.
    """
    names = batch.schema.names
    columns = dict(zip(names, map(_values, batch.columns), strict=True))
    twice = {name: Unreadable("is there twice") for name in names if names.count(name) > 1}
    for index in range(batch.num_rows):
        row = {name: values[index] for name, values in columns.items()}
        yield TableRow(others | row | twice)


def _values(column: Any) -> list[Any]:
    """Return the values of a column; `Unreadable` for one that is text that isn't UTF-8, lies
    beyond the column, or has no place in Python's type for it."""
    what = "is damaged text"
    try:
        column.validate(full=True)  # without it, damaged lengths would be read from anywhere
        what = "holds a value that Python cannot"
        values: list[Any] = column.to_pylist()
        return values
    except UNREADABLE as error:
        if (size := len(column)) > 1:
            return _values(column.slice(0, size // 2)) + _values(column.slice(size // 2))
        return [Unreadable(f"{what}: {first_line(error)}")]
