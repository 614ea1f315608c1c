"""The global gradient norm, over every axis of the mesh with a single collective."""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


def local_square_sum(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """This rank's share of the squared 2-norm of all gradients; over all ranks it adds up to it.

    Each element counts once: a gradient that n ranks have in full counts 1/n on each of them.

    Returns:
        () fp32. Parameters without a gradient count nothing.
    """
    by_replicas: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor):
            pairs = zip(grad.device_mesh.shape, grad.placements, strict=True)
            replicas = math.prod(size for size, placement in pairs if placement.is_replicate())
            by_replicas[replicas].append(grad.to_local())
        elif grad is not None:
            by_replicas[1].append(grad)
    total = torch.zeros((), device=device)
    for replicas, grads in by_replicas.items():
        total += get_total_norm(grads).float().square() / replicas
    return total
