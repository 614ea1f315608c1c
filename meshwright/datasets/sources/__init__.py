"""The kinds of sources in the dataset table, and how each is opened: files, rows, tokens, the hub.

Tokenising their documents is in `datasets/tokenizers` and `datasets/token_cache`.
"""

import glob
import os
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshwright.datasets.documents import Documents, Entry, IndexedDocuments
from meshwright.datasets.sources.faults import has_lines
from meshwright.datasets.sources.files import (
    LINES,
    fingerprint,
    hub_files,
    local_files,
    stdlib_files,
    subset_of,
    token_paths,
)
from meshwright.datasets.hub import check_files, load_rows
from meshwright.datasets.rows import line_reader, row_reader
from meshwright.system.errors import check, config_error, where_it_ends

if TYPE_CHECKING:
    from meshwright.datasets.sources.token_files import TokenFiles


@dataclass(frozen=True)
class DatasetSpec:
    """An entry of the dataset table."""

    open: "Callable[[Entry, bool], Documents | TokenFiles]"
    """Of a source; whether it is to be streamed."""
    files: Callable[[Entry], list[str]]
    """Its files, as paths or addresses: another list means other documents."""
    path: Literal["none", "optional", "required"] = "none"
    """The role of `dataset_path`."""
    is_large: bool = False
    """Whether it is streamed unless the config says otherwise."""
    has_tokens: bool = False
    """It holds tokens, which are read where they lie, instead of documents."""


def open_stdlib(entry: Entry, streamed: bool) -> Documents:
    """Open the standard library: each file is a document."""
    files = stdlib_files(entry)

    def read(index: int) -> str:
        try:
            with tokenize.open(files[index]) as file:  # heeds the file's own coding line
                return file.read()
        except (SyntaxError, UnicodeDecodeError) as error:
            raise entry.record_error("dataset", f"{files[index]}: {error}") from error

    return IndexedDocuments(len(files), read)


def open_local(builder: str, entry: Entry, streamed: bool) -> Documents:
    """Open files that Hugging Face `datasets` can read; each text file is one document."""
    options: dict[str, Any] = {"sample_by": "document"} if builder == "text" else {}
    files = local_files(builder, entry)
    names = [glob.escape(file) for file in files]  # `datasets` takes every name for a pattern
    options |= {"data_files": names, "split": "train"}
    if not streamed:  # a reader of a stream checks each file when it comes to it
        options["cache_dir"] = _arrow_folder(entry, files)
        if not os.path.isdir(options["cache_dir"]):  # else another process, which made it, has
            check_files(entry, files)
    if builder == "json" and all(file.endswith(LINES) or has_lines(file) for file in files):
        # its own reader makes text of numbers, and JSON of objects, in files after the first
        options["sample_by"] = "line"
        return load_rows(entry, streamed, "text", files, line_reader(entry), **options)
    return load_rows(entry, streamed, builder, files, **options)


def open_tokens(kind: str, entry: Entry, streamed: bool) -> "TokenFiles":
    """Open files of tokens that others have made."""
    from meshwright.datasets.sources.token_files import (
        TokenFiles,  # here: `check` does not wait for numpy
    )

    return TokenFiles(entry, token_paths(kind, entry))


def open_hub(repository: str, subset: str, entry: Entry, streamed: bool) -> Documents:
    """Open a dataset of the Hugging Face hub, or a local copy of it."""
    split = entry.source.dataset_split
    if path := entry.source.dataset_path:
        name = entry.source.dataset_subset or None
        kept_in = _arrow_folder(entry, hub_files(repository, subset, entry))
        return load_rows(entry, streamed, path, name=name, split=split, cache_dir=kept_in)
    name, revision = subset_of(entry, subset), entry.source.dataset_revision or None
    return load_rows(entry, streamed, repository, name=name, split=split, revision=revision)


def _arrow_folder(entry: Entry, files: list[str]) -> str:
    """Cache of `datasets` for local files, which it would not rebuild for a file
    that has changed but not its time."""
    import datasets  # here, because it takes a second that other sources need not wait for

    return os.path.join(datasets.config.HF_DATASETS_CACHE, fingerprint(entry, files))


def check_path(entry: Entry, spec: DatasetSpec) -> None:
    """Check that `dataset_path`, subset and split suit the dataset, and are there.

    Raises:
        ConfigError: naming the first that is not.
    """
    source = entry.source
    name, path = source.dataset, source.dataset_path
    key = f"{entry.key}.dataset_path"
    check(
        bool(path) or spec.path != "required",
        key,
        path,
        f"dataset {name!r} needs it",
        "name a file, a folder or a glob",
    )
    check(
        not path or spec.path != "none", key, path, f"dataset {name!r} reads no path", "leave out"
    )
    is_hub = spec.path == "optional"
    check(
        not (is_hub and glob.has_magic(path)),
        key,
        path,
        "a copy of a dataset of the hub cannot be read from a folder with *, ? or [ in its path",
        "rename the folder",
    )
    if spec.path == "required":
        spec.files(entry)
    elif path and not Path(path).exists():
        raise config_error(key, path, "no such file or folder", where_it_ends(path))
    if spec.has_tokens and source.dataset_mode == "streamed":
        raise entry.error("dataset_mode", "tokens are read where they lie", "leave it out")
    if source.dataset_subset and not is_hub:
        raise entry.error("dataset_subset", f"dataset {name!r} has no subsets", "leave it out")
    if source.dataset_revision and (not is_hub or path):
        what = "a local copy has" if is_hub else f"dataset {name!r} has"
        raise entry.error("dataset_revision", f"{what} no revisions", "leave it out")
    splits = None if is_hub else ("train", "validation") if spec.path == "none" else ("train",)
    if splits and source.dataset_split not in splits:
        fix = f'set {entry.key}.dataset_split = "{splits[0]}"'
        what = f"dataset {name!r} has only {' and '.join(splits)}"
        raise entry.error("dataset_split", what, fix)
    if source.dataset_format:
        row_reader(entry)
