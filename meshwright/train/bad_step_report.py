"""Reports the steps that were skipped: in the log, in a file, and as the error that ends a job."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.config.job_config import JobConfig
from meshwright.metrics.observers import Observer
from meshwright.metrics.sinks import JsonLines, SafeSink
from meshwright.system.errors import TrainingError
from meshwright.system.log import logger
from meshwright.train.bad_steps import BadStep, BadStepDetector

FILE = "skipped_steps.jsonl"


class BadStepReporter(Observer):
    """Reports steps that were skipped, once each, and ends the job at one that is too many.

    Args:
        config: `FILE` in its dump folder loses records of steps after `step`.
        sources: names of the sources of samples.
        step: the last that was taken before this process.
        samples_read: how many samples of each source had been read by then.
    """

    def __init__(
        self,
        config: JobConfig,
        device: torch.device,
        *,
        sources: Sequence[str],
        step: int,
        samples_read: tuple[int, ...],
    ) -> None:
        self._config, self._sources, self._device = config.bad_steps, sources, device
        self._is_early = config.optimizer.early_step_in_backward
        self._skipped: list[int] = []
        self._may_be_empty = bool(config.training.exclude)
        self.detector = BadStepDetector(device, self._config, may_be_empty=self._may_be_empty)
        self._num_seen = 0
        # by step: how many samples of each source had been read behind it
        self._counts = {step: samples_read or (0,) * len(sources)}
        self._file: SafeSink | None = None
        path = Path(config.job.dump_folder) / FILE
        is_wanted = self._config.policy == "skip" or path.exists()
        if is_wanted and dist.get_rank() == 0:
            self._file = SafeSink(FILE, partial(JsonLines, path, step))

    def after_step(self, step: int, samples_read: tuple[int, ...]) -> None:
        self._counts[step] = samples_read

    def check(self) -> None:
        """Report the steps skipped since the last call; waits for the device. Collective.

        Raises:
            TrainingError: on every rank, if there were more skipped steps than allowed.
        """
        for bad, ranks in _with_ranks(self.detector.bad_steps(self._num_seen)):
            if self._num_seen >= self.detector.allowed:
                raise TrainingError(self._why_it_ends(bad, ranks))
            self._report(bad, ranks)
            self._num_seen += 1
        last = max(self._counts)
        self._counts = {last: self._counts[last]}

    def figures(self) -> dict[str, float]:
        """Return the number of steps skipped so far, as of the last `check`."""
        return {"optim/skipped_steps": len(self._skipped)} if self._config.policy == "skip" else {}

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": list(self._skipped), "statistics": self.detector.statistics()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._skipped = list(state.get("skipped", ()))
        self.detector = BadStepDetector(
            self._device,
            self._config,
            len(self._skipped),
            state.get("statistics"),
            may_be_empty=self._may_be_empty,
        )

    def __exit__(self, *_: object) -> None:
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
            f"deviations of {bad.deviations[index]:.3g} above its EMA "
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
    """Return each step with the ranks on whose samples its loss wasn't finite. Collective if any
    wasn't."""
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
