"""What one rank, or the one process that ranks are compared with, measures."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from meshwright.metrics.sinks import Record

VALIDATED_STEP, SAVED_STEP, LAST_RESUMED_STEP = 1, 4, 6
LATER_STEP = 3
"""Whose gradients are compared as well, if there are experts: loads have then been summed."""

COMPARED = ("weights", "gradients", "updates", "later_gradients")
"""Initial weights; gradients of step 1, before clipping; weights after step `LAST_RESUMED_STEP`,
and EMAs, minus initial ones; of a model with experts, gradients of step `LATER_STEP`."""


@dataclass(frozen=True)
class ShardComparison:
    """A rank's shard of a tensor, and its distance from the same part of the reference."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    num_different: int
    """Elements that aren't equal to the bit."""
    error: float
    """Square of the 2-norm of the difference."""


@dataclass
class Measurement:
    """Of one rank."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    """Metrics of every step that don't follow from this machine's speed and memory, by name."""
    samples: dict[tuple[int, int], str] = field(default_factory=dict)
    """By step and index in the global batch: hash of the sample."""
    shards: dict[str, dict[str, ShardComparison]] = field(default_factory=dict)
    """By kind, of `COMPARED`, and name."""
    narrow_reductions: list[str] = field(default_factory=list)
    """Parameters whose gradients were summed over ranks in a narrower type than
    `training.mixed_precision_reduce`, and that type."""
    wrong_counts: list[str] = field(default_factory=list)
    """Loads and biases of routers that don't follow from the choices, to the bit, after a step."""
    other_choices: tuple[int, int] = (0, 0)
    """Tokens whose router would have chosen other experts than it was told, of how many."""
    choice_gap: float = 0.0
    """By how much, at most, scores of such a choice differ from the scores that were told."""
    validation: dict[str, float] = field(default_factory=dict)
    """Metrics of the validation, by name."""
    unlike_before: list[str] = field(default_factory=list)
    """Names of metrics that differ in a second validation, right after it."""
    wrong_in_checkpoint: list[str] = field(default_factory=list)
    """Tensors that differ, where this rank holds them, between the checkpoint and the job."""
    wrong_after_load: list[str] = field(default_factory=list)
    """Tensors that differ between the job that has loaded it and the one that has saved it."""
    wrong_after_resume: list[str] = field(default_factory=list)
    """Differences, to the bit, between the resumed job and the one that continued."""
    resumed_samples: dict[tuple[int, int], str] = field(default_factory=dict)
    """As `samples`, of the steps after the resume."""
    slack: list[dict[str, float]] = field(default_factory=list)
    """Of one process and each step, by metric of the user's module: `WatchedMetrics.slack`."""


@dataclass(frozen=True)
class Reference:
    """The measurements of one process."""

    seen: Measurement
    shapes: Mapping[str, tuple[int, ...]]
    """Of every parameter."""
    norms: Mapping[str, Mapping[str, float]]
    """2-norms, by kind, of `COMPARED`, and by name."""
    roundings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By kind, "gradients" and "updates", and by name: relative error against one process that has
    wider types, the largest among the layers' parameters of the name."""
    in_bf16: Collection[str] = ()
    """Parameters whose gradients are in bf16, so none of a module in fp32."""
