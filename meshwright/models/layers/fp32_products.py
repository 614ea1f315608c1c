"""Products of fp32 matrices on CPUs by oneDNN where MKL leaves half of a CPU unused.

Torch has both libraries, and gives fp32 to MKL, whose kernels for AVX-512 are for Intel's CPUs: on
others it computes with AVX2. The exchange lies below torch's operators (fp32_products.cpp), so that
models, autograd, sharded tensors and torch.compile see the same operators as before.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_suffix(".cpp")
CPU_INFO = Path("/proc/cpuinfo")


@cache
def why_not() -> str:
    """Return the reason why this machine's products stay with MKL; empty: they need not."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkl.is_available():
        return "torch has not both oneDNN and MKL"
    if not torch.cpu.get_capabilities().get("avx512_f", False):
        return "this CPU has no AVX-512"
    try:
        is_intel = "GenuineIntel" in CPU_INFO.read_text()
    except OSError:  # not Linux
        return "the system does not say whose CPU this is"
    if is_intel:
        return "MKL has kernels for this CPU's AVX-512"
    try:
        _library()
    except Exception as error:  # no compiler, no headers, a full disk, or other torch inside
        return f"they were not compiled: {next(iter(str(error).splitlines()), repr(error))}"
    return ""


def take(takes_them: bool) -> None:
    """Have oneDNN multiply fp32 matrices in this process from now on, if `why_not` has no reason;
    or MKL again."""
    if takes_them or _library.cache_info().currsize:
        _library().take_products(takes_them)


@cache
def _library() -> ctypes.CDLL:
    """Compile what is exchanged, unless it lies in the cache of torch.compile, and load it."""
    # private: as `cpu_attention` has it. If it changes, `why_not` says so.
    from torch._inductor import config
    from torch._inductor.codecache import CppCodeCache

    with config.patch({"cpp.vec_isa_ok": True}):
        library = CppCodeCache.load(SOURCE.read_text("utf-8"))
    assert isinstance(library, ctypes.CDLL)
    library.take_products.argtypes, library.take_products.restype = [ctypes.c_bool], None
    return library
