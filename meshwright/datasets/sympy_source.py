"""The corpus of the debug presets: the source code of sympy.

torch installs sympy, so the corpus is there without a network. It's the same on every Python, which
Python's own standard library isn't, so the losses that the docs print hold on each.
"""

import hashlib
import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from meshwright.datasets.files import SourceEntry
from meshwright.datasets.rows import Documents, IndexedDocuments, Item, is_on_side
from meshwright.system.log import logger

VERSION = "1.14.0"
"""The version whose losses the docs print; requirements.txt pins it."""

CONTENT = "a21602769c6feeadc3454d28f07c296092cf0689c95399a406c39759a432bf90"
"""SHA-256 of the names, sizes and bytes of its files."""

LEFT_OUT = {"tests", "benchmarks", "__pycache__"}

HELD_OUT_EVERY = 20
"""Files: one of so many is of the split "validation"."""


def _root(entry: SourceEntry) -> Path:
    spec = find_spec("sympy")
    if spec is None or not spec.submodule_search_locations:
        fix = f"python -m pip install sympy=={VERSION}"
        raise entry.error("dataset", "sympy is not installed, though torch needs it", fix)
    return Path(spec.submodule_search_locations[0])


def _files(root: Path) -> list[Path]:
    """Return the files below the folder of sympy, in an order that no file system decides."""
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - LEFT_OUT  # os.walk enters the rest
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted((file for file in files if file.stat().st_size), key=lambda file: file.parts)


def sympy_files(entry: SourceEntry) -> list[str]:
    """Return the paths of the Python files of sympy, of one split, without tests and benchmarks.

    Raises:
        ConfigError: if sympy isn't installed.
    """
    held_out = entry.source.dataset_split == "validation"
    numbered = enumerate(map(str, _files(_root(entry))))
    return [file for n, file in numbered if (n % HELD_OUT_EVERY == 10) == held_out]


def open_sympy(entry: SourceEntry, streamed: bool) -> Documents:
    """Open the source code of sympy: each file is a document. Warn if it has been changed since
    `VERSION` was published."""
    files, root = sympy_files(entry), _root(entry)
    if not version_note() and content_of(root) != CONTENT:
        words = "%s isn't the published source of sympy %s, so losses differ from the docs'"
        logger.warning(words, root, VERSION)

    def read(index: int) -> Item:
        try:
            text = Path(files[index]).read_text("utf-8")
        except UnicodeDecodeError as error:
            return entry.record_error("dataset", f"{files[index]}: {error}")
        return text if is_on_side(entry, text) else ""

    return IndexedDocuments(len(files), read)


def content_of(root: Path) -> str:
    """Return the SHA-256 of the names, sizes and bytes of the files below a folder of sympy."""
    digest = hashlib.sha256()
    for file in _files(root):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def version_note() -> str:
    """Return a note if the installed sympy isn't of the version that the docs' losses are of; or
    ""."""
    try:
        installed = version("sympy")
    except PackageNotFoundError:  # only its folder is on the path
        return ""
    if installed == VERSION:
        return ""
    return f"sympy {installed} is installed, so losses differ from the docs', of {VERSION}"
