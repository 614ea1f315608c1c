"""The exact record of steps, steps.jsonl: what a replay of a step is compared with."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.metrics.observers import Observer
from meshwright.metrics.sinks import JsonLines, Record, SafeSink
from meshwright.models.parameter import block_of
from meshwright.train.fingerprints import fingerprints
from meshwright.train.resolve import ResolvedJob

if TYPE_CHECKING:
    from meshwright.train.trainer import StepResult, Trainer

FILE = "steps.jsonl"


class StepRecord(Observer):
    """Writes a line for each logged step, with fingerprints of the weights and of the optimizer's
    state; with `metrics.every_step` also one for each step between.

    A line has "step", "loss" and "grad_norm"; with `metrics.grad_norm_by_group` "norms", a list in
    the order of the groups; and at logged steps "weights" and "optimizer", of each group. The first
    line of a run is of step 0: the initial weights, and "groups", the names.

    Attributes:
        groups: names of groups of parameters, in the order of the lists.

    Args:
        resolved: lines after its `resume_step` are removed.
    """

    def __init__(self, resolved: ResolvedJob, trainer: "Trainer") -> None:
        self._trainer, self._is_new = trainer, resolved.resume_step == 0
        self.groups = list(dict.fromkeys(map(block_of, resolved.model_args.table.parameters)))
        self._keeps_all = resolved.config.metrics.every_step
        self._kept: list[tuple[int, Tensor]] = []
        self._file: SafeSink | None = None
        if dist.get_rank() == 0:
            path = Path(resolved.config.job.dump_folder) / FILE
            self._file = SafeSink(FILE, partial(JsonLines, path, resolved.resume_step))

    def __enter__(self) -> "StepRecord":
        if self._is_new:
            self._write({"step": 0, "groups": self.groups} | self.fingerprints())
        return self

    def add(self, step: int, result: "StepResult") -> None:
        """Keep the results of a step on the device, until the next report."""
        parts = [result.loss.view(1), result.grad_norm.view(1)]
        if result.group_norms is not None:
            parts.append(result.group_norms)
        if not self._keeps_all:
            self._kept.clear()
        self._kept.append((step, torch.cat(parts)))

    def on_report(self, record: Record) -> None:
        rows = torch.stack([values for _, values in self._kept]).tolist()
        for (step, _), (loss, grad_norm, *norms) in zip(self._kept, rows, strict=True):
            line: dict[str, Any] = {"step": step, "loss": loss, "grad_norm": grad_norm}
            if norms:
                line["norms"] = norms
            self._write(line | (self.fingerprints() if step == record["step"] else {}))
        self._kept.clear()

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def fingerprints(self) -> dict[str, list[str]]:
        """Return the sums of bits of weights and of optimizer state, by group. Collective."""
        model = self._trainer.model
        device = torch.device(self._trainer.meshes.world.device_type)
        state = self._trainer.optimizer.state
        return fingerprints(model.named_parameters_once(), state, self.groups, device)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(line)
