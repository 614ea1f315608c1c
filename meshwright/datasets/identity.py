"""What the data of a source is known by.

A source has an `id`, which names its token cache: it changes with whatever may change a token, and
two copies of the same files have two. It has a `content`, which is equal wherever the tokens are:
checkpoints keep it, and ranks compare it. And it may have a `commit` of the Hugging Face Hub, by
which a user pins it. This module hashes the parts that these are made of.
"""

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.config.section import MODULE_OBJECT
from meshwright.datasets.data_file import DataFile
from meshwright.datasets.files import ROW_FORMATS, SourceEntry
from meshwright.datasets.ranges import open_file
from meshwright.datasets.tokenizers.kinds import Tokenizer, find_template
from meshwright.system.errors import ConfigError

READERS_VERSION = 2
"""Of the documents that `readers.py` makes of local files, and of the parts they are split into."""

CACHE_FORMAT, CHATS_VERSION = 3, 3
"""Of the files of a token cache, and of what conversations become; another number is another
cache."""

OF_DOCUMENTS = {
    "dataset",
    "dataset_subset",
    "dataset_split",
    "dataset_column",
    "dataset_separator",
    "dataset_where",
    "max_documents",
}
"""Settings that name the documents."""

COMMIT = re.compile(r"@([0-9a-f]{40})/")

SAMPLED_FILES, SAMPLED_BYTES = 16, 4096


@dataclass(frozen=True)
class SourceFacts:
    """What one process knows of a source, by which all others of the job open it."""

    commit: str = ""
    """Of a Hub dataset."""
    cache: str = ""
    """Name of the folder of its token cache; "": the source is streamed, and has the following."""
    documents: str = ""
    """Hashes of its settings with the names and sizes of its files; of a little of their content;
    and of the user's code, the tokenizer and the chat template that make its tokens."""
    files: Sequence[DataFile] = ()
    """As they were when the job looked for them."""
    rows: Any = None
    """Of a stream of the Hub, its `IterableDataset`: it knows the addresses of its files."""


def hash_documents(
    entry: SourceEntry, files: Sequence[DataFile], *, is_portable: bool = False
) -> str:
    """Return 16 digits that change with whatever changes the documents: settings, files, the
    formatting function.

    Local files count with their paths, sizes and times of change, not their content; if
    `is_portable`, with names and sizes, which a copy on another node has as well.
    """
    source = entry.source
    parts = [repr(sorted(source.model_dump(include=OF_DOCUMENTS).items()))]
    parts += [options for options in (entry.options, entry.format_options) if options]
    for file in files:
        exact = f"{file.path} {file.stamp}"
        name = os.path.basename(file.path) if is_portable else exact
        parts.append(f"{name} {file.size}" if file.size >= 0 else file.path)
    if name := source.dataset_format:
        place, _, function = name.rpartition(":")
        if MODULE_OBJECT.fullmatch(name):
            spec = importlib.util.find_spec(place)
            place = (spec.origin if spec else None) or place
        parts.append(function)
        parts.append(Path(place).read_text("utf-8") if os.path.isfile(place) else place)
    if source.dataset in ROW_FORMATS:
        parts.append(f"readers {READERS_VERSION}")
    if entry.held_out:
        parts.append(f"held out {entry.held_out} {entry.is_held_out}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def hash_some_bytes(files: Sequence[DataFile]) -> str:
    """Return a hash of the first and the last bytes of some of the files, evenly spread. Those of
    the Hub are left out: their addresses have the commit."""
    files = [file for file in files if file.size >= 0]
    digest, step = hashlib.sha256(), -(-len(files) // SAMPLED_FILES) or 1
    for file in files[::step]:
        with open_file(file) as opened:
            digest.update(opened.read(SAMPLED_BYTES))
            opened.seek(max(opened.seek(0, os.SEEK_END) - SAMPLED_BYTES, 0))
            digest.update(opened.read())
    return digest.hexdigest()[:16]


def commit_of(files: Sequence[DataFile]) -> str:
    """Return the commit that addresses of the Hub name; "" if the files are local."""
    commits = {match[1] for file in files if (match := COMMIT.search(file.path))}
    return " ".join(sorted(commits))


def tokenizer_parts(
    tokenizer: Tokenizer, tokenizer_path: str, chat_template_path: str
) -> list[object]:
    """Return everything about a tokenizer that the tokens of a document depend on, for JSON."""
    template = find_any_template(tokenizer_path, chat_template_path)
    ends = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    # tokens that the template writes by their names, which files next to the tokenizer give
    named = [
        (name, token)
        for name, token in sorted(tokenizer.special_names.items())
        if name in template and tokenizer.special_ids.get(token) != ends.get(name, -1)
    ]
    several = [tokenizer.before, tokenizer.after] if len(tokenizer.before) > 1 else []
    return [tokenizer.fingerprint, *ends.values(), template, *named, *several]


def find_any_template(tokenizer_path: str, chat_template_path: str) -> str:
    """Return the chat template; "" if there is none. That matters only if there are conversations,
    and is raised then."""
    try:
        return find_template(tokenizer_path, chat_template_path)
    except ConfigError:
        return ""


def short_hash(parts: list[object]) -> str:
    """Return 16 hexadecimal digits that tell lists of JSON values apart."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
