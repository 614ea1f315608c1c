"""Products of fp32 matrices on CPUs by oneDNN, where MKL leaves half of a CPU unused.

Torch has both libraries, and gives fp32 to MKL, whose kernels for AVX-512 are for Intel's CPUs: on
others it computes with AVX2. The exchange lies below torch's operators (onednn_products.cpp), so
that models, autograd, sharded tensors and torch.compile see the same operators as before.
"""

import ctypes
import os
from functools import cache
from pathlib import Path

import torch

from meshwright.models.kernels import library

SOURCE = Path(__file__).with_suffix(".cpp")


CPU_INFO = Path("/proc/cpuinfo")


PRECISION_VARIABLES = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")
"""Environment variables by which oneDNN, unlike MKL, computes fp32 in bf16."""


@cache
def why_not() -> str:
    """Return the reason why this machine's products stay with MKL; empty: they need not."""
    if not can_compute():
        return "torch's oneDNN has no kernels for AVX-512 here"
    if not torch.backends.mkl.is_available():
        return "torch has no MKL"
    for name in PRECISION_VARIABLES:
        if name in os.environ:
            return f"{name} is set, by which oneDNN may round"
    try:
        is_intel = "GenuineIntel" in CPU_INFO.read_text()
    except OSError:  # not Linux
        return "the system does not say whose CPU this is"
    if is_intel:
        return "MKL has kernels for this CPU's AVX-512"
    try:
        _library()
    except Exception as error:
        return f"the exchange was not compiled: {library.first_line(error)}"
    return ""


def can_compute() -> bool:
    """Return whether torch's products by oneDNN, which were made for bf16, run on this CPU."""
    # private: the condition that torch asks itself. Without it products stay with MKL.
    is_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    return torch.backends.mkldnn.is_available() and is_supported()


def take(takes_them: bool) -> None:
    """Have oneDNN multiply fp32 matrices in this process from now on, or MKL again.

    `why_not` must have found no reason, if oneDNN is to do it.
    """
    if takes_them or _library.cache_info().currsize:
        _library().take_products(takes_them)


def are_taken() -> bool:
    """Return whether oneDNN multiplies in this process."""
    return _library.cache_info().currsize > 0 and _library().are_taken()


@cache
def _library() -> ctypes.CDLL:
    loaded = library.load(SOURCE.read_text("utf-8"))
    loaded.exchange.restype = ctypes.c_char_p
    if error := loaded.exchange():
        raise RuntimeError(error.decode())
    loaded.take_products.argtypes, loaded.take_products.restype = [ctypes.c_bool], None
    loaded.are_taken.restype = ctypes.c_bool
    return loaded
