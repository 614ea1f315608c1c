"""The files of a source, and the changes of them that matter."""

import glob
import hashlib
import importlib.util
import os
import re
import sysconfig
from pathlib import Path

from meshwright.config.section import MODULE_OBJECT
from meshwright.datasets.documents import Entry
from meshwright.datasets.hub import openable
from meshwright.system.errors import where_it_ends

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


def stdlib_files(entry: Entry) -> list[str]:
    """Return the running Python's own standard library, without its tests; of that, one split."""
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = []
    for folder, subfolders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        subfolders[:] = set(subfolders) - left_out  # os.walk enters the rest
        paths = (os.path.join(folder, name) for name in names if name.endswith(".py"))
        files += [path for path in paths if os.path.getsize(path) > 0]
    files.sort()
    held_out = entry.source.dataset_split == "validation"
    return [file for index, file in enumerate(files) if (index % 20 == 10) == held_out]


def local_files(builder: str, entry: Entry) -> list[str]:
    """Return the files of `dataset_path`: itself, files of the right kind below it, or its glob.

    Raises:
        ConfigError: if there are none.
    """
    path = entry.source.dataset_path
    if Path(path).is_dir():
        suffixes = SUFFIXES[builder]
        found = [str(p) for p in Path(path).rglob("*") if p.name.endswith(suffixes)]
        wanted = f"file ending in {' or '.join(suffixes)}"
    else:
        literal = path  # as much of it as is there, even if it reads as a pattern
        while literal and not os.path.exists(literal):
            literal = os.path.dirname(literal)
        found = glob.glob(glob.escape(literal) + path[len(literal) :], recursive=True)
        wanted = "such file or folder"
    if not found:
        fixed = path  # as much of it as is no pattern
        while glob.has_magic(fixed):
            fixed = os.path.dirname(fixed)
        fix = f"check the path: {fixed or '.'} holds none"
        if not os.path.exists(fixed):
            fix = where_it_ends(fixed)
        raise entry.error("dataset_path", f"no {wanted}", fix)
    return sorted(found)


def token_files(kind: str, entry: Entry) -> list[str]:
    """Return the files of tokens that `dataset_path` stands for, with the indices of Megatron's."""
    found = token_paths(kind, entry)
    indices = [str(Path(path).with_suffix(".idx")) for path in found if kind == "megatron"]
    for index in indices:
        if not Path(index).is_file():
            raise entry.error("dataset_path", f"there is no {index}")
    return [*found, *indices]


def token_paths(kind: str, entry: Entry) -> list[str]:
    """Return the files of tokens that `dataset_path` stands for."""
    path = entry.source.dataset_path
    if kind == "megatron" and Path(f"{path}.bin").is_file():
        return [str(Path(f"{path}.bin"))]  # Megatron names both files without their endings
    found = [file for file in local_files(kind, entry) if not file.endswith(".idx")]
    if kind == "megatron":
        return sorted({str(Path(path).with_suffix(".bin")) for path in found})
    return found


def hub_files(repository: str, subset: str, entry: Entry) -> list[str]:
    """Addresses, with the revision, of the files of one split; or paths of a local copy."""
    path = entry.source.dataset_path
    if path:
        return sorted(str(p) for p in Path(path).rglob("*") if p.is_file()) or [path]
    import datasets  # here, because it takes a second that other sources need not wait for

    with openable(entry):
        revision = entry.source.dataset_revision or None
        builder = datasets.load_dataset_builder(
            repository, subset_of(entry, subset), revision=revision
        )
        return [str(file) for file in builder.config.data_files[entry.source.dataset_split]]


def subset_of(entry: Entry, usual: str) -> str | None:
    return entry.source.dataset_subset or usual or None


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
    """Return the commit that addresses of the hub name; "" if they are local."""
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
