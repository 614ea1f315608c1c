"""Rows of local files, one by one: JSON lines, text, Parquet and Arrow, compressed or not.

A reader starts at any place, and raises nothing but `OSError`. Instead of a bad row, or of the rest
of a damaged file, it yields the reason why it can't be read.
"""

import codecs
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from meshwright.datasets.data_file import ChangedError, DataFile, UnsupportedError
from meshwright.datasets.files import CHUNK, Range, RowPlace, chunks, codec_of
from meshwright.datasets.ranges import open_file
from meshwright.datasets.tables import UNREADABLE, Row, asked_for, table_rows
from meshwright.system.errors import first_line, shortened

BATCH_BYTES = 1 << 22
"""Of the rows of a table that are decoded together, on average."""

LONGEST = 1 << 28
"""Bytes of the longest line, document or JSON value: a reader's memory is a few times that."""

NEWLINE, WHOLE = b"\n", b""
"""Separators of the pieces of a file; the second one leaves it whole."""

PARAGRAPH = "\n\n"
"""As a separator: one or more empty lines, whatever ends a line."""


@dataclass(frozen=True)
class Layout:
    """How the files of a source hold rows."""

    format: str
    """json, text, parquet or arrow."""
    columns: tuple[str, ...] | None = None
    """Of Parquet and Arrow, the columns that are read; None: all."""
    beside: tuple[str, ...] = ()
    """Columns that are read as well where the first of `columns` is a list of tables."""
    separator: str = ""
    """Of text, the words between two documents; `PARAGRAPH`; or "": each file is one."""


Rows = Generator[tuple[RowPlace, str, Row | str], None, None]
"""The place of a row; the same in words: `path:line`, `path, byte n` or `path, row n`; and the row,
or the reason why it can't be read."""

Pieces = Iterator[tuple[RowPlace, bytes | None]]
"""The place of a piece of a file, and its content; None: it is longer than `LONGEST`."""

END = RowPlace(-1, 0)
"""After damage that ends the file."""


def read(part: Range, layout: Layout, after: RowPlace | None = None) -> Rows:
    """Yield the rows of a range with their places.

    Args:
        part: a part as `cut` has made it, or a whole file.
        after: the place of the last row that isn't wanted any more; None: from the start.
            Bytes before it aren't read, unless they are compressed.

    Raises:
        OSError: if the file can't be read now, has changed, or has gone.
    """
    if after == END:
        return
    last = ""
    with closing(_READERS[layout.format](part, layout, after)) as rows:
        try:
            for place, words, row in rows:
                if place != after:
                    yield place, words, row
                last = words
        except UNREADABLE as error:
            # those of pyarrow and gzip have no number
            is_whole = isinstance(error, (ChangedError, UnsupportedError))
            if is_whole or getattr(error, "errno", None) is not None:
                raise
            behind = f" after {last}" if last else ""
            yield END, part.file.path, f"cannot be read{behind}: {first_line(error)}"


def _json(part: Range, layout: Layout, after: RowPlace | None) -> Rows:
    """Yield objects: one per line, or from a file that is one JSON value in several lines."""
    if not _has_lines(part.file):
        yield from _json_value(part, after)
        return
    for place, line in _pieces(part, NEWLINE, after):
        if line is None or line.strip():
            yield place, _words(part, place), _row(line, is_json=True)


def _words(part: Range, place: RowPlace) -> str:
    path = part.file.path
    return f"{path}, byte {place.at}" if part.begin else f"{path}:{place.number + 1}"


def _row(piece: bytes | None, *, is_json: bool = False) -> Row | str:
    """Return the row of a piece of a file, or why it is none."""
    if piece is None:
        return f"longer than {LONGEST >> 20} MiB"
    try:
        text = piece.decode()
        if is_json:
            return _object(json.loads(text))
        # of ASCII each second one; some are left in by programs that take text from a PDF
        if (zeros := piece.count(0)) * 4 > len(piece):
            return f"{zeros:,} of {len(piece):,} bytes are 0: it is UTF-16, or no text"
        return {"text": text}
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


def _object(value: Any) -> Row | str:
    return value if isinstance(value, dict) else f"not a JSON object, but {shortened(value)}"


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


