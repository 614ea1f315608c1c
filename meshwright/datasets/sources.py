"""The kinds of sources in the dataset table, and how each is opened: files, rows, tokens, the hub.

Tokenizing their documents is in `datasets/tokenizers` and `datasets/token_cache`.
"""

import copy
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshwright.datasets import identity
from meshwright.datasets.data_file import DataFile
from meshwright.datasets.files import (
    ROW_FORMATS,
    SourceEntry,
    local_files,
    token_files,
    token_paths,
)
from meshwright.datasets.rows import (
    Documents,
    IndexedDocuments,
    Item,
    LocalDocuments,
    Reader,
    RowReader,
    unreadable_now,
)
from meshwright.datasets.storage import stat
from meshwright.datasets.sympy_source import open_sympy, sympy_files
from meshwright.datasets.tables import Row
from meshwright.system.errors import PASSED_ON, ConfigError, StorageError, first_line
from meshwright.system.modules import describe_error, file_of
from meshwright.system.retries import may_pass

if TYPE_CHECKING:
    from meshwright.datasets.foreign_tokens import TokenFiles


@dataclass(frozen=True)
class DatasetSpec:
    """An entry of the dataset table."""

    open: "Callable[[SourceEntry, bool], Documents | TokenFiles]"
    """Of a source; whether it is to be streamed."""
    files: Callable[[SourceEntry], Sequence[DataFile | str]]
    """Its files, which may be given by their paths or addresses: others mean other documents."""
    path: Literal["none", "optional", "required"] = "none"
    """The role of `dataset_path`. It is optional for Hub datasets, which are streamed unless
    the config says otherwise."""
    has_tokens: bool = False
    """It holds tokens, which are read where they lie, instead of documents."""
    has_rows: bool = False
    """Its documents are made of rows by `RowReader`, which heeds `dataset_where` and what is held
    out for validation."""

    def __post_init__(self) -> None:
        kinds = ("none", "optional", "required")
        if self.path not in kinds:
            raise ValueError(f"path = {self.path!r}: choose from {', '.join(kinds)}")

    @property
    def is_of_hub(self) -> bool:
        """Whether it is a dataset of the Hugging Face hub, or a local copy of one."""
        return self.path == "optional"

    def listed(self, entry: SourceEntry) -> list[DataFile]:
        """Return its files, as its function gives them; `ConfigError` if that fails."""
        try:
            given = self.files(entry)
            is_list = isinstance(given, Iterable) and not isinstance(given, str)
            files = list(given) if is_list else []  # here, as a generator fails when it's read
        except (ConfigError, StorageError, *PASSED_ON):
            raise
        except BaseException as error:  # of the user's function
            what = f"its function `files` raises {describe_error(error, file_of(self.files))}"
            fix = "correct it; docs/extending.md has an example"
            raise entry.error("dataset", what, fix) from error
        if not is_list:
            rule = f"its function `files` returns {given!r}, and no list of paths"
            raise entry.error("dataset", rule, "return a list")
        try:
            return [f if isinstance(f, DataFile) else DataFile(os.fsdecode(f)) for f in files]
        except TypeError:
            rule = f"its function `files` returns {files!r:.60}, of which not all are paths"
            raise entry.error("dataset", rule, "return a list of them") from None

    def find(self, entry: SourceEntry) -> list[DataFile]:
        """Return its files as they are now."""
        files = self.listed(entry)
        return [stat(f.path) if f.size < 0 and os.path.exists(f.path) else f for f in files]


def open_local(entry: SourceEntry, streamed: bool) -> Documents:
    return LocalDocuments(entry, local_files(entry))


def open_tokens(entry: SourceEntry, streamed: bool) -> "TokenFiles":
    """Open files of tokens that others have made."""
    from meshwright.datasets.foreign_tokens import TokenFiles  # here: `check` needs no numpy

    return TokenFiles(entry, token_paths(entry))


class StreamedRows(Documents):
    """Rows of a Hugging Face `IterableDataset`, its files dealt out to shards."""

    def __init__(self, rows: Any, entry: SourceEntry) -> None:
        self.rows, self._entry, self._to_item = rows, entry, RowReader(entry)
        self.unused = self._to_item.unused
        self.max_shards = self.parts = rows.num_shards

    def read(self, shard: int, num_shards: int, state: Any = None) -> Reader:
        rows = self.rows.shard(num_shards, shard)
        if state is not None:
            rows.load_state_dict(copy.deepcopy(state))
        count, iterator = 0, iter(rows)

        def items() -> Iterator[Item]:
            nonlocal count
            while (row := self._next(iterator)) is not None:
                count += 1
                yield self._to_item(row, f"row {count} since the start")

        # up to the first row `datasets` gives the state of the start, whatever it has loaded
        return Reader(items(), lambda: rows.state_dict() if count or state is None else state)

    def _next(self, rows: Iterator[Row]) -> Row | None:
        with openable(self._entry):
            return next(rows, None)


