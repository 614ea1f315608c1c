"""The best mesh and modes of a job: legal ones enumerated, sized, timed, and ranked."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import tomli_w

from meshwright.config.job_config import JobConfig
from meshwright.errors import ConfigError, check
from meshwright.parallelisms.parallel_dims import ParallelDims
from meshwright.planning.devices import GIB, Device, overheads, verdict
from meshwright.planning.job import plan_job
from meshwright.planning.predict import Figures, in_processes, measure, predict
from meshwright.planning.remedies import Update, changed
from meshwright.planning.timing import Rates
from meshwright.preflight import Plan

CHOSEN = {
    "parallelism": (
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "tensor_parallel_degree",
        "context_parallel_degree",
        "pipeline_parallel_degree",
        "pipeline_parallel_schedule",
    ),
    "activation_checkpoint": ("mode",),
    "training": ("local_batch_size",),
}
"""Keys that a search sets."""


@dataclass(frozen=True)
class Choice:
    """A mesh with its modes, not checked yet."""

    mesh: dict[str, Any]
    """Keys of [parallelism]."""
    mode: str
    """Of recomputation."""
    local_batch_size: int

    def update(self, global_batch_size: int) -> Update:
        """Return the keys to change."""
        sizes = {"local_batch_size": self.local_batch_size, "global_batch_size": global_batch_size}
        return {
            "parallelism": self.mesh,
            "activation_checkpoint": {"mode": self.mode},
            "training": sizes,
        }


@dataclass(frozen=True)
class Candidate:
    """A choice that preflight allows."""

    choice: Choice
    config: JobConfig
    dims: ParallelDims
    figures: Figures

    @property
    def words(self) -> str:
        """It in short."""
        axes = [f"{axis} {size}" for axis, size in asdict(self.dims).items() if size > 1]
        parallelism = self.config.parallelism
        if self.dims.pp > 1:
            axes.append(parallelism.pipeline_parallel_schedule)
        mode = self.config.activation_checkpoint.mode
        batch = self.config.training.local_batch_size
        return f"{', '.join(axes) or 'one rank'}; recomputation {mode}; microbatch {batch}"


@dataclass(frozen=True)
class Found:
    """A search's outcome."""

    num_enumerated: int
    num_pruned: int
    """Whose weights, gradients and optimizer alone do not fit."""
    fitting: list[Candidate]
    """Best first."""
    winner_bytes: int
    """Peak of the first, with all of its layers simulated."""
    seconds: float


def search(
    config: JobConfig,
    ranks: int,
    device: Device,
    rates: list[Rates],
    workers: int,
    as_json: bool,
) -> str:
    """Return the ranked candidates, and the TOML that the winner differs by.

    Raises:
        ConfigError: if no candidate fits, or nothing is known of the device's rates.
    """
    check(
        bool(rates),
        "--device",
        device.name,
        "has no known rates to rank by",
        "name one of the table",
    )
    found = find(config, ranks, device, rates[-1], workers)
    toml = difference(config, found.fitting[0].config)
    tokens = found.fitting[0].config.training.global_batch_size * config.training.seq_len
    if as_json:
        rows = [
            {
                "candidate": one.words,
                "peak_bytes": one.figures.peak_bytes,
                "step_seconds": one.figures.seconds,
                "tokens_per_second": tokens / one.figures.seconds,
            }
            for one in found.fitting
        ]
        values = {
            "enumerated": found.num_enumerated,
            "pruned": found.num_pruned,
            "source": rates[-1].source,
            "candidates": rows,
            "winner_full_bytes": found.winner_bytes,
            "toml": toml,
        }
        return json.dumps(values, indent=1)
    lines = [
        f"{found.num_enumerated} candidates, {found.num_pruned} too large by weights alone, "
        f"{len(found.fitting)} fit; {found.seconds:.0f} s",
        f"ranked by tokens per second at {rates[-1].source}",
        f"  {'tokens/s':>12} {'GiB':>8}",
    ]
    for one in found.fitting[:12]:
        speed = tokens / one.figures.seconds
        lines.append(f"  {speed:>12,.0f} {one.figures.peak_bytes / GIB:>8.2f}  {one.words}")
    predicted = found.fitting[0].figures
    off = found.winner_bytes / predicted.peak_bytes - 1
    lines += [
        f"the first with all layers: {found.winner_bytes / GIB:.2f} GiB ({off:+.2%})",
        "",
        toml.rstrip(),
    ]
    return "\n".join(lines)


