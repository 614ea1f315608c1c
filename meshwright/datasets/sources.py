"""The kinds of sources in the dataset table, and how each is opened: files, rows, tokens, the hub.

Tokenising their documents is in `datasets/tokenizers` and `datasets/token_cache`.
"""

import glob
import os
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from meshwright.datasets.documents import is_on_side, row_reader
from meshwright.datasets.files import Entry, fingerprint, local_files, token_paths
from meshwright.datasets.rows import (
    Documents,
    IndexedDocuments,
    LocalDocuments,
    hub_files,
    load_rows,
    subset_of,
)
from meshwright.datasets.storage import DataFile, stat
from meshwright.system.errors import check, numbered, where_it_ends
from meshwright.system.log import logger

if TYPE_CHECKING:
    from meshwright.datasets.foreign_tokens import TokenFiles


@dataclass(frozen=True)
class DatasetSpec:
    """An entry of the dataset table."""

    open: "Callable[[Entry, bool], Documents | TokenFiles]"
    """Of a source; whether it is to be streamed."""
    files: Callable[[Entry], Sequence[DataFile | str]]
    """Its files, which may be given by their paths or addresses: others mean other documents."""
    path: Literal["none", "optional", "required"] = "none"
    """The role of `dataset_path`."""
    is_large: bool = False
    """Whether it is streamed unless the config says otherwise."""
    has_tokens: bool = False
    """It holds tokens, which are read where they lie, instead of documents."""
    has_rows: bool = False
    """Its documents are made of rows by `row_reader`, which heeds `dataset_where` and what is held
    out for validation."""

    def find(self, entry: Entry) -> list[DataFile]:
        """Return its files as they are now."""
        return [
            file
            if isinstance(file, DataFile)
            else stat(file)
            if os.path.exists(file)
            else DataFile(file)
            for file in self.files(entry)
        ]


def stdlib_files(entry: Entry) -> list[DataFile]:
    """Return the running Python's own standard library, without its tests; of that, one split."""
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = []
    for folder, subfolders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        subfolders[:] = set(subfolders) - left_out  # os.walk enters the rest
        paths = (os.path.join(folder, name) for name in names if name.endswith(".py"))
        files += [path for path in paths if os.path.getsize(path) > 0]
    files.sort()
    held_out = entry.source.dataset_split == "validation"
    return [stat(file) for n, file in enumerate(files) if (n % 20 == 10) == held_out]


def open_stdlib(entry: Entry, streamed: bool) -> Documents:
    """Open the standard library: each file is a document."""
    files = stdlib_files(entry)

    def read(index: int) -> str:
        path = files[index].path
        try:
            with tokenize.open(path) as file:  # heeds the file's own coding line
                text = file.read()
        except (SyntaxError, UnicodeDecodeError) as error:
            raise entry.record_error("dataset", f"{path}: {error}") from error
        return text if not entry.held_out or is_on_side(entry, text) else ""

    return IndexedDocuments(len(files), read)


def open_local(kind: str, entry: Entry, streamed: bool) -> Documents:
    """Open local files."""
    files = local_files(kind, entry)
    size = sum(file.size for file in files) / 1e9
    logger.debug("%s: %s, %.3g GB", entry.name, numbered(len(files), "file"), size)
    return LocalDocuments(entry, files)


def open_tokens(kind: str, entry: Entry, streamed: bool) -> "TokenFiles":
    """Open files of tokens that others have made."""
    from meshwright.datasets.foreign_tokens import (
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


def _arrow_folder(entry: Entry, files: list[DataFile]) -> str:
    """Cache of `datasets` for local files, which it would not rebuild for a file
    that has changed but not its time."""
    import datasets  # here, because it takes a second that other sources need not wait for

    return os.path.join(datasets.config.HF_DATASETS_CACHE, fingerprint(entry, files))


def check_path(entry: Entry, spec: DatasetSpec, *, looks_at_files: bool = True) -> None:
    """Check that `dataset_path`, subset and split suit the dataset, and are there.

    Args:
        looks_at_files: also whether they are there.

    Raises:
        ConfigError: naming the first that is not.
    """
    source, is_hub = entry.source, spec.path == "optional"
    name, path = source.dataset, source.dataset_path
    of_it, out = f"dataset {name!r}", "leave it out"

    def refuse(is_wrong: object, key: str, rule: str, fix: str = out) -> None:
        if is_wrong:
            raise entry.error(key, rule, fix)

    needs_path, has_none = spec.path == "required", spec.path == "none"
    fix = "name a file, a folder or a glob"
    refuse(needs_path and not path, "dataset_path", f"{of_it} needs it", fix)
    refuse(has_none and path, "dataset_path", f"{of_it} reads no path")
    rule = "a copy of a dataset of the hub cannot be read from a folder with *, ? or [ in its path"
    refuse(is_hub and glob.has_magic(path), "dataset_path", rule, "rename the folder")
    if needs_path and looks_at_files:
        spec.files(entry)
    elif path and looks_at_files and not Path(path).exists():
        refuse(True, "dataset_path", "no such file or folder", where_it_ends(path))
    is_streamed, rule = source.dataset_mode == "streamed", "tokens are read where they lie"
    refuse(spec.has_tokens and is_streamed, "dataset_mode", rule)
    refuse(source.dataset_subset and not is_hub, "dataset_subset", f"{of_it} has no subsets")
    rule = f"{'a local copy' if is_hub else of_it} has no revisions"
    refuse(source.dataset_revision and (not is_hub or path), "dataset_revision", rule)
    splits = ("train", "validation") if has_none else ("train",)
    rule = f"{of_it} has only {' and '.join(splits)}"
    fix = f'set {entry.key}.dataset_split = "train"'
    refuse(not is_hub and source.dataset_split not in splits, "dataset_split", rule, fix)
    rule = f"{of_it} has no rows"
    refuse(source.dataset_where and not spec.has_rows, "dataset_where", rule)
    rule = f'{of_it} is not "text"'
    refuse(source.dataset_separator and name != "text", "dataset_separator", rule)
    rule, fix = f"{of_it} holds tokens, which are read where they lie", "bound training.steps"
    refuse(source.max_documents and spec.has_tokens, "max_documents", rule, f"{out}, or {fix}")
    check(
        not entry.held_out or spec.has_rows or name == "python_stdlib",
        *("training.validation_fraction", entry.held_out),
        f"{of_it} has no rows that could be held out",
        "name a dataset in [validation] instead",
    )
    if spec.has_rows or source.dataset_format:
        row_reader(entry)


MOST_SUFFIXES = 4


def by_suffix(paths: Iterable[str]) -> list[str]:
    """Return how many files have each suffix: ["56 .txt", "1 .jsonl"]. Rare ones are added up."""
    found = Counter(sorted(Path(path).suffix or "without suffix" for path in paths)).most_common()
    shown = [f"{count} {suffix}" for suffix, count in found[:MOST_SUFFIXES]]
    others = sum(count for _, count in found[MOST_SUFFIXES:])
    return [*shown, f"{others} others"] if others else shown


def left_out(folder: str, taken: Collection[str]) -> Iterator[str]:
    """Yield the files below a folder that are not taken; none if `folder` is no folder. Folders
    that begin with . or _, and links to folders, are not looked into."""
    taken = set(taken)
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] not in "._"]
        paths = (os.path.join(parent, name) for name in names)
        yield from (path for path in paths if path not in taken)
