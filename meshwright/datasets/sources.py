"""Where documents come from."""

import glob
import hashlib
import importlib.util
import json
import os
import re
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from gzip import BadGzipFile
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, Protocol

from meshwright.config.job_config import MODULE_OBJECT
from meshwright.datasets.entry import Document, Entry
from meshwright.datasets.faulty_files import find_fault, has_lines
from meshwright.datasets.rows import ToDocument, line_reader, row_reader
from meshwright.datasets.token_files import TokenFiles, token_paths
from meshwright.datasets.zstd_frames import CutError, check_whole
from meshwright.errors import ConfigError, RecordError, check, where_it_ends

SUFFIXES = {
    "json": (".json", ".jsonl", ".json.gz", ".jsonl.gz", ".json.zst", ".jsonl.zst"),
    "parquet": (".parquet",),
    "text": (".txt", ".md"),
    "arrow": (".arrow",),
    "megatron": (".bin",),
    "tokens": (".npy", ".bin"),
}
LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
"""Files with a record per line, without a look at them."""


NETWORK_CLIENTS = {"aiohttp", "fsspec", "httpcore", "httpx", "httpx2", "requests", "urllib3"}
STAYS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, BadGzipFile)
"""Errors of the operating system that another attempt does not mend."""


def may_pass(error: BaseException | None) -> bool:
    """Whether the error, or its cause, is one of a network or a file system that may be gone
    later."""
    while error is not None and not isinstance(error, STAYS):
        is_of_network = type(error).__module__.partition(".")[0] in NETWORK_CLIENTS
        if is_of_network or isinstance(error, (OSError, HTTPException)):
            return True
        error = error.__cause__
    return False


class Reader(Protocol):
    """Iterates over documents, and can be begun again where it is."""

    def __iter__(self) -> Iterator[Document]: ...
    def __next__(self) -> Document: ...

    @property
    def state(self) -> Any:
        """Stands, in JSON, for the place before the next document."""


class Documents(Protocol):
    """Documents that can be read again and again, in pieces."""

    max_shards: int
    """Most pieces that can be read independently of each other."""
    parts: int
    """Pieces in which they are best tokenised, by one process each."""

    def read(self, shard: int, num_shards: int, state: Any = None) -> Reader:
        """One of `num_shards` pieces, in its own order, from `state` on."""


@dataclass(frozen=True)
class DatasetSpec:
    """An entry of the dataset table."""

    open: Callable[[Entry, bool], Documents | TokenFiles]
    """Of a source; whether it is to be streamed."""
    files: Callable[[Entry], list[str]]
    """Its files, as paths or addresses: another list means other documents."""
    path: Literal["none", "optional", "required"] = "none"
    """The role of `dataset_path`."""
    is_large: bool = False
    """Whether it is streamed unless the config says otherwise."""
    has_tokens: bool = False
    """It holds tokens, which are read where they lie, instead of documents."""


