"""Initial weights that depend on the seed, the parameter's name and the element's index only.

Not on the number of ranks, the mesh, the wrapping, the device, or the order of the parameters: a
rank computes just the elements that it holds, and any two ranks agree on any element, to the bit.
"""

import hashlib
import math
from collections.abc import Callable, Collection
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

from meshwright.models.decoder import Decoder
from meshwright.parallelisms.shards import local_box

TRUNCATION = 3.0  # standard deviations

TABLE_BITS = 14

FRACTION_BITS = 24  # a float32 holds them exactly

GAMMA = 0x9E3779B97F4A7C15  # SplitMix64 adds it to its state

BLOCKS = {"cpu": 1 << 15, "cuda": 1 << 22}
"""Elements at a time. On CPUs torch spreads an operator on so few over no threads, which on busy
cores wait for each other longer than they compute; on GPUs few kernels are launched."""


def initialize(model: Decoder, seed: int) -> None:
    """Fill every parameter and buffer of `model` in place, sharded or not."""
    initialize_parameters(model, seed, model.table.parameters)
    model.init_buffers()
    model.init_state()


@torch.no_grad()
def initialize_parameters(model: Decoder, seed: int, names: Collection[str]) -> None:
    """Fill the parameters of `model` that are in `names` in place, sharded or not."""
    for name, parameter in model.named_parameters():
        if name not in names:
            continue
        local, offset = local_box(parameter)
        declared = model.table.parameters[name]
        if declared.alternates:
            _fill_in_turn(local.detach(), offset)
        elif declared.quantile is not None:
            _fill_by_quantile(local.detach(), declared.quantile, seed, name, offset[0])
        elif declared.std is None:
            local.detach().fill_(1.0)
        else:
            fill_normal(local.detach(), declared.std, seed, name, tuple(parameter.shape), offset)
        if declared.is_offset:
            local.detach().sub_(1.0)


def _fill_in_turn(box: Tensor, offset: tuple[int, ...]) -> None:
    """Fill `box`, which lies at `offset` in a vector, with 1 at even places of that and -1 at odd
    ones."""
    box.fill_(1.0)
    box[1 - offset[0] % 2 :: 2] = -1.0


def _fill_by_quantile(
    box: Tensor, quantile: Callable[[float], float], seed: int, name: str, first: int
) -> None:
    """Fill `box`, which starts at place `first` of a vector, with `quantile` of uniform numbers.

    Computed one by one on the host: logarithms of torch depend on the device and the vector width.
    """
    places = torch.arange(first + 1, first + 1 + len(box))
    fractions = _shift_right(_mix_(places * _signed(GAMMA) + _key(seed, name)), 64 - FRACTION_BITS)
    values = [quantile((number + 0.5) * 2.0**-FRACTION_BITS) for number in fractions.tolist()]
    box.copy_(torch.tensor(values, dtype=torch.float32))


def _key(seed: int, name: str) -> int:
    """Return the state that the generator of a parameter starts from."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return _signed(int.from_bytes(digest[:8], "little"))


def fill_normal(
    box: Tensor,
    std: float,
    seed: int,
    name: str,
    global_shape: tuple[int, ...],
    offset: tuple[int, ...],
) -> None:
    """Fill `box`, which lies at `offset` in a tensor of `global_shape`, with truncated normals.

    Element i of the full tensor, counted in row-major order, is a function of (seed, name, i).
    Temporaries are a few times a block of `BLOCKS`, or one row where that is longer. Does not wait
    for the device, but for the first box on it.
    """
    if not box.numel():
        return
    device = box.device
    steps = [_signed(math.prod(global_shape[dim + 1 :]) * GAMMA) for dim in range(box.dim())]
    row = torch.full(
        (), _signed(_key(seed, name) + GAMMA), device=device
    )  # states of the whole's first row
    for dim in range(1, box.dim()):
        along = torch.arange(offset[dim], offset[dim] + box.shape[dim], device=device)
        row = row.unsqueeze(-1) + along * steps[dim]
    first = offset[0]
    for block in box.split(max(1, BLOCKS.get(device.type, BLOCKS["cpu"]) // row.numel())):
        along = torch.arange(first, first + len(block), device=device)
        states = (along * steps[0]).view(-1, *(1 for _ in row.shape)) + row
        block.copy_(_normal(_mix_(states)).mul_(std))
        first += len(block)


def _mix_(x: Tensor) -> Tensor:
    """Replace states of the SplitMix64 generator by their outputs, int64 bits.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", fig. 16:
    its state after i steps is key + i * GAMMA modulo 2^64, so any output can be had on its own.
    """
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
    knots, rises = _quantiles(bits.device)
    interval = _shift_right(bits, 64 - TABLE_BITS).flatten()
    fraction = bits.flatten().bitwise_and_((1 << FRACTION_BITS) - 1).float()
    # not knots[interval], which torch spreads over threads however few there are
    values = rises.index_select(0, interval).mul_(fraction)
    return values.add_(knots.index_select(0, interval)).view(bits.shape)


@cache
def _quantiles(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return quantiles of the normal distribution within +-3 deviations, and how far it is from
    each to the next over 2^24: fp32, (2^14,) each."""
    normal, n = NormalDist(), 1 << TABLE_BITS
    lowest = normal.cdf(-TRUNCATION)
    left = [normal.inv_cdf(lowest + (1 - 2 * lowest) * i / n) for i in range(n // 2)]
    knots = torch.tensor([*left, 0.0, *(-x for x in reversed(left))], dtype=torch.float32)
    rises = knots.diff().mul_(2.0**-FRACTION_BITS)  # a power of two: nothing is rounded
    both = torch.stack([knots[:-1], rises]).to(device)  # one wait for the device
    return both[0], both[1]
