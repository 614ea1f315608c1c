"""Errors up to which a case equals its reference; docs/correctness.md derives them."""

import math
from dataclasses import dataclass, replace

from meshwright.commands.prove.cases import Case


@dataclass(frozen=True)
class Bounds:
    """Relative errors up to which a case equals its reference; docs/correctness.md has reasons."""

    loss: float
    """Of step 1."""
    grad_norm: float
    """Of step 1."""
    gradient: float
    """For a parameter: norm of the difference over the norm."""
    update: float
    """For a parameter, of its change by the first steps: norm of the difference over the
    norm."""
    later_loss: float
    """Of the steps after the first, when weights differ by rounding; and of
    the validation, which is after it."""
    later_grad_norm: float
    later_gradient: float = math.inf
    """As `gradient`, after two updates, of models with experts. Weights differ by as much as
    `update` allows, which is 1e-4 of them at the highest learning rate, and gradients by a few
    times that."""
    other_choices: float = 1e-4
    """Part of tokens whose router may choose other experts than one process's, by rounding."""
    choice_gap: float = math.inf
    """By how much scores of such a choice may differ from the scores of one process's choice."""
    rounding: float = 0.0
    """Added to `gradient`: times the parameter's own error of rounding, in the reference."""
    update_rounding: float = 0.0
    """Added to `update`, likewise."""
    stored: float = 0.0
    """Added to `gradient`, for a parameter that is stored in bf16: its fp32 sum is rounded."""
    different: float = math.inf
    """Part of the elements of the gradients in bf16 that may differ at all. Of the others half may:
    fp32 sums of a different order differ in their last bit."""
    tied: float = 0.0
    """Added to `gradient`, for an embedding that the first and the last stage of a pipeline both
    have, since it is tied or MTP looks up tokens: one process rounds the sum of its two gradients
    to bf16 in each microbatch."""


BF16 = 2.0**-8
"""Unit roundoff of bfloat16: the largest relative error of one rounding."""

TF32 = 2.0**-11
"""The same of TF32, to which GPUs may round the factors of products in fp32."""

TIES = 1 / 32
"""Part of gradients' elements that two sums in fp32 may round to different bf16 numbers."""

ROUNDED_AGAIN = 1 / 2
"""The same of a sum whose parts are rounded before it, in another order than the reference's."""

OTHERS = 8 * BF16
"""Part of tokens that may get other experts by rounding in bf16; 0.006 were seen in six steps."""

SUMS = Bounds(1e-5, 1e-4, 1e-4, 16 * BF16, BF16 / 8, BF16, other_choices=OTHERS)
"""Of products of the same bf16 numbers, whose sums are in fp32."""

FLOAT8_SUMS = Bounds(1e-5, 1e-4, 1e-4, 64 * BF16, BF16 / 2, 4 * BF16)
"""The same in float8: numbers are 16 times as far apart, and errors 4 times as large."""


def of_products(unit: float) -> Bounds:
    """Return the bounds of products of rounded factors, that two computations round differently:
    on another mesh, compiled, or by another kernel of attention.

    A product of matrices A and B then is off by up to (2 u + n 2^-24) |A| |B|, for sums of n in
    fp32 (Blanchard, Higham, Lopez, Mary and Pranesh 2020, SIAM J. Sci. Comput. 42(3), C124: tensor
    cores). What becomes of that in a gradient is measured: e, the error of the reference's against
    its own in fp32 and on the same device. Two that are each off by e differ by up to 2 e. The loss
    is a mean over tokens, and may be off by u; the norm by 4 u. Adam's first updates are nearly
    signs, and a part of about u, where gradients are below their error, may turn: so updates follow
    the root of u.

    Args:
        unit: u, the largest relative error of one rounding.
    """
    return Bounds(
        unit,
        4 * unit,
        1e-4,
        0.5 * math.sqrt(unit / BF16),
        unit,
        4 * unit,
        other_choices=8 * unit,
        rounding=2.0,
    )


BOUNDS = {
    "fp32": Bounds(1e-5, 1e-4, 1e-4, 1e-3, 1e-5, 1e-4, later_gradient=1e-3, choice_gap=1e-5),
    "bf16 sums": SUMS,
    # products of numbers that were added up in parts, and rounded
    "bf16": of_products(BF16),
    "tf32": of_products(TF32),
    # after each step a weight may round to a neighbor, two roundings away: 18 until step 10
    "user types": replace(
        SUMS, later_loss=18 * BF16 / 8, later_grad_norm=18 * BF16, update_rounding=2.0
    ),
    "float8 sums": FLOAT8_SUMS,
    "float8 user types": replace(
        FLOAT8_SUMS, later_loss=72 * BF16 / 8, later_grad_norm=72 * BF16, update_rounding=2.0
    ),
    "float8": Bounds(4 * BF16, 16 * BF16, 1e-4, 1.0, 4 * BF16, 16 * BF16, rounding=2.0),
}
"""By `Case.bounds`."""


def bounds_of(case: Case) -> Bounds:
    """Return the entry of `BOUNDS`, widened for the config's types of gradients."""
    bounds, training = BOUNDS[case.bounds], case.config.training
    has_ends = case.config.parallelism.pipeline_parallel_degree > 1
    if has_ends and training.mixed_precision_param == "bfloat16":
        bounds = replace(bounds, tied=BF16)
    if training.mixed_precision_reduce == "bfloat16":
        # both ranks' parts and their sum are rounded, for each of 4 microbatches; uncorrelated
        # ones are together sqrt(4) times as large as their sum
        sums = 3 * BF16 * 2
        # Adam's update is nearly a sign, and as large a part of the signs may change; errors of
        # products come from elsewhere, so squares of gradients' errors add up
        update = math.sqrt(math.hypot(bounds.update**2, 4 * (bounds.gradient + sums)))
        return replace(
            bounds,
            gradient=bounds.gradient + sums,
            grad_norm=bounds.grad_norm + sums,
            update=update,
        )
    if training.dtype == "bfloat16":
        # each end of a pipeline rounds its own part as well, to store it
        tied = bounds.tied + 2 * BF16 if has_ends else 0.0
        return replace(bounds, stored=2 * BF16, different=TIES, tied=tied)
    return bounds
