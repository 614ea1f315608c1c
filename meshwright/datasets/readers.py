"""Rows of local files, with their places: JSON, text, Parquet and Arrow, compressed or not.

A reader begins at any place. It yields a bad row as a `Fault`, and raises nothing but `OSError`.
"""

import codecs
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshwright.datasets.files import (
    CHUNK,
    LONGEST,
    Place,
    Range,
    chunks,
    content_of,
    is_packed,
    open_file,
)
from meshwright.datasets.storage import ChangedError, DataFile
from meshwright.system.errors import first_line, shortened

Row = dict[str, Any]

MOST_JOINED = 1 << 24
"""Bytes of a long piece that are gathered before they are joined to it."""

BATCH_BYTES = 1 << 22
"""Of the rows of a table that are decoded together, on average."""

NEWLINE = b"\n"

PARAGRAPH = "\n\n"
"""As a separator: one or more empty lines, whatever ends a line."""


class Fault(NamedTuple):
    """A row that cannot be read, or the rest of a file that cannot."""

    where: str
    """`path:line`, `path, byte n` or `path, row n`."""
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True)
class Layout:
    """How the files of a source hold rows."""

    format: str
    """json, text, parquet or arrow."""
    columns: tuple[str, ...] | None = None
    """Of Parquet and Arrow, the columns that are read; None: all."""
    separator: str = ""
    """Of text, the words between two documents; `PARAGRAPH`; or "": each file is one."""


Rows = Generator[tuple[Place, Row | Fault], None, None]

Found = Generator[tuple[Place, Row | Fault | str], None, None]
"""The same; a text is the reason why the row at the place cannot be read."""

END = Place(-1, 0)
"""After a fault that ends the file."""


def read(part: Range, layout: Layout, after: Place | None = None) -> Rows:
    """Yield the rows of a range with their places.

    Args:
        part: a part as `cut` has made it, or a whole file.
        after: the place of the last row that is not wanted any more; None: from the beginning.
            Bytes before it are not read, unless they are compressed.

    Raises:
        OSError: if the file cannot be read now, has changed, or has gone. A file that is damaged
            ends with a fault instead.
    """
    if after == END:
        return
    rows = _READERS[layout.format](part, layout, after)
    last = after
    with closing(rows):
        try:
            for place, row in rows:
                if place != after:
                    row = Fault(where(part, layout, place), row) if isinstance(row, str) else row
                    yield place, row
                last = place
        except (OSError, ValueError, EOFError) as error:
            # the errors of pyarrow have no number, or are ValueErrors
            if isinstance(error, ChangedError) or getattr(error, "errno", None) is not None:
                raise
            behind = f" after {where(part, layout, last)}" if last else ""
            yield END, Fault(part.file.path, f"cannot be read{behind}: {first_line(error)}")


def where(part: Range, layout: Layout, place: Place) -> str:
    """Return words for a place: `path:line`, `path, byte n` or `path, row n of row group m`."""
    path = part.file.path
    if layout.format in ("parquet", "arrow"):
        group = "row group" if layout.format == "parquet" else "batch"
        return f"{path}, row {place.number} of {group} {place.at}"
    if layout.format == "text" and not layout.separator:
        return path
    return f"{path}, byte {place.at}" if part.begin else f"{path}:{place.number + 1}"


def _json(part: Range, layout: Layout, after: Place | None) -> Found:
    """Yield objects: one per line, or those of a file that is one JSON value in several lines."""
    if not _has_lines(part.file):
        yield from _json_value(part, after)
        return
    for place, line in _pieces(part, NEWLINE, after):
        if line is None or line.strip():
            yield place, _row(_object_of, line)


def _row(make: Callable[[bytes], Row], piece: bytes | None) -> Row | str:
    """Return the row that `make` makes of a piece of a file, or why it is none."""
    if piece is None:
        return f"longer than {LONGEST >> 20} MiB"
    try:
        return make(piece)
    except RecursionError:
        return "nested too deeply"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg}, character {error.pos + 1}"
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        line = f"line {before.count(NEWLINE) + 1}, " if NEWLINE in before else ""
        byte = error.start - before.rfind(NEWLINE)
        code = f"0x{error.object[error.start]:02x}"
        return f"not UTF-8: {line}byte {byte}, {code}: {error.reason}"
    except ValueError as error:
        return str(error)


def _object_of(line: bytes) -> Row:
    return _object(json.loads(line.decode()))


def _object(value: Any) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object, but {shortened(value)}")
    return value


