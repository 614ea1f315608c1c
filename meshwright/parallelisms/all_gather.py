"""All-gather and reduce-scatter that torch.compile sees through, the first by autograd too."""

from collections.abc import Callable

from torch import Tensor

# Autograd-aware and traceable by torch.compile, unlike the public functions of torch.distributed
# (torch.distributed.nn is neither kept nor traced). If it moves, an autograd.Function around
# all_gather_into_tensor and reduce_scatter_tensor would do.
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 deprecates the only name that 2.11 has
_all_gather: Callable[..., Tensor] = (
    _functional_collectives.all_gather_single_autograd
    if hasattr(_functional_collectives, "all_gather_single_autograd")
    else _functional_collectives.all_gather_tensor_autograd
)
_reduce_scatter: Callable[..., Tensor] = (
    _functional_collectives.reduce_scatter_single
    if hasattr(_functional_collectives, "reduce_scatter_single")
    else _functional_collectives.reduce_scatter_tensor
)


def all_gather(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """(n, ...) -> (ranks * n, ...), in their order; backward is a reduce-scatter. Collective.

    Args:
        mesh: of one axis.
    """
    return _all_gather(x.contiguous(), gather_dim=0, group=(mesh, 0))


def reduce_scatter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """(ranks * n, ...) -> (n, ...): this rank's part of the sum over ranks; without gradient.
    Collective.

    Args:
        mesh: of one axis.
    """
    return _reduce_scatter(x.contiguous(), "sum", scatter_dim=0, group=(mesh, 0))
