"""Takes intervals of steps in a process of its own, whose package may be a different checkout's."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright.commands.diverge.flips import Known, find_flips
from meshwright.commands.diverge.trace import Trace
from meshwright.commands.diverge.tries import Flip
from meshwright.commands.replay.command import on_ranks
from meshwright.commands.replay.job import take_steps, with_twin
from meshwright.config.loader import load_config
from meshwright.models.loss import Batch
from meshwright.system.errors import EXIT_CONFIG, ConfigError
from meshwright.system.modules import source_hash
from meshwright.train.running_job import RunningJob


@dataclass(frozen=True)
class Interval:
    """Steps to take, from a checkpoint on."""

    config: str
    """Path of a TOML, which names the checkpoint."""
    ranks: int
    last: int
    traced: int = 0
    """The step whose values are wanted; 0: none."""
    threads: int = 0
    """Of each rank on a CPU; 0: torch's choice."""
    has_twin: bool = False
    """The same once more with other microbatches."""
    known: Known | None = None
    """Of a flipped bit in the last step; None: none is looked for."""


def take_interval(interval: Interval) -> list[dict[str, Any]]:
    """Return the steps of an interval, and of its twin, if there is one. Collective."""
    config, has_twin = load_config([interval.config]), interval.has_twin
    take = partial(_take, interval)
    return with_twin(config, interval.ranks, take, lambda _: has_twin, interval.threads)


def _take(interval: Interval, job: RunningJob) -> dict[str, Any]:
    """Return "steps", lines as those of steps.jsonl by step, "trace", and "flips": those that
    explain the last step."""
    trace, sums = Trace(interval.traced), dict[int, dict[str, list[str]]]()
    flips = list[Flip]()

    def look(job: RunningJob, step: int, batches: list[Batch]) -> None:
        trace.begin(job, step, batches)
        # before the first step there is no optimizer state to put back
        if step == interval.last > 1 and interval.known is not None:
            behind = range(step + 1, step + 1 + interval.known.steps_behind)
            later = {other: next(job.loader).batches for other in behind}
            moved = {other: [one.to(job.device) for one in of] for other, of in later.items()}
            flips.extend(find_flips(job, {step: batches} | moved, interval.known))

    def note(step: int) -> None:
        trace.end(job, step)
        sums[step] = job.step_record.fingerprints()

    steps = take_steps(job, interval.last, look, note=note)
    rows = {row["step"]: {**row, **sums[row["step"]]} for row in steps}
    return {"steps": rows, "trace": trace.entries, "flips": flips}


def take_all(intervals: Sequence[Interval]) -> list[list[dict[str, Any]]]:
    """Return the results of `take_interval`, each on as many ranks as it wants."""
    has_gpus = torch.cuda.is_available()
    return [on_ranks(take_interval, one, one.ranks, has_gpus) for one in intervals]


def main(request: str, result: str) -> None:
    """Take the intervals that the file `request` lists; write the hash of this source, and the
    results. Exit as a command does if one of them can't be taken."""
    intervals = [Interval(**one) for one in json.loads(Path(request).read_text("utf-8"))]
    try:
        taken = take_all(intervals)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    torch.save({"source": source_hash(), "intervals": taken}, result)