def _has_lines(file: DataFile) -> bool:
    """Return whether each line of a JSON file is a row, by its name or its first line."""
    if ".jsonl" in file.path.rpartition("/")[2]:
        return True
    for _, line in _pieces(Range(file), NEWLINE):
        if line is None or not line.strip():
            continue
        try:
            return isinstance(json.loads(line), dict)
        except (ValueError, RecursionError):
            return False
    return True


def _json_value(part: Range, after: Place | None) -> Found:
    """Yield the objects of a file that is one list or one object, which is read as a whole."""
    try:
        value = json.loads(content_of(part.file).decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    for number, row in enumerate(value if isinstance(value, list) else [value]):
        if after and number < after.number:
            continue
        try:
            yield Place(0, number), _object(row)
        except ValueError as error:
            yield Place(0, number), Fault(f"{part.file.path}, row {number}", str(error))


def _text(part: Range, layout: Layout, after: Place | None) -> Found:
    """Yield files as they are, or the texts between separators without line ends around them."""
    if not layout.separator:
        yield Place(0, 0), _row(_text_of, content_of(part.file))
        return
    is_by_paragraph = layout.separator == PARAGRAPH
    separator = layout.separator.encode()
    pieces = _paragraphs(part, after) if is_by_paragraph else _pieces(part, separator, after)
    for place, piece in pieces:
        if piece is not None:
            piece = piece.strip(b"\r\n")
        if piece != b"":
            yield place, _row(_text_of, piece)


def _paragraphs(part: Range, after: Place | None) -> Iterator[tuple[Place, bytes | None]]:
    """Yield runs of lines; one belongs to the range of the last empty line before it."""
    held, size, begin = list[bytes](), 0, Place(0, 0)
    is_owned = after is not None or not part.begin
    for place, line in _pieces(part._replace(end=None), NEWLINE, after):
        if line is None or line.strip():
            begin = begin if size else place
            size += LONGEST + 1 if line is None else len(line) + 1
            if line is not None and size <= LONGEST:
                held.append(line)
            continue
        if size and is_owned:
            yield begin, b"\n".join(held) if size <= LONGEST else None
        held, size, is_owned = [], 0, True
        if part.end is not None and place.at >= part.end:
            return
    if size and is_owned:
        yield begin, b"\n".join(held) if size <= LONGEST else None


def _text_of(content: bytes) -> Row:
    return {"text": content.decode()}


def _pieces(
    part: Range, separator: bytes, after: Place | None = None
) -> Iterator[tuple[Place, bytes | None]]:
    """Yield the pieces that begin in a range, without separators; None for one too long."""
    at, number = (after.at, after.number) if after else (part.begin, 0)
    is_cut = after is None and at > 0  # it may begin in the middle of a piece
    at = max(at - len(separator), 0) if is_cut else at
    rest, dropped, mark, pending = b"", 0, 0, list[bytes]()
    is_first = at == 0
    for chunk in chunks(part.file, at):
        pending += [chunk] if isinstance(chunk, bytes) else []
        # joined when they are as long as the rest, so that a long piece is not copied for each
        is_long = len(pending) * CHUNK < min(len(rest), MOST_JOINED)
        if is_long and chunk and isinstance(chunk, bytes):
            continue
        content = b"".join([rest, *pending])
        pending.clear()
        if is_first and content.startswith(codecs.BOM_UTF8):
            mark, content = len(codecs.BOM_UTF8), content[len(codecs.BOM_UTF8) :]
        is_first = False
        *whole, rest = content.split(separator)
        for piece in whole:
            if part.end is not None and at >= part.end:
                return
            if not is_cut:
                yield Place(at, number), None if dropped else piece
                number += 1
            is_cut = False
            at += mark + dropped + len(piece) + len(separator)
            dropped = mark = 0
        if len(rest) > LONGEST:
            kept = len(separator) - 1
            dropped += len(rest) - kept
            rest = rest[len(rest) - kept :]
        if isinstance(chunk, Exception):
            raise chunk
    if (rest or dropped) and not is_cut and (part.end is None or at < part.end):
        yield Place(at, number), None if dropped else rest


def _parquet(part: Range, layout: Layout, after: Place | None) -> Found:
    import pyarrow.parquet as parquet  # here, as above

    with (
        open_file(part.file) as opened,
        parquet.ParquetFile(opened, buffer_size=CHUNK, pre_buffer=False) as file,
    ):
        columns = _present(layout, file.schema_arrow.names)
        first, end = after.at if after else part.begin, part.end or file.num_row_groups
        for group in range(first, end):
            about = file.metadata.row_group(group)
            rows = _rows_at_once(about.total_byte_size, about.num_rows)
            batches = file.iter_batches(
                rows, row_groups=[group], columns=columns, use_threads=False
            )
            begin = after.number if after and group == first else 0
            yield from _of_batches(batches, group, begin)


def _arrow(part: Range, layout: Layout, after: Place | None) -> Found:
    import pyarrow as arrow  # as above

    with open_file(part.file) as opened:
        is_file = opened.read(6) == b"ARROW1"
        opened.seek(0)
        reader = (arrow.ipc.open_file if is_file else arrow.ipc.open_stream)(opened)
        columns = _present(layout, reader.schema.names)
        begin = after.at if after else part.begin
        if is_file:
            numbers = range(begin, part.end or reader.num_record_batches)
            batches = ((n, reader.get_batch(n)) for n in numbers)
        else:
            batches = ((n, batch) for n, batch in enumerate(reader) if n >= begin)
        for number, batch in batches:
            batch = batch.select(columns) if columns else batch
            step = _rows_at_once(batch.nbytes, batch.num_rows)
            slices = (batch.slice(at, step) for at in range(0, batch.num_rows, step))
            first = after.number if after and number == begin else 0
            yield from _of_batches(slices, number, first)


def _present(layout: Layout, names: Sequence[str]) -> list[str] | None:
    """Wanted columns that a table has; None: all, also if it has none of them."""
    return [name for name in names if name in (layout.columns or ())] or None


def _rows_at_once(num_bytes: int, num_rows: int) -> int:
    return min(max(BATCH_BYTES * num_rows // max(num_bytes, 1), 1), 1024)


def _of_batches(batches: Iterator[Any], group: int, begin: int) -> Found:
    """Yield the rows of a row group, or a batch, from row `begin` on."""
    number = 0
    for batch in batches:
        skipped = min(max(begin - number, 0), batch.num_rows)
        number += skipped
        batch = batch.slice(skipped)
        rows = _checked_rows(batch)
        for index in range(batch.num_rows):
            row = rows[index : index + 1] if rows else _checked_rows(batch.slice(index, 1))
            yield Place(group, number), row[0] if row else "is damaged text"
            number += 1


def _checked_rows(batch: Any) -> list[Row] | None:
    """Return rows; None if one has text that is not UTF-8, or lies beyond the batch."""
    try:
        batch.validate(full=True)  # without it, damaged lengths would be read from anywhere
        rows: list[Row] = batch.to_pylist()
        return rows
    except ValueError:
        return None


_READERS: dict[str, Callable[[Range, Layout, Place | None], Found]] = {
    "json": _json,
    "text": _text,
    "parquet": _parquet,
    "arrow": _arrow,
}


def cut(files: Sequence[DataFile], layout: Layout, part_bytes: int) -> list[list[Range]]:
    """Cut files into parts of about `part_bytes` each, in their order: a part has ranges of one or
    several files. Compressed lines, a single JSON value and a row group stay whole.

    Raises:
        OSError: if a large file cannot be opened.
    """
    parts, size = list[list[Range]](), part_bytes
    for file in files:
        ranges = _split(file, layout, part_bytes) if file.size > part_bytes else [Range(file)]
        for part in ranges:
            if size >= part_bytes:
                parts.append([])
                size = 0
            parts[-1].append(part)
            size += file.size // len(ranges)
    return parts


def _split(file: DataFile, layout: Layout, part_bytes: int) -> list[Range]:
    end = 0
    if layout.format == "parquet":
        import pyarrow.parquet as parquet  # as above

        try:
            with open_file(file) as opened:
                end = parquet.read_metadata(opened).num_row_groups
        except ValueError:  # its reader says so
            pass
    elif _can_be_cut(file, layout):
        end = file.size
    pieces = min(-(-file.size // part_bytes), end)
    if pieces < 2:
        return [Range(file)]
    return [Range(file, end * n // pieces, end * (n + 1) // pieces) for n in range(pieces)]


def _can_be_cut(file: DataFile, layout: Layout) -> bool:
    """Return whether the beginnings of lines or texts can be told from the middle of a file."""
    if is_packed(file):
        return False
    if layout.format == "json":
        return _has_lines(file)
    words = layout.separator  # two that overlap read differently from the middle
    overlaps = any(words.endswith(words[:n]) for n in range(1, len(words)))
    return bool(words) and (words == PARAGRAPH or not overlaps)
