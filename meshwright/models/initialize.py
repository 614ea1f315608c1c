"""Initial weights that depend on the seed, the parameter's name and the element's index alone.

Not on the number of ranks, the mesh, the wrapping, the device, or the order of the parameters: a
rank computes just the elements that it holds, and any two ranks agree on any element, to the bit.
"""

import hashlib
import math
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# Private, used by torch's own checkpointing to the same end; no public name says where in
# the whole tensor a shard lies. If it moves, import it from where dcp's planner does.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshwright.models.decoder import Decoder

TRUNCATION = 3.0  # standard deviations
TABLE_BITS = 14
FRACTION_BITS = 24  # a float32 holds them exactly
BLOCKS = {"cpu": 1 << 15, "cuda": 1 << 22}
"""Elements at a time. On CPUs temporaries stay in the cache, and torch does not spread them over
threads, which on busy cores wait for each other ten times longer than they compute; on GPUs few
kernels are launched."""


@torch.no_grad()
def initialize(model: Decoder, seed: int) -> None:
    """Fill every parameter and buffer of `model` in place, sharded or not."""
    for name, parameter in model.named_parameters():
        local, offset = local_box(parameter)
        std = model.table.parameters[name].std
        if std is None:
            local.fill_(1.0)
        else:
            fill_normal(local, std, seed, name, tuple(parameter.shape), offset)
    model.init_buffers()


def local_box(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's shard of `parameter` (or all of it), and its offset in the whole."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.dim()
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local(), tuple(offset)


def fill_normal(
    box: Tensor,
    std: float,
    seed: int,
    name: str,
    global_shape: tuple[int, ...],
    offset: tuple[int, ...],
) -> None:
    """Fill `box`, which lies at `offset` in a tensor of `global_shape`, with truncated normals.

    Element i of the whole tensor, counted in row-major order, is a function of (seed, name, i).
    Temporaries are a few times a block of `BLOCKS`, or one row where that is longer. Does not wait
    for the device, but for the first box on it.
    """
    if not box.numel():
        return
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
    strides = [math.prod(global_shape[dim + 1 :]) for dim in range(box.dim())]
    row = torch.zeros((), dtype=torch.int64, device=box.device)  # indices of the box's first row
    for dim in range(1, box.dim()):
        along = torch.arange(offset[dim], offset[dim] + box.shape[dim], device=box.device)
        row = row.unsqueeze(-1) + along * strides[dim]
    block = BLOCKS.get(box.device.type, BLOCKS["cpu"])
    rows_per_block = max(1, block // row.numel())
    for start in range(0, box.shape[0], rows_per_block):
        some = box[start : start + rows_per_block]
        first = torch.arange(offset[0] + start, offset[0] + start + len(some), device=box.device)
        index = first.view(-1, *(1 for _ in row.shape)) * strides[0] + row
        some.copy_(_normal(_splitmix64_(index, key)).mul_(std))


def _splitmix64_(index: Tensor, key: int) -> Tensor:
    """Replace `index` by those outputs of the SplitMix64 generator seeded with `key`, int64 bits.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", figure 16:
    its state after i steps is key + i * gamma, so any output can be had on its own.
    """
    x = index.add_(1).mul_(_signed(0x9E3779B97F4A7C15)).add_(_signed(key))  # wraps modulo 2^64
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_signed(0x94D049BB133111EB))
    return x.bitwise_xor_(_shift_right(x, 31))


def _signed(bits: int) -> int:
    return (bits & (2**64 - 1)) - (2**64 if bits & 2**63 else 0)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Logical shift; torch's own, on int64, copies the sign."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)


def _normal(bits: Tensor) -> Tensor:
    """Truncated standard normals from 64 random bits each: int64 -> fp32 of the same shape.

    Inverse of the cumulative distribution, linear between 2^14 + 1 knots. Only steps that IEEE 754
    rounds in one way (no log, no erfinv), so that every device and vector width gives equal bits.
    """
    knots = _quantiles(bits.device)
    interval = _shift_right(bits, 64 - TABLE_BITS).flatten()
    fraction = (bits & ((1 << FRACTION_BITS) - 1)).float().mul_(2.0**-FRACTION_BITS)
    # not knots[interval], which torch spreads over threads however few there are
    low, high = knots.index_select(0, interval), knots.index_select(0, interval.add_(1))
    return high.sub_(low).mul_(fraction.flatten()).add_(low).view(bits.shape)


@cache
def _quantiles(device: torch.device) -> Tensor:
    """Quantiles of the normal distribution within +-3 deviations: (2^14 + 1,) fp32."""
    normal, n = NormalDist(), 1 << TABLE_BITS
    lowest = normal.cdf(-TRUNCATION)
    left = [normal.inv_cdf(lowest + (1 - 2 * lowest) * i / n) for i in range(n // 2)]
    knots = [*left, 0.0, *(-x for x in reversed(left))]
    return torch.tensor(knots, dtype=torch.float32, device=device)
