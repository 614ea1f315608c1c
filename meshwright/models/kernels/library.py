"""From C++ to a library in this process, by the compiler of torch.compile, through its cache."""

import ctypes

import torch


def load(text: str, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Compile a file's text, unless its library lies in the cache, and load it.

    Args:
        flags: of the compiler, after inductor's.

    Raises:
        Exception: of any kind: no compiler, no headers, a full disk, or other torch inside.
    """
    # private: inductor's own way from C++ to a library, with its lock between processes. If it
    # changes, callers go without the library, and the log says why.
    from torch._inductor import config, cpu_vec_isa
    from torch._inductor.codecache import CppCodeCache  # not at import, which would take a second

    try:
        # without its trial of the compiler, for which it starts a process and imports torch: this
        # text, with the same flags, is one
        with config.patch({"cpp.vec_isa_ok": True}):
            # the cache knows texts and commands, not what another torch's headers make of them
            library = CppCodeCache.load(f"// torch {torch.__version__}\n{text}", extra_flags=flags)
    except Exception:
        cpu_vec_isa.valid_vec_isa_list.cache_clear()  # it has taken the trial for done
        raise
    assert isinstance(library, ctypes.CDLL)
    return library


def first_line(error: Exception) -> str:
    """Return how an error of `load` begins."""
    return next(iter(str(error).splitlines()), repr(error))
