"""What a user's files hold, and how much, as a look at parts of them tells."""

import itertools
import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from meshwright.config.loader import load_config
from meshwright.config.training import Source
from meshwright.datasets.data_file import DataFile
from meshwright.datasets.file_kinds import TABLE_FIX, TABLES
from meshwright.datasets.files import (
    ROW_FORMATS,
    SUFFIXES,
    Range,
    SourceEntry,
    chunks,
    codec_of,
    local_files,
    resolve,
)
from meshwright.datasets.named_sources import CHAT_COLUMNS, check_files
from meshwright.datasets.readers import PARAGRAPH, Layout, read
from meshwright.datasets.rows import LocalDocuments, is_on_side
from meshwright.datasets.sources import by_suffix, other_files
from meshwright.datasets.tokenizers.kinds import build_tokenizer
from meshwright.datasets.tokenizers.special_tokens import well_formed
from meshwright.system import errors

PRESET = "debug_model"
"""Its tokenizer counts the tokens, and its sequences have to be filled."""

SAMPLE_BYTES, TOKENIZED_BYTES, PLACES = 1 << 20, 1 << 17, 16
"""Of the text that is looked at, at so many places, and of that the part that is tokenized."""

LOOKED_AT = 100
"""Rows among which one has to hold text."""

FEW = 20
"""Files that are too few to be a document each: they are split into more."""

PACKED_BY = 3
"""Bytes of text per byte of a compressed file, about."""

SEPARATORS = {
    "<|endoftext|>": "the text between two <|endoftext|>",
    PARAGRAPH: "the text between empty lines",
    "\n": "a line",
}
"""Words that may separate the documents of a file, and how such a document is called."""


Key = tuple[str, object, str]
"""Of a table of a TOML: its name, its value, and what it is."""

IS_WHAT = {"dataset_separator": "between two documents", "dataset_column": "has the text"}


class Corpus(NamedTuple):
    """The data, as far as a look at a part of it tells."""

    keys: list[Key]
    """Of [training], which name it."""
    num_to_train: int
    """Tokens that aren't held out."""
    is_held_out: bool
    """Whether some documents are; else there are too few."""
    description: str = ""


