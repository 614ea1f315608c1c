"""What a user's files hold, and how much, as a look at parts of them tells."""

import itertools
import math
import os
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from meshwright.config.loader import load_config
from meshwright.config.training import Source
from meshwright.datasets.file_kinds import TABLE_FIX, TABLES, check_kind
from meshwright.datasets.files import (
    ROW_FORMATS,
    SUFFIXES,
    Range,
    SourceEntry,
    check_downloaded,
    chunks,
    codec_of,
    resolve,
)
from meshwright.datasets.named_sources import CHAT_COLUMNS
from meshwright.datasets.readers import PARAGRAPH, Layout, read
from meshwright.datasets.rows import LocalDocuments, is_on_side
from meshwright.datasets.sources import by_suffix, other_files
from meshwright.datasets.storage import DataFile
from meshwright.datasets.tables import Row
from meshwright.datasets.tokenizers.kinds import build_tokenizer
from meshwright.datasets.tokenizers.special_tokens import well_formed
from meshwright.system import errors
from meshwright.system.errors import RecordError

PRESET = "debug_model"
"""Its tokenizer counts the tokens, and its sequences have to be filled."""

SAMPLE_BYTES, TOKENISED_BYTES, PLACES = 1 << 20, 1 << 17, 16
"""Of the text that is looked at, at so many places, and of that the part that is tokenized."""

LOOKED_AT = 100
"""Rows among which one has to hold text."""

FEW = 20
"""Documents that are too few for a part of them to be held out: files are cut into more."""

PACKED_BY = 3
"""Bytes of text per byte of a compressed file, about."""

LEAST_SAMPLES = 8
"""Sequences that are held out at least."""

SEPARATORS = {
    "<|endoftext|>": "the text between two <|endoftext|>",
    PARAGRAPH: "the text between empty lines",
    "\n": "a line",
}
"""Words that may separate the documents of a file, and how such a document is called."""


@dataclass(frozen=True)
class Corpus:
    """The data, as far as a look at a part of it tells."""

    source: Source
    num_files: int
    num_tokens: int
    held_out: float
    """Part of the documents to validate on; 0: there are too few."""
    num_to_train: int
    """Tokens that aren't held out."""
    description: str


def look_at(path: str) -> Corpus:
    """Find out how the files at a path hold text, and how much.

    Raises:
        ConfigError: if they hold none, or tokens, or conversations.
    """
    kind, path, files = _find_files(path)
    column, separator, unit = "text", "", "a file"
    if kind != "text":
        column, unit = _column(kind, files[0])
    elif len(files) < FEW:
        separator, unit = _separator(files)
    source = Source(
        dataset=kind, dataset_path=path, dataset_column=column, dataset_separator=separator
    )
    texts, is_all = _sample(SourceEntry("training", kind, source), files)
    errors.check(bool(texts), "--from", path, "holds no text", "name the files that do")
    sizes = [len(text.encode()) for text in texts]
    num_bytes = sum(sizes) if is_all else sum(map(_text_bytes, files))
    count = math.ceil(num_bytes / sum(sizes) * len(texts))
    if kind == "text" and not source.dataset_separator:
        count = len(files)
    preset = load_config([PRESET])
    part = "".join(texts)[:TOKENISED_BYTES]
    tokens_per_byte = len(build_tokenizer(preset.model.tokenizer_path).encode(part)) / len(
        part.encode()
    )
    num_tokens, sample = round(num_bytes * tokens_per_byte), preset.training.seq_len + 1
    rule = (
        f"holds {errors.numbered(num_tokens, 'token')}, and a sequence of the preset takes {sample}"
    )
    errors.check(num_tokens >= 2 * sample, "--from", path, rule, "add text")
    share = held_out = 0.2 if count < 1000 else 0.05 if count < 20_000 else 0.01
    if is_all:  # the documents themselves say how many of them are held out
        side = SourceEntry("", "", source, held_out, is_held_out=True)
        share = sum(len(text.encode()) for text in texts if is_on_side(side, text)) / num_bytes
    if count < FEW or share in (0, 1) or held_out * num_tokens < LEAST_SAMPLES * sample:
        share = held_out = 0.0
    others = by_suffix(other_files(path, [file.path for file in files]))
    rest = f"; left out: {', '.join(others)}" if others else ""
    description = (
        f"{errors.numbered(len(files), 'file')} of {kind}, "
        f"about {errors.numbered(count, 'document')}, {num_tokens:,} tokens{rest}\n"
        f"the median document has {statistics.median_low(sizes):,} bytes: it is {unit}"
    )
    to_train = round(num_tokens * (1 - share))
    return Corpus(source, len(files), num_tokens, held_out, to_train, description)


def _find_files(path: str) -> tuple[str, str, list[DataFile]]:
    """Return how the files at a path hold text, the path or a glob of them, and those that aren't
    empty."""
    if os.path.isdir(path):
        found = {kind: resolve(path, SUFFIXES[kind]) for kind in ROW_FORMATS}
        others = by_suffix(other_files(path, []))
        if not any(found.values()) and others and "." in others[0]:  # as of a folder of .py
            path = os.path.join(path, "**", f"*{others[0].split()[1]}")
            found["text"] = resolve(path, ())
        kind = max(found, key=lambda kind: sum(file.size for file in found[kind]))
        files = found[kind]
    else:
        files = resolve(path, ())
        first = files[0].path if files else path
        kind = next((kind for kind in SUFFIXES if first.endswith(SUFFIXES[kind])), "text")
    errors.check(
        kind in ROW_FORMATS, "--from", path, "holds tokens", "see docs/data.md for such files"
    )
    fix = "name a file, a folder or a glob of text files, JSON, Parquet or Arrow"
    fix += "; names that start with . or _ are left out"
    fix = fix if files or os.path.exists(path.split("*")[0]) else errors.where_it_ends(path)
    files = [file for file in files if file.size]
    errors.check(bool(files), "--from", path, "no text is there", fix)
    check_downloaded(files, "--from")
    check_kind(files, "--from")
    is_table = files[0].path.endswith(TABLES)
    errors.check(not is_table, "--from", path, "is a table, not text", TABLE_FIX)
    return kind, path, files