def open_hub(repository: str, subset: str, entry: SourceEntry, streamed: bool) -> Documents:
    """Open a dataset of the Hugging Face hub, or a local copy of it."""
    import datasets  # here, because it takes a second that other sources need not wait for

    datasets.disable_progress_bars()
    source, to_item = entry.source, RowReader(entry)
    name = source.dataset_subset or subset or None
    options = {"name": name, "revision": source.dataset_revision or None}
    if source.dataset_path:
        # its own cache isn't made again for a file that has changed, but not its time
        made_of = identity.hash_documents(entry, hub_files(repository, subset, entry))
        folder = os.path.join(datasets.config.HF_DATASETS_CACHE, made_of)
        options = {"name": source.dataset_subset or None, "cache_dir": folder}
    with openable(entry):
        rows = datasets.load_dataset(
            source.dataset_path or repository,
            split=source.dataset_split,
            streaming=streamed,
            **options,
        )
        columns = rows.column_names or list(next(iter(rows), {}))
    column = source.dataset_column
    if columns and not source.dataset_format and column not in columns:
        raise entry.error("dataset_column", "no such column", f"choose from {', '.join(columns)}")
    if streamed:
        return StreamedRows(rows, entry)

    def get(index: int) -> Item:
        with openable(entry):
            row = rows[index]
        return to_item(row, f"row {index}")

    documents = IndexedDocuments(len(rows), get)
    documents.unused = to_item.unused
    return documents


def hub_files(repository: str, subset: str, entry: SourceEntry) -> list[DataFile]:
    """Addresses, with the revision, of the files of one split; or paths of a local copy."""
    path = entry.source.dataset_path
    if path:
        paths = sorted(str(p) for p in Path(path).rglob("*") if p.is_file()) or [path]
        return [stat(file) for file in paths]
    import datasets  # here, because it takes a second that other sources need not wait for

    name, revision = entry.source.dataset_subset or subset or None, entry.source.dataset_revision
    with openable(entry):
        builder = datasets.load_dataset_builder(repository, name, revision=revision or None)
        by_split, split = builder.config.data_files, entry.source.dataset_split
        if split not in by_split:
            fix = f"choose from {', '.join(map(str, by_split))}"
            raise entry.error("dataset_split", "no such split", fix)
        return [DataFile(str(file)) for file in by_split[split]]


@contextmanager
def openable(entry: SourceEntry) -> Iterator[None]:
    """Whatever a reader or network client of `datasets` raises becomes a `ConfigError`; or a
    `StorageError`, which a scheduler starts again, if it may pass."""
    key = "dataset_path" if entry.source.dataset_path else "dataset"
    try:
        yield
    except (ConfigError, *PASSED_ON):
        raise
    except BaseException as error:
        if may_pass(error):
            raise unreadable_now(entry, key, _reason(error)) from error
        # the advice of `datasets` on a folder that it wrote names its own function
        is_saved = "save_to_disk" in str(error)
        fix = 'set dataset = "arrow" and dataset_path to it' if is_saved else ""
        raise entry.error(key, f"cannot be opened: {_reason(error)}", fix) from error


def _reason(error: BaseException) -> str:
    """Return the first line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    from datasets.arrow_writer import SchemaInferenceError  # here, as above
    from datasets.config import HF_DATASETS_CACHE

    if isinstance(error, OSError) and Path(HF_DATASETS_CACHE).is_relative_to(str(error.filename)):
        return (
            f"{error.filename}, the cache of Hugging Face: {error.strerror}\n"
            "  fix: set the variable HF_HOME to a folder that you can write to"
        )
    if isinstance(error, StopIteration | SchemaInferenceError):
        return "there is nothing in it"
    return first_line(error)


def _on_hub(repository: str, subset: str = "") -> DatasetSpec:
    return DatasetSpec(
        partial(open_hub, repository, subset),
        partial(hub_files, repository, subset),
        path="optional",
        has_rows=True,
    )


_ROWS = DatasetSpec(open_local, local_files, path="required", has_rows=True)

_TOKENS = DatasetSpec(open_tokens, token_files, path="required", has_tokens=True)

DATASETS: dict[str, DatasetSpec] = {
    "sympy_source": DatasetSpec(open_sympy, sympy_files),
    "c4": _on_hub("allenai/c4", "en"),
    "fineweb": _on_hub("HuggingFaceFW/fineweb", "default"),
    "fineweb-edu": _on_hub("HuggingFaceFW/fineweb-edu", "default"),
    "slimpajama": _on_hub("cerebras/SlimPajama-627B"),
    **dict.fromkeys(ROW_FORMATS, _ROWS),
    "megatron": _TOKENS,
    "tokens": _TOKENS,
}
"""By name. Any other name with a slash is one of the Hugging Face hub."""


def find_dataset(name: str) -> DatasetSpec | None:
    """Return the dataset of that name; None if it can be none."""
    if name in DATASETS or "/" not in name or "://" in name:
        return DATASETS.get(name)
    return _on_hub(name)


MOST_SUFFIXES = 4


def by_suffix(paths: Iterable[str]) -> list[str]:
    """Return how many files have each suffix: ["56 .txt", "1 .jsonl"]. Rare ones are added up."""
    counts = Counter(sorted(Path(path).suffix or "without suffix" for path in paths)).most_common()
    shown = [f"{count} {suffix}" for suffix, count in counts[:MOST_SUFFIXES]]
    others = sum(count for _, count in counts[MOST_SUFFIXES:])
    return [*shown, f"{others} others"] if others else shown


def other_files(folder: str, taken: Collection[str]) -> Iterator[str]:
    """Yield the files below a folder that aren't taken. Folders that start with . or _, and links
    to folders, aren't looked into."""
    taken = set(taken)
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] not in "._"]
        paths = (os.path.join(parent, name) for name in names)
        yield from (path for path in paths if path not in taken)