def _json_value(part: Range, after: RowPlace | None) -> Rows:
    """Yield the objects of a file that is one list or one object, which is read as a whole."""
    try:
        [(_, content)] = _pieces(part, WHOLE)
        value = json.loads((content or b"").decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    begin = after.number if after else 0
    for number, row in enumerate(value if isinstance(value, list) else [value]):
        if number >= begin:
            yield RowPlace(0, number), f"{part.file.path}, row {number}", _object(row)


def _text(part: Range, layout: Layout, after: RowPlace | None) -> Rows:
    """Yield files as they are, or what is between separators without line ends around them."""
    if not layout.separator:
        yield from ((at, part.file.path, _row(piece)) for at, piece in _pieces(part, WHOLE))
        return
    is_by_paragraph = layout.separator == PARAGRAPH
    separator = layout.separator.encode()
    pieces = _paragraphs(part, after) if is_by_paragraph else _pieces(part, separator, after)
    for place, piece in pieces:
        if piece is None or (piece := piece.strip(b"\r\n")):
            yield place, _words(part, place), _row(piece)


def _paragraphs(part: Range, after: RowPlace | None) -> Pieces:
    """Yield runs of lines; one belongs to the range of the last empty line before it."""
    held, size, begin = list[bytes](), 0, RowPlace(0, 0)
    is_owned = after is not None or not part.begin
    lines = _pieces(part._replace(end=None), NEWLINE, after)
    for place, line in chain(lines, [(END, b"")]):
        if line is None or line.strip():
            begin = begin if size else place
            size += LONGEST + 1 if line is None else len(line) + 1
            if line is not None and size <= LONGEST:
                held.append(line)
            continue
        if size and is_owned:
            yield begin, NEWLINE.join(held) if size <= LONGEST else None
        held, size, is_owned = [], 0, True
        if part.end is not None and place.at >= part.end:
            return


def _pieces(part: Range, separator: bytes, after: RowPlace | None = None) -> Pieces:
    """Yield the pieces that start in a range, without separators and byte-order mark; at the end
    of the file an empty one as well.

    Raises:
        ValueError: if a file that is to stay whole is longer than `LONGEST`.
    """
    at, number = after or (part.begin, 0)
    is_cut = after is None and at > 0  # it may start in the middle of a piece
    at = max(at - len(separator), 0) if is_cut else at
    held, dropped, overlap = bytearray(), 0, max(len(separator) - 1, 0)
    for chunk in chain(chunks(part.file, at), [b""]):
        known = max(len(held) - overlap, 0)
        held += chunk
        if chunk and (not separator or held.find(separator, known) < 0):
            # a long piece comes in many chunks, and a separator may have started
            if len(held) > LONGEST + overlap:
                if not separator:
                    raise ValueError(f"longer than {LONGEST >> 20} MiB")
                dropped += len(held) - overlap
                del held[: len(held) - overlap]
            continue
        *whole, rest = bytes(held).split(separator) if separator else [bytes(held)]
        held = bytearray(rest)
        for content in whole if chunk else [*whole, rest]:
            if part.end is not None and at >= part.end:
                return
            if not is_cut:
                piece = content if at else content.removeprefix(codecs.BOM_UTF8)
                # wherever the chunks start
                is_long = dropped + len(content) > LONGEST
                yield RowPlace(at, number), None if is_long else piece
                number += 1
            is_cut = False
            at += dropped + len(content) + len(separator)
            dropped = 0


def _parquet(part: Range, layout: Layout, after: RowPlace | None) -> Rows:
    import pyarrow.parquet as parquet  # here, as in `chunks`

    with (
        open_file(part.file) as opened,
        parquet.ParquetFile(opened, buffer_size=CHUNK, pre_buffer=False) as file,
    ):
        columns, others = asked_for(layout.columns, layout.beside, file.schema_arrow)
        for group in range(after.at if after else part.begin, part.end or file.num_row_groups):
            about = file.metadata.row_group(group)
            rows = _rows_at_once(about.total_byte_size, about.num_rows)
            batches = file.iter_batches(
                rows, row_groups=[group], columns=columns, use_threads=False
            )
            yield from _of_batches(part, batches, others, f"of row group {group}", group, after)


def _arrow(part: Range, layout: Layout, after: RowPlace | None) -> Rows:
    import pyarrow as arrow  # as above

    with open_file(part.file) as opened:
        is_file = opened.read(6) == b"ARROW1"
        opened.seek(0)
        reader = (arrow.ipc.open_file if is_file else arrow.ipc.open_stream)(opened)
        columns, others = asked_for(layout.columns, layout.beside, reader.schema)
        first = after.at if after else 0
        batches: Iterator[Any] = (
            map(reader.get_batch, range(first, reader.num_record_batches))
            if is_file
            else islice(reader, first, None)
        )
        for number, batch in enumerate(batches, first):
            if columns is not None:  # by their numbers: two may have one name
                names = enumerate(batch.schema.names)
                batch = batch.select([number for number, name in names if name in columns])
            step = _rows_at_once(batch.nbytes, batch.num_rows)
            slices = (batch.slice(at, step) for at in range(0, batch.num_rows, step))
            yield from _of_batches(part, slices, others, f"of batch {number}", number, after)


def _rows_at_once(num_bytes: int, num_rows: int) -> int:
    return min(max(BATCH_BYTES * num_rows // max(num_bytes, 1), 1), 1024)


def _of_batches(
    part: Range, batches: Iterator[Any], others: Row, words: str, group: int, after: RowPlace | None
) -> Rows:
    """Yield the rows of a row group, or a batch, from a place in it on.

    Args:
        others: each row's keys of columns that aren't read.
        words: for the group.
    """
    number, begin = 0, after.number if after and after.at == group else 0
    for batch in batches:
        skipped = min(max(begin - number, 0), batch.num_rows)
        number += skipped
        for row in table_rows(batch.slice(skipped), others):
            yield RowPlace(group, number), f"{part.file.path}, row {number} {words}", row
            number += 1


_READERS: dict[str, Callable[[Range, Layout, RowPlace | None], Rows]] = {
    "json": _json,
    "text": _text,
    "parquet": _parquet,
    "arrow": _arrow,
}
"""By format. Each yields the row at `after` as well, which `read` leaves out."""


def cut(files: Sequence[DataFile], layout: Layout, part_bytes: int) -> list[list[Range]]:
    """Cut files into parts of about `part_bytes` each, in their order: a part has ranges of one or
    several files. Compressed lines, a single JSON value and a row group stay whole.

    Raises:
        OSError: if a large file can't be opened.
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
    """Return whether the starts of lines or documents can be told from the middle of a file."""
    if codec_of(file):
        return False
    if layout.format == "json":
        return _has_lines(file)
    words = layout.separator  # two that overlap read differently from the middle
    overlaps = any(words.endswith(words[:n]) for n in range(1, len(words)))
    return bool(words) and (words == PARAGRAPH or not overlaps)