def find(config: JobConfig, ranks: int, device: Device, rates: Rates, workers: int) -> Found:
    """Enumerate, prune, predict and rank.

    What needs least is tried first, on every mesh: full recomputation and microbatches of one
    sequence. Only where that fits, modes that keep more are tried, and then larger microbatches.

    Raises:
        ConfigError: if no candidate fits.
    """
    start = time.perf_counter()
    # the global batch stays the config's, so more tokens per second are a shorter step
    batch = plan_job(config, ranks, is_gpu=device.is_gpu).config.training.global_batch_size
    waves = Waves(config, ranks, device, rates, workers, batch)
    meshes = list(_meshes(config, ranks, device))
    fitting = waves.run([Choice(mesh, "full", 1) for mesh in meshes])
    for mode in ("none", "selective"):
        fitting += waves.run(
            [Choice(one.choice.mesh, mode, 1) for one in fitting if one.choice.mode == "full"]
        )
    larger = list(fitting)
    for local in (2, 4):
        larger = waves.run([Choice(one.choice.mesh, one.choice.mode, local) for one in larger])
        fitting += larger
    fitting.sort(key=lambda one: one.figures.seconds)
    best = [one.choice for one in fitting if one.choice.mesh["pipeline_parallel_degree"] > 1][:2]
    interleaved = {"pipeline_parallel_schedule": "Interleaved1F1B"}
    fitting += waves.run([replace(choice, mesh=choice.mesh | interleaved) for choice in best])
    fitting.sort(key=lambda one: one.figures.seconds)
    check(
        bool(fitting), "--device", device.name, f"none of {waves.num_tried} candidates fits", "more"
    )
    best_config, stages = fitting[0].config, fitting[0].dims.pp
    ends = sorted({0, (stages - 1) * (ranks // stages)})
    tasks = [(best_config, ranks, rank, device, rates) for rank in ends]
    whole = [figures for _, figures in in_processes(tasks, _measure, workers)]
    peak = max(figures.peak_bytes for figures in whole if isinstance(figures, Figures))
    seconds = time.perf_counter() - start
    return Found(waves.num_legal, waves.num_pruned, fitting, peak, seconds)


class Waves:
    """Sizes candidates, many at a time.

    Attributes:
        num_legal: candidates that preflight allows.
        num_pruned: of these, whose weights, gradients and optimizer alone do not fit.
        num_tried: of these, whose peak was predicted.
    """

    def __init__(
        self,
        config: JobConfig,
        ranks: int,
        device: Device,
        rates: Rates,
        workers: int,
        batch: int,
    ) -> None:
        self._config, self._ranks, self._device, self._rates = config, ranks, device, rates
        self._workers, self._batch = workers, batch
        self.num_legal = self.num_pruned = self.num_tried = 0

    def run(self, choices: list[Choice]) -> list[Candidate]:
        """Return the candidates that fit, with their figures."""
        plans: list[tuple[Choice, Plan]] = []
        for choice in choices:
            try:
                candidate = changed(self._config, choice.update(self._batch))
                plan = plan_job(candidate, self._ranks, is_gpu=self._device.is_gpu)
            except ConfigError:
                continue
            self.num_legal += 1
            if sum(plan.least_bytes.values()) > self._device.memory_gib * GIB:
                self.num_pruned += 1
            else:
                plans.append((choice, plan))
        tasks = [(plan.config, self._ranks, self._device, self._rates) for _, plan in plans]
        found = []
        for index, figures in in_processes(tasks, size, self._workers):
            self.num_tried += 1
            print(f"\r{self.num_tried} candidates", end="", file=sys.stderr, flush=True)
            choice, plan = plans[index]
            if isinstance(figures, Figures) and _fits(figures, self._device):
                found.append(Candidate(choice, plan.config, plan.dims, figures))
        print(file=sys.stderr)
        return found


def size(config: JobConfig, ranks: int, device: Device, rates: Rates) -> Figures:
    """Predict the first rank and, of a pipeline, the first of the last stage: the most of both."""
    found = predict(config, ranks, 0, device, rates)
    stages = config.parallelism.pipeline_parallel_degree
    if stages == 1:
        return found
    last = predict(config, ranks, (stages - 1) * (ranks // stages), device, rates)
    peaks = {place: last.peaks.get(place, 0.0) for place in (*found.peaks, *last.peaks)}
    most = {place: max(peak, found.peaks.get(place, 0.0)) for place, peak in peaks.items()}
    return Figures(most, max(found.rounding, last.rounding), max(found.seconds, last.seconds))


def _measure(config: JobConfig, ranks: int, rank: int, device: Device, rates: Rates) -> Figures:
    return measure(plan_job(config, ranks, is_gpu=device.is_gpu), ranks, rank, device, rates)


def _fits(figures: Figures, device: Device) -> bool:
    peak, rounded = figures.peak_bytes, figures.rounded_bytes
    return verdict(device, peak, overheads(device, peak, rounded, 3)) == "fits"


def _meshes(config: JobConfig, ranks: int, device: Device) -> Iterator[dict[str, Any]]:
    """Yield degrees to try: tensor parallelism within a node, context parallelism for sequences
    from 16,384 tokens on, and copies of 64 ranks."""
    powers = [1 << i for i in range(ranks.bit_length())]
    tp = [n for n in powers if n <= min(device.per_node, ranks, 8)]
    cp = [n for n in powers if n <= 8] if config.training.seq_len >= 16384 else [1]
    pp = [n for n in powers if n <= 8]
    for tensor, context, pipeline, copies in product(tp, cp, pp, sorted({1, max(1, ranks // 64)})):
        if ranks % (tensor * context * pipeline * copies) == 0:
            yield {
                "tensor_parallel_degree": tensor,
                "context_parallel_degree": context,
                "pipeline_parallel_degree": pipeline,
                "data_parallel_replicate_degree": copies,
                "data_parallel_shard_degree": -1,
                "pipeline_parallel_schedule": "1F1B",
                "module_fqns_per_model_part": [],
            }


def difference(old: JobConfig, new: JobConfig) -> str:
    """Return the chosen keys in which `new` differs from `old`, as TOML."""
    sections: dict[str, dict[str, Any]] = {}
    for name, keys in CHOSEN.items():
        before, after = getattr(old, name), getattr(new, name)
        for key in keys:
            if getattr(before, key) != getattr(after, key):
                sections.setdefault(name, {})[key] = getattr(after, key)
    return tomli_w.dumps(sections)
