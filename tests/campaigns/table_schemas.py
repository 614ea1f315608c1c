"""Random schemas of Parquet and Arrow files, many with values that Python cannot hold: texts are
read rightly, or rejected with the column and the cause, and nothing ends in a traceback.

    python -m tests.campaigns.table_schemas --count 60 --seed 1      (--only N repeats one)
"""

import argparse
import datetime
import decimal
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from meshwright.datasets.rows import LocalDocuments
from meshwright.datasets.storage import stat
from meshwright.system.errors import ConfigError, RecordError
from tests.helpers.texts import entry

FUNCTIONS = """
def text(row): return row["text"]
def every(row): return " ".join(str(row[name]) for name in row)
def get(row): return row.get("text")
def values(row): return " ".join(str(value) for value in row.values())
"""
TEXTS = {
    "string": lambda texts: pa.array(texts, pa.string()),
    "large_string": lambda texts: pa.array(texts, pa.large_string()),
    "string_view": lambda texts: pa.array(texts, pa.string_view()),
    "dictionary": lambda texts: pa.array(texts, pa.string()).dictionary_encode(),
}
"""Types of the column of texts that hold texts,"""

NO_TEXTS: dict[str, tuple[Callable[[list[str]], pa.Array], str]] = {
    "binary": (lambda texts: pa.array([t.encode() for t in texts], pa.binary()), ".decode()"),
    "large_binary": (
        lambda texts: pa.array([t.encode() for t in texts], pa.large_binary()),
        ".decode",
    ),
    "list": (lambda texts: pa.array([[t, t] for t in texts], pa.list_(pa.string())), ".join(row["),
    "int": (lambda texts: pa.array(range(len(texts)), pa.int64()), "which is neither text nor"),
    "damaged": (lambda texts: damaged(len(texts)), "is damaged text"),
}
"""and types that do not, with words of the message."""

FAR = 400_000_000_000_000_000
HELD: dict[str, Callable[[int], pa.Array]] = {
    "int8": lambda n: pa.array([1] * n, pa.int8()),
    "float16": lambda n: pa.array([0.5] * n, pa.float32()).cast(pa.float16()),
    "bool": lambda n: pa.array([True, None] * n, pa.bool_())[:n],
    "null": lambda n: pa.nulls(n),
    "timestamp": lambda n: pa.array([10**9] * n, pa.timestamp("s", "America/New_York")),
    "nanoseconds": lambda n: pa.array([10**18] * n, pa.timestamp("ns")),
    "date": lambda n: pa.array([datetime.date(2024, 1, 1)] * n),
    "decimal": lambda n: pa.array([decimal.Decimal("1.5")] * n, pa.decimal256(50, 2)),
    "map": lambda n: pa.array([[("a", 1)]] * n, pa.map_(pa.string(), pa.int64())),
    "struct": lambda n: pa.array([{"a": 1, "b": [None]}] * n),
    "fixed": lambda n: pa.array([b"abcd"] * n, pa.binary(4)),
    "lists": lambda n: pa.array([[[1], None]] * n, pa.list_(pa.list_(pa.int32()))),
}
"""Other columns, which Python can hold,"""


def damaged(count: int) -> pa.Array:
    return pa.array([b"caf\xe9"] * count, pa.binary()).cast(pa.string(), safe=False)


def twice_x(count: int) -> pa.Array:
    fields = [pa.array([1] * count), pa.array([2] * count)]
    return pa.StructArray.from_arrays(fields, names=["x", "x"])


