"""Finds non-finite steps and loss spikes on the device, and skips their updates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.config.training import BadSteps


@dataclass(frozen=True)
class BadStep:
    """One step whose update was held back, and why. Of two numbers, the loss's is the first, the
    gradient norm's the second."""

    step: int
    values: tuple[float, float]
    means: tuple[float, float]
    """Running ones, of the good steps before it."""
    deviations: tuple[float, float]
    is_finite_here: bool
    """Whether the loss on this rank's own samples was."""
    num_labels: int
    """Labels of the global batch that count; 0: there is no mean of them."""


class BadStepDetector:
    """Judges each step on the device, by its global loss and gradient norm.

    The update of a skipped step is held back. Once there are more of them than allowed, so is every
    update that follows: the weights stay those before the step that was one too many, until the
    host looks. All ranks see the same metrics, so they judge alike.

    Mean and variance are moving averages over good steps, exponentially weighted with 1/n for the
    n-th and 1/`spike_window` from step `spike_window` on, before which nothing is a spike. Source:
    Finch 2009, "Incremental calculation of weighted mean and variance", the last part; with 1/n it
    is Welford's 1962 algorithm. Skipping steps whose loss or norm is k deviations off is the rule
    of OLMo-core's SkipStepOptimizer, which keeps a whole window.

    Args:
        config: None: the default, which allows no such step.
        num_before: steps that were skipped before this process; they count towards the budget. If
            they have used it up, the next one stops the job.
        statistics: of the checkpoint that is resumed from.
        may_be_empty: a batch without any label that counts isn't bad: `training.exclude` has left
            out all of them. Its update is held back all the same, since there is no mean.
    """

    def __init__(
        self,
        device: torch.device,
        config: BadSteps | None = None,
        num_before: int = 0,
        statistics: Mapping[str, Any] | None = None,
        *,
        may_be_empty: bool = False,
    ) -> None:
        config = config or BadSteps()
        self.allowed = max(config.budget - num_before, 0) if config.policy == "skip" else 0
        """Skipped steps of this process that don't end the job."""
        self._may_be_empty = may_be_empty
        self._spike_std, self._window = config.spike_std, config.spike_window
        self._num_bad = torch.zeros((), dtype=torch.int64, device=device)
        # one row a skipped step, one for the step that is too many, and one that is written at
        # every step and counts only if it was bad: doubles, which hold every step's number
        self._rows = torch.zeros(self.allowed + 2, 9, dtype=torch.float64, device=device)
        # while spikes aren't looked for, statistics would grow old
        known = (statistics or {}) if config.spike_std else {}
        self._num_good = torch.full((), known.get("num_good", 0), device=device)
        # doubles: the square of a norm may be beyond the floats, and would stay in the variance
        self._mean, self._variance = (
            torch.tensor(known.get(name, [0.0, 0.0]), dtype=torch.float64, device=device)
            for name in ("mean", "variance")
        )

    @property
    def is_stopped(self) -> Tensor:
        """() bool: more steps were bad than are allowed, and no update is made any more."""
        return self._num_bad > self.allowed

    def judge(
        self, step: int, loss: Tensor, grad_norm: Tensor, is_finite_here: Tensor, num_labels: Tensor
    ) -> Tensor:
        """Note a step's metrics. Waits for nothing.

        Args:
            loss, grad_norm: () fp32, the same on every rank; so is `num_labels`, () int64.
            is_finite_here: () bool: whether the loss on this rank's own samples is finite.

        Returns:
            () bool: whether its update is to be held back.
        """
        values = torch.stack([loss, grad_norm])
        deviation = self._variance.sqrt()
        is_good = torch.isfinite(values)
        if self._spike_std:
            is_warming_up = self._num_good < self._window
            is_good &= (values <= self._mean + self._spike_std * deviation) | is_warming_up
        is_good = is_good.all()
        is_bad = torch.logical_not(is_good)
        number = torch.full((1,), step, dtype=self._rows.dtype, device=values.device)
        rest = is_finite_here.view(1), num_labels.view(1)
        row = torch.cat([number, values, self._mean, deviation, *rest])
        self._rows.index_copy_(0, self._num_bad.view(1), row.view(1, -1))
        is_counted = is_bad & (num_labels > 0) if self._may_be_empty else is_bad
        self._num_bad += is_counted & (self._num_bad <= self.allowed)
        if self._spike_std:
            self._take_in(values, is_good)
        return is_bad | self.is_stopped

    def _take_in(self, values: Tensor, is_good: Tensor) -> None:
        """Move mean and variance towards `values`, if they are good."""
        self._num_good += is_good
        weight = self._num_good.clamp(1, self._window).double().reciprocal()
        distance = values - self._mean
        mean = self._mean + weight * distance
        variance = (1 - weight) * (self._variance + weight * distance.square())
        # in a product with 0, a non-finite value would stay so
        self._mean = torch.where(is_good, mean, self._mean)
        self._variance = torch.where(is_good, variance, self._variance)

    def bad_steps(self, first: int = 0) -> list[BadStep]:
        """Return this process's skipped steps without the `first` ones. Waits for the device."""
        num_bad = int(self._num_bad.item())
        rows = self._rows[first:num_bad].tolist() if num_bad > first else []
        return [
            BadStep(
                int(step), (loss, norm), (mean, its_mean), (std, its_std), bool(here), int(labels)
            )
            for step, loss, norm, mean, its_mean, std, its_std, here, labels in rows
        ]

    def statistics(self) -> dict[str, Any]:
        """For a checkpoint of any mesh: JSON from which they come back to the bit. Waits for the
        device."""
        return {
            "num_good": int(self._num_good.item()),
            "mean": self._mean.tolist(),
            "variance": self._variance.tolist(),
        }
