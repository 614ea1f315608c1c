"""Builds and loads `guard.cpp`, by which torch, of any build, takes CUDA for present."""

import ctypes
import importlib
import importlib.util
import shutil
import subprocess
from pathlib import Path


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")  # does not import it
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def build_guard(folder: Path) -> Path | None:
    """Compile into `folder`: 7 s. None: this machine has no C++ compiler.

    Raises:
        subprocess.CalledProcessError: if torch's headers have changed.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    torch, library = _torch_folder(), folder / "libguard.so"
    include = torch / "include"
    words = [
        *("-O0", "-std=c++20", "-fPIC", "-shared", f"-I{include}"),
        f"-I{include / 'torch/csrc/api/include'}",
        *(str(Path(__file__).with_name("guard.cpp")), "-o", str(library)),
        *(f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"),
    ]
    subprocess.run([compiler, *words], check=True)
    return library


def load_guard(library: Path) -> None:
    """Load it, and import torch, which this process must not have done: that asks for CUDA once."""
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch_folder() / "lib" / name), ctypes.RTLD_GLOBAL)
    guard = ctypes.CDLL(str(library))
    guard.take_over()
    importlib.import_module("torch")
    guard.take_over()  # from torch's own guard, in its build for CUDA
