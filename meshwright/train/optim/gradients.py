"""The global gradient norm, over every axis of the mesh with a single collective, and clipping."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor, nn

from meshwright.models.parameter import block_of
from meshwright.parallelisms.shards import is_dtensor

CPU_CHUNK = 1 << 15  # elements that are added up in one go


@torch.no_grad()
def local_square_sums(
    parameters: Iterable[tuple[str, nn.Parameter]], groups: Sequence[str], device: torch.device
) -> Tensor:
    """Return `square_sums` of the gradients.

    Args:
        parameters: with their names. Those without a gradient count nothing.
    """
    gradients = ((name, parameter.grad) for name, parameter in parameters)
    return square_sums(
        ((name, grad) for name, grad in gradients if grad is not None), groups, device
    )


@torch.no_grad()
def square_sums(
    tensors: Iterable[tuple[str, Tensor]], groups: Sequence[str], device: torch.device
) -> Tensor:
    """Return this rank's share of the squared 2-norm of all tensors, and of each of `groups`.

    Over all ranks the shares add up to the squares. Each element counts once: a tensor that n
    ranks have in full counts 1/n on each of them.

    Args:
        tensors: with the names of their parameters.
        device: where the result is wanted; they may be on another.

    Returns:
        (1 + G,) fp32; 0 of a group that is elsewhere. The first is to the bit that without groups.
    """
    by_replicas: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in tensors:
        if is_dtensor(tensor):
            pairs = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
            replicas = math.prod(size for size, placement in pairs if placement.is_replicate())
            by_replicas[replicas].append((name, tensor.to_local()))
        else:
            by_replicas[1].append((name, tensor))
    sums = torch.zeros(1 + len(groups), device=device)
    for replicas, named in by_replicas.items():
        squares, counts = _squares([tensor for _, tensor in named])
        sums[0] += squares.sum().to(device) / replicas
        if groups:
            parts = [(block_of(name), n) for (name, _), n in zip(named, counts, strict=True)]
            runs = [(key, sum(n for _, n in run)) for key, run in groupby(parts, itemgetter(0))]
            pieces = squares.split([n for _, n in runs])
            for (group, _), piece in zip(runs, pieces, strict=True):
                sums[1 + groups.index(group)] += piece.sum().to(device) / replicas
    return sums


def divisor_to_clip(norm: Tensor, max_norm: float) -> Tensor:
    """Return the divisor, at least 1, that scales gradients of a norm down to `max_norm`: () fp32.

    Source: `torch.nn.utils.clip_grads_with_norm_`, 1e-6 included.
    """
    return ((norm + 1e-6) / max_norm).clamp(min=1.0)


def _squares(tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Squares of the 2-norms of parts of `tensors`, whatever their types: (P,) fp32; and how many
    parts each has."""
    if tensors[0].device.type == "cpu":
        chunks = [norm for tensor in tensors for norm in _norms_of_chunks(tensor.flatten())]
        return torch.cat(chunks).square(), [-(-tensor.numel() // CPU_CHUNK) for tensor in tensors]
    # Called by torch.nn.utils.get_total_norm, which can't be told a type: it would round the
    # norm of bf16 gradients to bf16. If it goes, torch.linalg.vector_norm of each would do.
    norms = torch._foreach_norm([*tensors], 2, torch.float32)
    return torch.stack(norms).square(), [1] * len(tensors)


def _norms_of_chunks(flat: Tensor) -> Iterator[Tensor]:
    # torch's CPU kernel adds up in as few fp32 numbers as a vector register has, however many
    # elements there are (2.13: the norm of 65 M normal numbers is 0.5 % too low). Rows of one
    # tensor are spread over threads.
    size = len(flat) // CPU_CHUNK * CPU_CHUNK
    if size or not len(flat):  # one of an empty gradient: `torch.cat` needs some
        yield torch.linalg.vector_norm(flat[:size].view(-1, CPU_CHUNK), dim=1, dtype=torch.float32)
    if size < len(flat):
        yield torch.linalg.vector_norm(flat[size:], dtype=torch.float32).view(1)