def _separator(files: list[DataFile]) -> tuple[str, str]:
    """Return the words between the documents of a few files, and a name for such a document."""
    parts, whole = list(_glimpses(files)), sum(map(_text_bytes, files))
    seen = sum(map(len, parts))
    parts = [re.sub(rb"[ \t\r]+\n", b"\n", part) for part in parts]
    for separator, unit in SEPARATORS.items():
        count = sum(part.count(separator.encode()) for part in parts)
        if count * whole >= FEW * seen > 0:
            lines = [line for part in parts for line in part.split(b"\n")[1:-1] if line]
            is_wrapped = separator == "\n" and _are_wrapped(lines)
            wrapped = "a file, whose lines end where those of a page would"
            return ("", wrapped) if is_wrapped else (separator, unit)
    return "", "a file"


def _glimpses(files: list[DataFile]) -> Iterator[bytes]:
    """Yield bytes of the files from places that are evenly spread over all of them."""
    ends = list(itertools.accumulate(file.size for file in files))
    for at in range(0, ends[-1], -(-ends[-1] // PLACES)):
        file, end = next((f, end) for f, end in zip(files, ends, strict=True) if at < end)
        with suppress(OSError, ValueError, EOFError):  # of a damaged file, which its reader names
            yield next(chunks(file, 0 if codec_of(file) else at - end + file.size), b"")


def _are_wrapped(lines: list[bytes]) -> bool:
    """Return whether the lines of a text end where a page would: most are of nearly one length."""
    lengths = sorted(map(len, lines)) or [0]
    median, long = lengths[len(lengths) // 2], lengths[len(lengths) * 19 // 20]
    return 50 <= median <= long <= 200 and median >= 0.85 * long


def _column(kind: str, file: DataFile) -> tuple[str, str]:
    """Return the column with the text, "text" or the one with most of it; and a name for such a
    document, with the columns that are left out."""
    rows, sizes = list[Row](), Counter[str]()
    for _, place, row in itertools.islice(read(Range(file), Layout(kind)), LOOKED_AT):
        if isinstance(row, str):
            fix = """write lines like {"text": "..."}""" if "object" in row else "name other files"
            raise errors.ConfigError("", f"{place}: {row}\n  fix: {fix}")
        rows.append(row)
        sizes.update({key: len(text) for key, text in row.items() if isinstance(text, str)})
    columns = dict.fromkeys(itertools.chain.from_iterable(rows))
    held = f"its rows have the columns {', '.join(columns)}" if columns else "it holds no rows"
    for name, wanted in CHAT_COLUMNS.items():
        if wanted <= columns.keys() and "text" not in sizes:
            fix = f'start with the preset fine_tune and training.dataset_format = "{name}"'
            rule = f"{held}: conversations"
            raise errors.config_error("--from", file.path, rule, f"{fix} (docs/fine_tuning.md)")
    lists = [key for row in rows for key, value in row.items() if isinstance(value, list)]
    if lists and kind == "json" and len(rows) == 1:
        fix = f"make lines of them: jq -c '.{lists[0]}[]' {shlex.quote(file.path)} > rows.jsonl"
        raise errors.config_error("--from", file.path, f"its rows are in the list {lists[0]}", fix)
    if not sizes.total():
        fix = "name files whose rows hold text, or join them by a function as dataset_format"
        raise errors.config_error("--from", file.path, f"no column holds text: {held}", fix)
    column = "text" if "text" in sizes else max(sizes, key=lambda key: sizes[key])
    rest = ", ".join(key for key in columns if key != column)
    joined = f"\ncolumns left out: {rest}; a function as training.dataset_format can join columns"
    return column, f"the column {column} of a row{joined if rest else ''}"


def _sample(entry: SourceEntry, files: list[DataFile]) -> tuple[list[str], bool]:
    """Return documents of evenly spread places in the files, and whether they are all."""
    documents, texts = LocalDocuments(entry, files), list[str]()
    numbers = range(0, documents.parts, -(-documents.parts // PLACES))
    is_all = len(numbers) == documents.parts
    for number in numbers:
        size = 0
        for item in documents.read_part(number):
            if isinstance(item, str) and item:
                texts.append(well_formed(item))
                size += len(item)
            elif isinstance(item, RecordError) and entry.name == "text":  # rows may lack theirs
                fault = str(item).partition(" (training.")[0]
                fix = "name other files, or correct it (iconv makes UTF-8 of other text)"
                raise errors.ConfigError("", f"{fault}{errors.FIX}{fix}")
            if size > SAMPLE_BYTES // len(numbers):
                is_all = False
                break
    return texts, is_all


def _text_bytes(file: DataFile) -> int:
    is_packed = codec_of(file) or file.path.endswith(".parquet")
    return file.size * (PACKED_BY if is_packed else 1)