class IndexedDocuments:
    """Documents that can be had by index."""

    def __init__(self, size: int, get: Callable[[int], Document]) -> None:
        self._size, self._get = size, get
        self.max_shards = max(size, 1)
        # some for each process, and none larger than a few hundred MB of tokens
        few = 8 if size < 4096 else 64
        self.parts = max(min(size, few), -(-size // 2**18), 1)

    def read(self, shard: int, num_shards: int, state: Any = None) -> Reader:
        begin, end = (self._size * s // num_shards for s in (shard, shard + 1))
        return _IndexReader(self._get, begin if state is None else state, end)


class _IndexReader:
    def __init__(self, get: Callable[[int], Document], begin: int, end: int) -> None:
        self._get, self._end, self.state = get, end, begin

    def __iter__(self) -> Iterator[Document]:
        return self

    def __next__(self) -> Document:
        if self.state >= self._end:
            raise StopIteration
        self.state += 1
        return self._get(self.state - 1)


class StreamedRows:
    """Rows of a Hugging Face `IterableDataset`, its files dealt out to shards."""

    def __init__(
        self, rows: Any, entry: Entry, to_document: ToDocument, files: Sequence[str]
    ) -> None:
        self._rows, self._entry, self._to_document = rows, entry, to_document
        self.max_shards = self.parts = rows.num_shards
        self._files = files

    def read(self, shard: int, num_shards: int, state: Any = None) -> Reader:
        rows = self._rows.shard(num_shards, shard)
        if state is not None:
            rows.load_state_dict(state)
        # as `datasets` deals them out: in order, the first shards one more
        size, more = divmod(len(self._files), num_shards)
        begin = shard * size + min(shard, more)
        files = self._files[begin : begin + size + (shard < more)]
        return _RowReader(rows, self._entry, self._to_document, files, is_whole=state is None)


class _RowReader:
    def __init__(
        self,
        rows: Any,
        entry: Entry,
        to_document: ToDocument,
        files: Sequence[str],
        *,
        is_whole: bool,
    ) -> None:
        self._rows, self._entry, self._to_document = rows, entry, to_document
        self._iterator, self._count, self._files = iter(rows), 0, files
        # files are searched for the first bad record: others cannot be told from it
        self._is_first_bad = is_whole and not entry.source.dataset_format

    @property
    def state(self) -> Any:
        return self._rows.state_dict()

    def __iter__(self) -> Iterator[Document]:
        return self

    def __next__(self) -> Document:
        with _openable(self._entry, self._near_files):
            row = next(self._iterator, None)
        if row is None:
            raise StopIteration
        self._count += 1
        try:
            return self._to_document(row, f"row {self._count} since the start")
        except RecordError as error:
            fault = find_fault(self._entry, self._near_files()) if self._is_first_bad else ""
            self._is_first_bad = False
            key = error.key.rpartition(".")[2]
            raise (self._entry.record_error(key, fault) if fault else error) from error

    def _near_files(self) -> Sequence[str]:
        """The file that is being read and its neighbours: rows are read ahead."""
        number = _file_number(self._rows.state_dict())
        return self._files[max(number - 1, 0) : number + 2]


def _file_number(state: Any) -> int:
    """The file that a state of `datasets` is in, among the shard's; 0 if it says none."""
    while "shard_idx" not in state:
        state = state.get("examples_iterable")
        if not isinstance(state, dict):
            return 0
    return int(state["shard_idx"])


def fingerprint(entry: Entry, files: list[str], *, is_portable: bool = False) -> str:
    """Changes with whatever changes the documents: settings, files, the formatting function.

    Local files count with their paths, sizes and times of change, not their content;
    `is_portable`: with names and sizes, which a copy on another machine has too.
    """
    settings = entry.source.model_dump(
        include={"dataset", "dataset_subset", "dataset_split", "dataset_column"}
    )
    parts = [repr(sorted(settings.items()))]
    for file in files:
        if os.path.exists(file):
            stat = os.stat(file)
            exact = f"{file} {stat.st_mtime_ns}"
            parts.append(f"{os.path.basename(file) if is_portable else exact} {stat.st_size}")
        else:
            parts.append(file)
    if name := entry.source.dataset_format:
        place, _, function = name.rpartition(":")
        if MODULE_OBJECT.fullmatch(name):
            spec = importlib.util.find_spec(place)
            place = (spec.origin if spec else None) or place
        parts.append(function)
        parts.append(Path(place).read_text("utf-8") if os.path.isfile(place) else place)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


COMMIT = re.compile(r"@([0-9a-f]{40})/")


def revision(files: list[str]) -> str:
    """The commit that addresses of the hub name; "" if they are local."""
    found = {match[1] for file in files if (match := COMMIT.search(file))}
    return " ".join(sorted(found))


SAMPLED_FILES, SAMPLED_BYTES = 16, 4096


def sampled(files: list[str]) -> str:
    """Hash of the first and the last bytes of some of the files, evenly spread, that are local."""
    files = [file for file in files if os.path.isfile(file)]
    found, step = hashlib.sha256(), -(-len(files) // SAMPLED_FILES) or 1
    for path in files[::step]:
        with open(path, "rb") as file:
            found.update(file.read(SAMPLED_BYTES))
            file.seek(max(file.seek(0, os.SEEK_END) - SAMPLED_BYTES, 0))
            found.update(file.read())
    return found.hexdigest()[:16]


def stdlib_files(entry: Entry) -> list[str]:
    """The running Python's own standard library, without its tests; of that, one split."""
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = []
    for folder, subfolders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        subfolders[:] = set(subfolders) - left_out  # os.walk enters the rest
        paths = (os.path.join(folder, name) for name in names if name.endswith(".py"))
        files += [path for path in paths if os.path.getsize(path) > 0]
    files.sort()
    held_out = entry.source.dataset_split == "validation"
    return [file for index, file in enumerate(files) if (index % 20 == 10) == held_out]


def open_stdlib(entry: Entry, streamed: bool) -> Documents:
    """Each file a document."""
    files = stdlib_files(entry)

    def read(index: int) -> str:
        try:
            with tokenize.open(files[index]) as file:  # heeds the file's own coding line
                return file.read()
        except (SyntaxError, UnicodeDecodeError) as error:
            raise entry.record_error("dataset", f"{files[index]}: {error}") from error

    return IndexedDocuments(len(files), read)


def local_files(builder: str, entry: Entry) -> list[str]:
    """The files that `dataset_path` stands for: itself, those of the right kind below it, its glob.

    Raises:
        ConfigError: if there are none.
    """
    path = entry.source.dataset_path
    if Path(path).is_dir():
        suffixes = SUFFIXES[builder]
        found = [str(p) for p in Path(path).rglob("*") if p.name.endswith(suffixes)]
        wanted = f"a file ending in {', '.join(suffixes)}"
    else:
        literal = path  # as much of it as is there, even if it reads as a pattern
        while literal and not os.path.exists(literal):
            literal = os.path.dirname(literal)
        found = glob.glob(glob.escape(literal) + path[len(literal) :], recursive=True)
        wanted = "such a file or folder"
    if not found:
        fixed = path  # as much of it as is no pattern
        while glob.has_magic(fixed):
            fixed = os.path.dirname(fixed)
        fix = f"check the path: {fixed or '.'} holds none"
        if not os.path.exists(fixed):
            fix = where_it_ends(fixed)
        raise entry.error("dataset_path", f"there is not {wanted}", fix)
    return sorted(found)


def open_local(builder: str, entry: Entry, streamed: bool) -> Documents:
    """Files that Hugging Face `datasets` can read; of text files, each is one document."""
    options: dict[str, Any] = {"sample_by": "document"} if builder == "text" else {}
    files = local_files(builder, entry)
    for file in (file for file in files if file.endswith(".zst")):
        try:
            check_whole(file)
        except CutError as error:
            raise entry.error("dataset_path", f"{file}: cannot be read: {error}") from error
    names = [glob.escape(file) for file in files]  # `datasets` takes every name for a pattern
    options |= {"data_files": names, "split": "train"}
    if not streamed:
        options["cache_dir"] = _arrow_folder(entry, files)
    if builder == "json" and all(file.endswith(LINES) or has_lines(file) for file in files):
        # its own reader makes text of numbers, and JSON of objects, in files after the first
        return _load(
            entry, streamed, "text", files, line_reader(entry), sample_by="line", **options
        )
    return _load(entry, streamed, builder, files, **options)


def token_files(kind: str, entry: Entry) -> list[str]:
    """The files of tokens that `dataset_path` stands for, with the indices of Megatron's."""
    found = token_paths(kind, _token_paths(kind, entry))
    indices = [str(Path(path).with_suffix(".idx")) for path in found if kind == "megatron"]
    for index in indices:
        if not Path(index).is_file():
            raise entry.error("dataset_path", f"there is no {index}")
    return [*found, *indices]


def _token_paths(kind: str, entry: Entry) -> list[str]:
    path = entry.source.dataset_path
    if kind == "megatron" and Path(f"{path}.bin").is_file():
        return [f"{path}.bin"]  # Megatron names both files without their endings
    return [file for file in local_files(kind, entry) if not file.endswith(".idx")]


def open_tokens(kind: str, entry: Entry, streamed: bool) -> TokenFiles:
    """Files of tokens that others have made."""
    return TokenFiles(entry, token_paths(kind, _token_paths(kind, entry)))


def hub_files(repository: str, subset: str, entry: Entry) -> list[str]:
    """Addresses, with the revision, of the files of one split; or paths of a local copy."""
    path = entry.source.dataset_path
    if path:
        return sorted(str(p) for p in Path(path).rglob("*") if p.is_file()) or [path]
    import datasets  # here, because it takes a second that other sources need not wait for

    with _openable(entry):
        revision = entry.source.dataset_revision or None
        builder = datasets.load_dataset_builder(
            repository, _subset(entry, subset), revision=revision
        )
        return [str(file) for file in builder.config.data_files[entry.source.dataset_split]]


def open_hub(repository: str, subset: str, entry: Entry, streamed: bool) -> Documents:
    """A dataset of the Hugging Face hub, or a local copy of it."""
    split = entry.source.dataset_split
    if path := entry.source.dataset_path:
        name = entry.source.dataset_subset or None
        kept_in = _arrow_folder(entry, hub_files(repository, subset, entry))
        return _load(entry, streamed, path, name=name, split=split, cache_dir=kept_in)
    name, revision = _subset(entry, subset), entry.source.dataset_revision or None
    return _load(entry, streamed, repository, name=name, split=split, revision=revision)


def _arrow_folder(entry: Entry, files: list[str]) -> str:
    """Cache of `datasets` for local files, which it would not rebuild for a file
    that has changed but not its time."""
    import datasets  # as above

    return os.path.join(datasets.config.HF_DATASETS_CACHE, fingerprint(entry, files))


def _subset(entry: Entry, usual: str) -> str | None:
    return entry.source.dataset_subset or usual or None


def _load(
    entry: Entry,
    streamed: bool,
    path: str,
    files: Sequence[str] = (),
    from_line: ToDocument | None = None,
    **options: Any,
) -> Documents:
    """`datasets.load_dataset`, with its failures as ours.

    Args:
        files: local ones that it reads, in order, to find one that is at fault.
        from_line: makes documents of lines that `path` reads as rows.
    """
    import datasets  # as above

    datasets.disable_progress_bars()
    to_document = row_reader(entry)
    with _openable(entry, lambda: files):
        rows = datasets.load_dataset(path, streaming=streamed, **options)
        columns = None if from_line else rows.column_names
        if not columns:
            first: dict[str, Any] = next(iter(rows), {})
            columns = _columns_in(first) if from_line else list(first)
    column = entry.source.dataset_column
    if columns and not entry.source.dataset_format and column not in columns:
        fault = find_fault(entry, files[:1]) or "no such column"
        raise entry.error("dataset_column", fault, f"choose from {', '.join(columns)}")
    if streamed:
        return StreamedRows(rows, entry, from_line or to_document, files)

    def get(index: int) -> Document:
        with _openable(entry, lambda: files):  # JSON is decoded only now
            return (from_line or to_document)(rows[index], f"row {index}")

    return IndexedDocuments(len(rows), get)


def _columns_in(line: dict[str, str]) -> list[str]:
    """Of a line of JSON; none if it is not that, which shows when it is read."""
    try:
        row = json.loads(line["text"])
    except (KeyError, ValueError, RecursionError):
        return []
    return list(row) if isinstance(row, dict) else []


@contextmanager
def _openable(entry: Entry, files: Callable[[], Sequence[str]] = tuple) -> Iterator[None]:
    """Whatever a reader or network client of `datasets` raises becomes a `ConfigError`.

    Args:
        files: local ones, in which to look for a fault that the error does not place.
    """
    key = "dataset_path" if entry.source.dataset_path else "dataset"
    try:
        yield
    except ConfigError as error:  # a row that holds no document
        if entry.source.dataset_format:
            raise
        fault = find_fault(entry, files())
        raise entry.error("dataset_column", fault) if fault else error from error
    except Exception as error:
        fault = find_fault(entry, files())
        raise entry.error(key, f"cannot be opened: {fault or _reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, StopIteration):
        return "there is nothing in it"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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
        check(False, key, path, "no such file or folder", where_it_ends(path))
    if spec.has_tokens and source.dataset_mode == "streamed":
        raise entry.error("dataset_mode", "tokens are read where they lie", "leave it out")
    if source.dataset_subset and not is_hub:
        raise entry.error("dataset_subset", f"dataset {name!r} has no subsets", "leave it out")
    if source.dataset_revision and (not is_hub or path):
        what = "a local copy has" if is_hub else f"dataset {name!r} has"
        raise entry.error("dataset_revision", f"{what} no revisions", "leave it out")
    splits = None if is_hub else ("train", "validation") if spec.path == "none" else ("train",)
    if splits and source.dataset_split not in splits:
        raise entry.error("dataset_split", f"dataset {name!r} has only {' and '.join(splits)}")
    if source.dataset_format:
        row_reader(entry)
