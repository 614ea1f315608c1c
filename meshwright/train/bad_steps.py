"""Finds bad steps on the device, holds their updates back, and reports them on the host."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.config.job_config import JobConfig
from meshwright.config.training import BadSteps
from meshwright.datasets.stream import Cursor
from meshwright.metrics.sinks import JsonLines, SafeSink
from meshwright.system.errors import TrainingError
from meshwright.system.log import logger


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

    The update of a bad step is held back. Once there are more of them than are allowed, so is every
    update that follows: the weights stay those before the step that was one too many, until the
    host looks. All ranks see the same figures, so they judge alike.

    The running mean and variance are of good steps alone: exponentially weighted with 1/n for the
    n-th and 1/`spike_window` from step `spike_window` on, before which nothing is a spike. Source:
    Finch 2009, "Incremental calculation of weighted mean and variance", the last part; with 1/n it
    is Welford's 1962 algorithm. Skipping steps whose loss or norm is k deviations off is the rule
    of OLMo-core's SkipStepOptimizer, which keeps a whole window.

    Args:
        config: None: the default, which allows no bad step.
        num_before: steps that were skipped before this process; they count towards the budget. If
            they have used it up, the next one stops the job.
        statistics: of the checkpoint that is resumed from.
    """

    def __init__(
        self,
        device: torch.device,
        config: BadSteps | None = None,
        num_before: int = 0,
        statistics: Mapping[str, Any] | None = None,
    ) -> None:
        config = config or BadSteps()
        self.allowed = max(config.budget - num_before, 0) if config.policy == "skip" else 0
        """Bad steps of this process that do not end the job."""
        self._spike_std, self._window = config.spike_std, config.spike_window
        self._num_bad = torch.zeros((), dtype=torch.int64, device=device)
        # one row a bad step, one for the step that is too many, and one that is written at every
        # step and counts only if it was bad: doubles, which hold every step's number
        self._rows = torch.zeros(self.allowed + 2, 9, dtype=torch.float64, device=device)
        # while spikes are not looked for, statistics would grow old
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
        """Note a step's figures. Waits for nothing.

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
        self._num_bad += is_bad & (self._num_bad <= self.allowed)
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
        """Return the bad steps of this process, without the `first` ones. Waits for the device."""
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


FILE = "skipped_steps.jsonl"


class BadStepReporter:
    """Reports steps that were skipped, once each, and ends the job at one that is too many.

    Args:
        config: `FILE` in its dump folder loses records of steps after `step`.
        sources: names of the sources of samples.
        step: the last that was taken before this process.
        cursor: where the samples of the next one begin.
        saved: `state` of the checkpoint that is resumed from.
    """

    def __init__(
        self,
        config: JobConfig,
        device: torch.device,
        *,
        sources: Sequence[str],
        step: int,
        cursor: Cursor,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        saved = saved or {}
        self._config, self._sources = config.bad_steps, sources
        self._is_early = config.optimizer.early_step_in_backward
        self._skipped: list[int] = list(saved.get("skipped", ()))
        self.detector = BadStepDetector(
            device, self._config, len(self._skipped), saved.get("statistics")
        )
        self._num_seen = 0
        # by step: how many samples of each source had been read behind it
        self._counts = {step: cursor.counts or (0,) * len(sources)}
        self._file: SafeSink | None = None
        path = Path(config.job.dump_folder) / FILE
        is_wanted = self._config.policy == "skip" or path.exists()
        if is_wanted and dist.get_rank() == 0:
            self._file = SafeSink(FILE, partial(JsonLines, path, step))

    @property
    def figures(self) -> dict[str, float]:
        """For reports: steps skipped so far, as of the last `raise_or_report`."""
        return {"optim/skipped_steps": len(self._skipped)} if self._config.policy == "skip" else {}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, on any mesh: JSON. Call after `raise_or_report`."""
        return {"skipped": list(self._skipped), "statistics": self.detector.statistics()}

    def count(self, step: int, cursor: Cursor) -> None:
        """Note where the samples of `step` end; waits for nothing."""
        self._counts[step] = cursor.counts

    def raise_or_report(self) -> None:
        """Report the steps skipped since the last look; waits for the device. Call before
        every save. Collective.

        Raises:
            TrainingError: on every rank, if there were more bad steps than allowed.
        """
        for bad, ranks in _with_ranks(self.detector.bad_steps(self._num_seen)):
            if self._num_seen >= self.detector.allowed:
                raise TrainingError(self._why_it_ends(bad, ranks))
            self._report(bad, ranks)
            self._num_seen += 1
        last = max(self._counts)
        self._counts = {last: self._counts[last]}

    def close(self) -> None:
        """Nothing is reported afterwards."""
        if self._file is not None:
            self._file.close()

    def _report(self, bad: BadStep, ranks: Sequence[int]) -> None:
        self._skipped.append(bad.step)
        if self._file is None:  # the first rank says it
            return
        reason, ranges = self._reason(bad, ranks), self._samples(bad.step)
        logger.warning(
            "step %d was skipped (%d of at most %d): %s; %s",
            bad.step,
            len(self._skipped),
            self._config.budget,
            reason,
            _in_words(ranges),
        )
        record: dict[str, Any] = {"step": bad.step, "reason": reason, "ranks": list(ranks)}
        for index, name in enumerate(("loss", "grad_norm")):
            record[name] = bad.values[index]
            record[f"{name}_mean"] = bad.means[index]
            record[f"{name}_deviation"] = bad.deviations[index]
        self._file.write(record | {"samples": ranges})

    def _reason(self, bad: BadStep, ranks: Sequence[int]) -> str:
        loss, grad_norm = bad.values
        if bad.num_labels == 0:
            return "none of its labels counts in the loss, so there is no mean"
        if not math.isfinite(loss):
            where = f"on rank {', '.join(map(str, ranks))}" if ranks else "as a sum over ranks"
            return f"non-finite loss {where}"
        if not math.isfinite(grad_norm):
            return "non-finite gradient norm (every loss was finite)"
        return " and ".join(
            f"{name} {bad.values[index]:.5g} (more than {self._config.spike_std:g} standard "
            f"deviations of {bad.deviations[index]:.3g} above its running mean "
            f"{bad.means[index]:.5g})"
            for index, name in enumerate(("loss", "gradient norm"))
            if bad.values[index] > bad.means[index] + self._config.spike_std * bad.deviations[index]
        )

    def _samples(self, step: int) -> dict[str, tuple[int, int]]:
        """Return the first and the last index of the step's samples, by source."""
        before, behind = self._counts[step - 1], self._counts[step]
        return {
            name: (first, after - 1)
            for name, first, after in zip(self._sources, before, behind, strict=True)
            if after > first
        }

    def _why_it_ends(self, bad: BadStep, ranks: Sequence[int]) -> str:
        weights = (
            "that step may have updated a part of the weights (optimizer.early_step_in_backward), "
            if self._is_early
            else f"the weights are as they were after step {bad.step - 1}, "
        )
        used_up = ""
        if self._config.policy == "skip":
            steps = ", ".join(map(str, self._skipped))
            used_up = f"; bad_steps.budget = {self._config.budget} is used up (steps {steps})"
        return (
            f"{self._reason(bad, ranks)} at step {bad.step}; {weights}and no checkpoint was saved "
            f"since; {_in_words(self._samples(bad.step))}{used_up}"
        )


def _with_ranks(bad_steps: Sequence[BadStep]) -> list[tuple[BadStep, list[int]]]:
    """Return each step with the ranks on whose samples its loss was not finite. Collective if any
    was not."""
    mine = [bad.is_finite_here for bad in bad_steps]
    is_finite: list[list[bool]] = [mine]
    if not all(math.isfinite(bad.values[0]) for bad in bad_steps):
        is_finite *= dist.get_world_size()
        dist.all_gather_object(is_finite, mine)
    return [
        (bad, [rank for rank, theirs in enumerate(is_finite) if not theirs[index]])
        for index, bad in enumerate(bad_steps)
    ]


def _in_words(ranges: Mapping[str, tuple[int, int]]) -> str:
    parts = (f"{first} to {last} of {name}" for name, (first, last) in ranges.items())
    return f"its samples: {', '.join(parts)}"
