"""The key of torch.compile's cache."""

import hashlib
from functools import cache
from pathlib import Path

import torch
from torch.compiler import config

OURS = Path(__file__).parents[1]
FOLDERS = ("models/layers", "parallelisms")
"""Of the code that graphs are made of."""


def tell_code_apart() -> None:
    """Let a graph be found again only by the code that made it, and on a CPU of that kind.

    Of our operators and policies of recomputation torch's key has the names alone, and not the
    gradients and layouts, which are part of the graph: another version of Meshwright would train
    with those of the one before. The key also leaves out the vector instructions that a graph's C++
    is written for. On another CPU that shares the cache such graphs do not compile, or write beyond
    the ends of tensors. What the user has put into the key stays.
    """
    tag = f"{_hash_of_code()} {torch.backends.cpu.get_cpu_capability()}"
    if tag not in config.cache_key_tag:
        config.cache_key_tag += tag


@cache
def _hash_of_code() -> str:
    found = hashlib.sha256()
    for folder in FOLDERS:
        for path in sorted((OURS / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return f" meshwright {found.hexdigest()[:16]}"