def look_at(path: str, folder: Path) -> Corpus:
    """Find out how the files at a path hold text, and how much.

    Args:
        folder: of the TOML that is to name them.

    Raises:
        ConfigError: if they hold none, or tokens, or conversations.
    """
    kind, path = _kind(path)
    source = Source(dataset=kind, dataset_path=path)
    files = local_files(entry := SourceEntry("training", kind, source))
    check_files(entry, max_bad_records=1)  # a bad row is no reason to write no config
    split, unit = _separator(files) if kind == "text" else _column(kind, files[0])
    entry = replace(entry, source=source.model_copy(update=split))
    texts, is_all = _sample(entry, files)
    if not texts:
        check_files(entry)  # says why
    errors.check(bool(texts), "--from", path, "holds no text", "name files that do")
    sizes = [len(text.encode()) for text in texts]
    num_bytes = sum(sizes) if is_all else sum(map(_text_bytes, files))
    num_documents = math.ceil(num_bytes / sum(sizes) * len(texts))
    preset, part = load_config([PRESET]), "".join(texts)[:TOKENIZED_BYTES]
    tokens = build_tokenizer(preset.model.tokenizer_path).encode(part)
    num_tokens = round(num_bytes * len(tokens) / len(part.encode()))
    sample = preset.training.seq_len + 1
    held = errors.numbered(num_tokens, "token")
    rule = f"holds {held}, and a sequence of the preset takes {sample}"
    errors.check(num_tokens >= 2 * sample, "--from", path, rule, "add text")
    share = held_out = _part_to_hold_out(num_documents, num_tokens // sample)
    if is_all and held_out:  # the documents themselves say how much of them is held out
        side = replace(entry, held_out=held_out, is_held_out=True)
        share = sum(len(text.encode()) for text in texts if is_on_side(side, text)) / num_bytes
    others = by_suffix(other_files(path, [file.path for file in files]))
    rest = f"; left out: {', '.join(others)}" if others else ""
    num_files = errors.numbered(len(files), "file")
    description = (
        f"{num_files} of {kind}, "
        f"about {errors.numbered(num_documents, 'document')}, {num_tokens:,} tokens{rest}\n"
        f"the median document has {statistics.median_low(sizes):,} bytes: it is {unit}"
    )
    named = os.path.relpath(path, folder)
    named = os.path.abspath(path) if named.startswith("..") else named
    keys: list[Key] = [
        ("dataset", kind, num_files),
        ("dataset_path", named, "relative to this file"),
    ]
    keys += [(key, value, IS_WHAT[key]) for key, value in split.items()]
    if held_out:
        keys.append(("validation_fraction", held_out, "of the documents, by a hash of each"))
    return Corpus(keys, round(num_tokens * (1 - share)), held_out > 0, description)


def _kind(path: str) -> tuple[str, str]:
    """Return how the files at a path hold text, and the path or a glob of them."""
    if os.path.isdir(path):
        sizes = {
            kind: sum(file.size for file in resolve(path, SUFFIXES[kind])) for kind in ROW_FORMATS
        }
        kind, others = max(sizes, key=lambda kind: sizes[kind]), by_suffix(other_files(path, []))
        if sizes[kind] or not others or "." not in others[0]:
            return kind, path
        return "text", os.path.join(path, "**", f"*{others[0].split()[1]}")  # as of a folder of .py
    files = resolve(path, ())
    first = files[0].path if files else path
    kind = next((kind for kind in SUFFIXES if first.endswith(SUFFIXES[kind])), "text")
    fix = "see docs/data.md for such files"
    errors.check(kind in ROW_FORMATS, "--from", path, "holds tokens", fix)
    errors.check(not first.endswith(TABLES), "--from", path, "is a table, not text", TABLE_FIX)
    return kind, path


def _part_to_hold_out(num_documents: int, num_samples: int) -> float:
    """Return the part of the documents to validate on: 256 sequences or more, of 16 documents or
    more, since a hash of each decides and may choose none of a few; 0 if there are too few."""
    part = min(0.2, float(f"{max(256 / num_samples, 16 / num_documents):.1g}"))
    return part if num_documents >= 2 * FEW and part * num_samples >= 8 else 0.0


def _separator(files: Sequence[DataFile]) -> tuple[dict[str, str], str]:
    """Return the key for the words between the documents of a few files, if there are such words;
    and what a document is then."""
    if len(files) >= FEW:
        return {}, "a file"
    text, num_bytes = b"".join(_glimpses(files)), sum(map(_text_bytes, files))
    lines = re.sub(rb"[ \t\r]+\n", b"\n", text)
    for separator, unit in SEPARATORS.items():
        if lines.count(separator.encode()) * num_bytes >= FEW * len(text) > 0:
            if separator == "\n" and _is_wrapped(lines):
                return {}, "a file, whose lines end where those of a page would"
            return {"dataset_separator": separator}, unit
    return {}, "a file"


def _glimpses(files: Sequence[DataFile]) -> Iterator[bytes]:
    """Yield bytes of the files from places that are evenly spread over all of them: the head of a
    file may be a foreword."""
    ends = list(itertools.accumulate(file.size for file in files))
    for at in range(0, ends[-1], -(-ends[-1] // PLACES) or 1):
        file, end = next((f, end) for f, end in zip(files, ends, strict=True) if at < end)
        with suppress(OSError, ValueError, EOFError):  # of a damaged file, which its reader names
            yield next(chunks(file, 0 if codec_of(file) else at - end + file.size), b"")


def _is_wrapped(text: bytes) -> bool:
    """Return whether the lines of a text end where a page would: most are of nearly one length."""
    lengths = sorted(len(line) for line in text.split(b"\n") if line)
    median, long = lengths[len(lengths) // 2], lengths[len(lengths) * 19 // 20]
    return 50 <= median <= long <= 200 and median >= 0.85 * long


def _column(kind: str, file: DataFile) -> tuple[dict[str, str], str]:
    """Return the key for the column with most text, unless it is "text"; and what a document is
    then, with the columns that are left out."""
    looked_at = itertools.islice(read(Range(file), Layout(kind)), LOOKED_AT)
    rows = [row for _, _, row in looked_at if isinstance(row, dict)]
    names, sizes = dict.fromkeys(itertools.chain.from_iterable(rows)), Counter[str]()
    for row in rows:
        sizes.update({key: len(text) for key, text in row.items() if isinstance(text, str)})
    is_chat = any(wanted <= names.keys() for wanted in CHAT_COLUMNS.values())
    holds_rows = len(rows) == 1 and any(isinstance(value, list) for value in rows[0].values())
    column = "text"  # the check of the files has advice on rows without it
    if sizes and "text" not in sizes and not is_chat and not holds_rows:
        column = max(sizes, key=lambda key: sizes[key])
    others = ", ".join(name for name in names if name != column)
    joined = "a function as training.dataset_format can join columns"
    rest = f"\ncolumns left out: {others}; {joined}" if others else ""
    split = {"dataset_column": column} if column != "text" else {}
    return split, f"the column {column} of a row{rest}"


def _sample(entry: SourceEntry, files: Sequence[DataFile]) -> tuple[list[str], bool]:
    """Return documents of evenly spread places in the files, and whether they are all."""
    documents, texts = LocalDocuments(entry, files), list[str]()
    numbers = range(0, documents.parts, -(-documents.parts // PLACES) or 1)
    is_all = len(numbers) == documents.parts
    for number in numbers:
        size = 0
        for item in documents.read_part(number):
            if isinstance(item, str) and item:  # no bad record, which the job rejects
                texts.append(well_formed(item))
                size += len(item)
            if size > SAMPLE_BYTES // len(numbers):
                is_all = False
                break
    return texts, is_all


def _text_bytes(file: DataFile) -> int:
    is_packed = codec_of(file) or file.path.endswith(".parquet")
    return file.size * (PACKED_BY if is_packed else 1)
