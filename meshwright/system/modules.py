"""Imports the module that `experimental.custom_import` names, and torch without collections."""

import gc
import hashlib
import importlib.util
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType


def import_user_module(name: str) -> ModuleType:
    """Import `package.module`, or the Python file `path/to/file.py`.

    Raises:
        ImportError: if there is none; besides, anything that its code raises.
    """
    if not name.endswith(".py"):
        return importlib.import_module(name)
    content = Path(name).read_bytes() if Path(name).is_file() else b""
    digest = hashlib.sha256(
        name.encode() + content
    ).hexdigest()  # a changed file is a different module
    own_name = f"meshwright_user_{digest[:8]}"
    if own_name in sys.modules:
        return sys.modules[own_name]
    spec = importlib.util.spec_from_file_location(own_name, name)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[own_name] = module  # dataclasses look for it there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[own_name]
        raise
    return module


def is_installed(name: str) -> bool:
    """Return whether there is a package to import: to Python, any folder of its name where modules
    are looked for is an empty one, such as the wandb/ that W&B writes to."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


@cache  # it reads a file, and a search asks for every candidate
def torch_version() -> str:
    """Return the version of the installed torch, without importing it."""
    from importlib import metadata  # not at the top: it imports 50 modules, which --help spares

    return metadata.version("torch")


def has_torch(*version: int) -> bool:
    """Return whether torch is of `version`, (major, minor), or newer."""
    return tuple(map(int, torch_version().split(".")[:2])) >= version


def describe_error(error: BaseException, file: str) -> str:
    """Return the kind and the text of `error`, and the last line of `file` that raised it, if one
    did: "ValueError: no text (FILE:LINE)"."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    return f"{type(error).__name__}: {error}" + (f" ({file}:{lines[-1]})" if lines else "")


def file_of(function: object) -> str:
    """Return the file of the module that defines a function or a class; "" if there is none."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    return str(getattr(module, "__file__", ""))


def code_of(name: str) -> str:
    """Return a hash of the file of `import_user_module(name)`; "" if there is none, or no name.

    Modules that it imports itself aren't in it.
    """
    file = Path(import_user_module(name).__file__ or "") if name else Path()
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


PACKAGE = Path(__file__).parents[1]


@cache
def source_hash() -> str:
    """Return a hash of every source file of the package."""
    digest = hashlib.sha256()
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.cpp")]):
        digest.update(f"{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


GIT_S = 10.0
"""Seconds that git gets to look at a checkout, which may be on a slow file system."""


def git_state() -> dict[str, object]:
    """Return the commit of the checkout that the package is run from, and whether its files are as
    they were committed; nothing if it isn't run from one, or there is no git."""
    # a virtual environment may lie in the checkout of a different project, which doesn't track it
    is_tracked = _git("ls-files", "--error-unmatch", "__init__.py")
    commit = _git("rev-parse", "HEAD") if is_tracked else ""
    if not commit:
        return {}
    return {"commit": commit, "is_clean": not _git("status", "--porcelain", "-uno")}


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(PACKAGE), *words],
            capture_output=True,
            text=True,
            timeout=GIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


@contextmanager
def uncollected() -> Iterator[None]:
    """Import inside this context without garbage collection, and never collect the modules.

    Collecting takes a fifth of the time of torch's imports, and 0.3 s in each full collection
    later. Modules stay, so it would find nothing.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
