"""Where documents come from."""

import glob
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from meshwright.config.job_config import Training
from meshwright.datasets.order import permuted
from meshwright.errors import ConfigError

KEY = "training.dataset_path"
SUFFIXES = {
    "json": (".json", ".jsonl", ".json.gz", ".jsonl.gz", ".json.zst", ".jsonl.zst"),
    "parquet": (".parquet",),
    "text": (".txt", ".md"),
    "arrow": (".arrow",),
}


class Documents(Protocol):
    """A source of text that can be read from any place, again and again."""

    def read(self, epoch: int, start: int) -> Iterator[str]:
        """The documents of `epoch` in its order, from the `start`-th on."""


@dataclass(frozen=True)
class DatasetSpec:
    """An entry of the dataset table."""

    open: Callable[[Training], Documents]
    path: Literal["none", "optional", "required"] = "none"
    """What `training.dataset_path` is to it."""


class ShuffledDocuments:
    """Documents that can be had by index, in another order each epoch."""

    def __init__(self, size: int, get: Callable[[int], str], seed: int) -> None:
        self._size, self._get, self._seed = size, get, seed

    def read(self, epoch: int, start: int) -> Iterator[str]:
        for position in range(start, self._size):
            yield self._get(permuted(position, self._size, self._seed, epoch))


def _text(row: dict[str, Any], column: str, index: int) -> str:
    """The text of row `index`.

    Raises:
        ConfigError: if it is none.
    """
    text = row[column]
    if not isinstance(text, str):
        raise ConfigError(
            "training.dataset_column",
            f"training.dataset_column = {column!r}: row {index} holds {text!r}, which is not text",
        )
    return text


class StreamedDocuments:
    """Rows of a Hugging Face `IterableDataset`, in the order in which they lie."""

    def __init__(self, rows: Any, column: str) -> None:
        self._rows, self._column = rows, column

    def read(self, epoch: int, start: int) -> Iterator[str]:
        for index, row in enumerate(self._rows.skip(start), start):
            yield _text(row, self._column, index)


def python_stdlib(training: Training) -> Documents:
    """The running Python's own standard library, a document a file; without its tests."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = sorted(
        path
        for path in folder.rglob("*.py")
        if left_out.isdisjoint(path.relative_to(folder).parts) and path.stat().st_size > 0
    )

    def read(index: int) -> str:
        with tokenize.open(files[index]) as file:  # heeds the file's own coding line
            return file.read()

    return ShuffledDocuments(len(files), read, training.seed)


def local_files(builder: str, training: Training) -> Documents:
    """Files that Hugging Face `datasets` can read; of text files, each is one document."""
    options = {"sample_by": "document"} if builder == "text" else {}
    files = find_files(builder, training.dataset_path)
    rows = _load(training, builder, data_files=files, split="train", **options)
    column = training.dataset_column
    return ShuffledDocuments(
        len(rows), lambda index: _text(rows[index], column, index), training.seed
    )


def hub_stream(repository: str, name: str, training: Training) -> Documents:
    """A dataset too large to fetch whole: read from the hub, or from a local copy, as it comes."""
    if training.dataset_path:
        rows = _load(training, training.dataset_path, split="train", streaming=True)
    else:
        rows = _load(training, repository, name=name, split="train", streaming=True)
    return StreamedDocuments(rows, training.dataset_column)


def find_files(builder: str, path: str) -> list[str]:
    """The files that `path` stands for: itself, those of the right kind below it, or its glob.

    Raises:
        ConfigError: if there are none.
    """
    if Path(path).is_dir():
        suffixes = SUFFIXES[builder]
        found = [str(p) for p in Path(path).rglob("*") if p.name.endswith(suffixes)]
        wanted = f"a file ending in {', '.join(suffixes)}"
    else:
        found = glob.glob(path, recursive=True)
        wanted = "such a file or folder"
    if not found:
        raise ConfigError(KEY, f"{KEY} = {path!r}: there is not {wanted}")
    return sorted(found)


def _load(training: Training, path: str, **options: Any) -> Any:
    """`datasets.load_dataset`, with its failures as ours."""
    import datasets  # here, because it takes a second that other sources need not wait for

    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(path, **options)
        columns = rows.column_names or list(next(iter(rows)))
    except Exception as error:  # it raises whatever its reader or its network client does
        cause = error.__cause__ or error
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        key = KEY if training.dataset_path else "training.dataset"
        value = training.dataset_path or training.dataset
        raise ConfigError(key, f"{key} = {value!r}: cannot be opened: {reason}") from error
    if training.dataset_column not in columns:
        raise ConfigError(
            "training.dataset_column",
            f"training.dataset_column = {training.dataset_column!r}: no such column"
            f"\n  fix: choose from {', '.join(columns)}",
        )
    return rows