NOT_HELD: dict[str, Callable[[int], pa.Array]] = {
    "far timestamp": lambda n: pa.array([FAR] * n, pa.timestamp("s")),
    "far date32": lambda n: pa.array([2**31 - 1] * n, pa.int32()).cast(pa.date32()),
    "far date64": lambda n: pa.array([FAR // 86_400_000 * 86_400_000] * n, pa.date64()),
    "year 0 in a zone": lambda n: pa.array(
        [-62135596800] * n, pa.timestamp("s", "America/New_York")
    ),
    "long duration": lambda n: pa.array([2**62] * n, pa.duration("s")),
    "unknown zone": lambda n: pa.array([1] * n, pa.timestamp("us", "Mars/Phobos")),
    "late time": lambda n: pa.array([2**61] * n, pa.int64()).view(pa.time64("us")),
    "two of a name": twice_x,
    "damaged": damaged,
    "list of far": lambda n: pa.array([[FAR]] * n, pa.list_(pa.timestamp("s"))),
    "struct of far": lambda n: pa.StructArray.from_arrays(
        [pa.array([FAR] * n, pa.timestamp("s"))], names=["when"]
    ),
}
"""and which it cannot."""


def write_stream(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def write_file(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


WRITERS: dict[str, tuple[str, Callable[[pa.Table, Path], None]]] = {
    "parquet": ("parquet", lambda table, path: parquet.write_table(table, path, row_group_size=4)),
    "arrow stream": ("arrow", write_stream),
    "arrow file": ("arrow", write_file),
}


def draw(chance: random.Random) -> tuple[list[str], str, pa.Table, str, set[str], str]:
    """Return texts, the type of their column, a table, how it is written, the columns in it that
    Python cannot hold, and the way in which it is read."""
    texts = [f"text {number} ü" for number in range(chance.choice([1, 5, 30]))]
    kind = chance.choice([*TEXTS] * 3 + [*NO_TEXTS])
    make = TEXTS[kind] if kind in TEXTS else NO_TEXTS[kind][0]
    columns, broken = {"text": make(texts)}, {"text"} if kind == "damaged" else set()
    for number in range(chance.randint(1, 5)):
        name, of = f"c{number}", chance.choice([HELD, NOT_HELD])
        columns[name] = of[chance.choice([*of])](len(texts))
        broken |= {name} if of is NOT_HELD else set()
    order = chance.sample([*columns], len(columns))
    names, arrays = [*order], [columns[name] for name in order]
    if chance.random() < 0.1:  # two columns of one name
        names.append("text")
        arrays.append(make(texts))
    way = chance.choice(["column", "text", "get", "every", "values", "where"])
    return (
        texts,
        kind,
        pa.Table.from_arrays(arrays, names=names),
        chance.choice([*WRITERS]),
        broken,
        way,
    )


def judge(folder: Path, chance: random.Random) -> str:
    """Return "read", "rejected", or what could not be written; raise what is wrong."""
    texts, kind, table, writer, broken, way = draw(chance)
    dataset, write = WRITERS[writer]
    path, functions = folder / f"a.{dataset}", folder / "rows.py"
    functions.write_text(FUNCTIONS)
    try:
        write(table, path)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # a type that the format does not have
        return "not written"
    keys: dict[str, Any] = {"dataset": dataset, "dataset_path": str(path)}
    asked = {"text"} if way in ("column", "text", "get") else {*table.schema.names}
    if way == "where":
        other = chance.choice([name for name in table.schema.names if name != "text"])
        keys["dataset_where"], asked = [f"{other} != 'a'"], {"text", other}
    elif way != "column":
        keys["dataset_format"] = f"{functions}:{way}"
    facts = f"{table.schema.to_string()}\n{writer}, {way}, {kind}"
    try:
        found = list(LocalDocuments(entry(**keys), [stat(str(path))]).read(0, 1))
    except ConfigError as error:
        raise AssertionError(f"{facts}\n{error}") from error
    is_twice = table.schema.names.count("text") > 1
    wrong = sorted(asked & broken | ({"text"} if is_twice else set()))
    assert len(found) == len(texts), facts
    if not wrong and kind in TEXTS:
        assert all(isinstance(item, str) for item in found), facts
        assert way in ("every", "values") or found == texts, facts
        return "read"
    for item in found:
        if way in ("every", "values") and not wrong:
            assert isinstance(item, str), facts
            continue
        assert isinstance(item, RecordError), f"{facts}\n{item}"
        message = str(item)
        assert f"{path}, row " in message, f"{facts}\n{message}"
        causes = [f"its {name!r}" for name in wrong]
        causes = causes or [NO_TEXTS[kind][1] if way == "column" else "which is neither text nor"]
        causes += ["a column holds a value", "a column is"] if way == "values" else []
        assert any(cause in message for cause in causes), f"{facts}\n{causes}\n{message}"
    return "rejected" if wrong or kind not in TEXTS else "read"


def run(folder: Path, numbers: range, seed: int) -> Counter[str]:
    """Judge some schemas, and return how many ended how."""
    verdicts = Counter[str]()
    for number in numbers:
        try:
            verdicts[judge(folder, random.Random(f"{seed} {number}"))] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, --only {number}: {error}") from error
    return verdicts


def main() -> None:
    """Run, and print how many schemas ended how."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    given = parser.parse_args()
    numbers = range(given.count) if given.only is None else range(given.only, given.only + 1)
    with tempfile.TemporaryDirectory() as folder:
        print(f"seed {given.seed}:", dict(run(Path(folder), numbers, given.seed)))


if __name__ == "__main__":
    main()
