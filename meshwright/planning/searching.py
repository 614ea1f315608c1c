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
from meshwright.planning.remedies import changed
from meshwright.planning.timing import Rates
from meshwright.preflight import Plan

FULL_ABOVE = 0.005
"""Of the winner's peak: a larger difference to the full model is said."""
CHOSEN = {
    "parallelism": (
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "tensor_parallel_degree",
        "context_parallel_degree",
        "pipeline_parallel_degree",
        "pipeline_parallel_schedule",
        "fsdp_reshard_after_forward",
    ),
    "activation_checkpoint": ("mode",),
    "training": ("local_batch_size",),
}
"""Keys that a search sets."""


@dataclass(frozen=True)
class Candidate:
    """One legal mesh with its modes."""

    config: JobConfig
    dims: ParallelDims
    figures: Figures | None = None

    @property
    def words(self) -> str:
        """It in short."""
        axes = [f"{axis} {size}" for axis, size in asdict(self.dims).items() if size > 1]
        parallelism = self.config.parallelism
        if self.dims.pp > 1:
            axes.append(parallelism.pipeline_parallel_schedule)
        if parallelism.fsdp_reshard_after_forward != "default":
            axes.append(f"reshard {parallelism.fsdp_reshard_after_forward}")
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
    winner: Figures
    """Of the first, all layers simulated."""
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
                "peak_bytes": round(one.figures.peak_bytes),
                "step_seconds": one.figures.seconds,
                "tokens_per_second": tokens / one.figures.seconds,
            }
            for one in found.fitting
            if one.figures is not None
        ]
        values = {
            "enumerated": found.num_enumerated,
            "pruned": found.num_pruned,
            "source": rates[-1].source,
            "candidates": rows,
            "winner_full": asdict(found.winner),
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
        assert one.figures is not None
        speed = tokens / one.figures.seconds
        lines.append(f"  {speed:>12,.0f} {one.figures.peak_bytes / GIB:>8.2f}  {one.words}")
    predicted = found.fitting[0].figures
    assert predicted is not None
    off = found.winner.peak_bytes / predicted.peak_bytes - 1
    lines += [
        f"the first with all layers: {found.winner.peak_bytes / GIB:.2f} GiB ({off:+.2%})",
        "",
        toml.rstrip(),
    ]
    return "\n".join(lines)


def find(config: JobConfig, ranks: int, device: Device, rates: Rates, workers: int) -> Found:
    """Enumerate, prune, predict and rank.

    Raises:
        ConfigError: if no candidate fits.
    """
    start = time.perf_counter()
    legal = list(enumerate_legal(config, ranks, device))
    memory = device.memory_gib * GIB
    small = [Candidate(plan.config, plan.dims) for plan in legal if _least(plan) <= memory]
    # the global batch stays the config's, so more tokens per second are a shorter step
    tasks = [(one.config, ranks, 0, device, rates) for one in small]
    sized = []
    for count, (index, figures) in enumerate(in_processes(tasks, predict, workers), start=1):
        print(f"\r{count} of {len(tasks)} candidates", end="", file=sys.stderr, flush=True)
        if isinstance(figures, Figures):
            sized.append(replace(small[index], figures=figures))
    print(file=sys.stderr)
    fitting = [one for one in sized if one.figures and _fits(one.figures, device)]
    check(
        bool(fitting),
        "--device",
        device.name,
        f"none of {len(legal)} candidates fits",
        "more ranks",
    )
    fitting.sort(key=lambda one: one.figures.seconds if one.figures else 0.0)
    ((_, winner),) = in_processes([(fitting[0].config, ranks, device, rates)], _measure, 1)
    assert isinstance(winner, Figures)
    return Found(len(legal), len(legal) - len(small), fitting, winner, time.perf_counter() - start)


def _measure(config: JobConfig, ranks: int, device: Device, rates: Rates) -> Figures:
    return measure(plan_job(config, ranks, is_gpu=device.is_gpu), ranks, 0, device, rates)


def _least(plan: Plan) -> float:
    return sum(plan.least_bytes.values())


def _fits(figures: Figures, device: Device) -> bool:
    peak, rounded = round(figures.peak_bytes), round(figures.rounded_bytes)
    return verdict(device, peak, overheads(device, peak, rounded, 3)) == "fits"


def enumerate_legal(config: JobConfig, ranks: int, device: Device) -> Iterator[Plan]:
    """Yield every mesh and mode that preflight allows, with the global batch of `config`.

    Tensor parallelism stays within a node. Context parallelism is only for sequences from 16,384
    tokens on.
    """
    batch = plan_job(config, ranks, is_gpu=device.is_gpu).config.training.global_batch_size
    node = min(device.per_node, ranks)
    powers = [1 << i for i in range(ranks.bit_length())]
    tp = [n for n in powers if n <= min(node, 8)]
    cp = [n for n in powers if n <= 8] if config.training.seq_len >= 16384 else [1]
    pp = [n for n in powers if n <= 16]
    replicate = sorted({1, max(1, ranks // 64), max(1, ranks // 128)})
    modes = ("none", "selective", "full")
    seen = set[str]()
    for tensor, context, pipeline, copies, mode, local, policy in product(
        tp, cp, pp, replicate, modes, (1, 2, 4), ("default", "never")
    ):
        if (pipeline > 1 and policy == "never") or (policy == "never" and mode == "none"):
            continue  # never is a pipeline's default; and what is recomputed saves more than it
        for schedule in ("1F1B", "Interleaved1F1B") if pipeline > 1 else ("1F1B",):
            parallelism = {
                "tensor_parallel_degree": tensor,
                "context_parallel_degree": context,
                "pipeline_parallel_degree": pipeline,
                "data_parallel_replicate_degree": copies,
                "data_parallel_shard_degree": -1,
                "fsdp_reshard_after_forward": policy,
                "pipeline_parallel_schedule": schedule,
                "module_fqns_per_model_part": [],
            }
            candidate = changed(
                config,
                {
                    "parallelism": parallelism,
                    "activation_checkpoint": {"mode": mode},
                    "training": {"local_batch_size": local, "global_batch_size": batch},
                },
            )
            try:
                plan = plan_job(candidate, ranks, is_gpu=device.is_gpu)
            except ConfigError:
                continue
            key = plan.config.model_dump_json()
            if key not in seen:
                seen.add(key)
                yield plan


def difference(old: JobConfig, new: JobConfig) -> str:
    """Return the chosen keys in which `new` differs from `old`, as TOML."""
    sections: dict[str, dict[str, Any]] = {}
    for name, keys in CHOSEN.items():
        before, after = getattr(old, name), getattr(new, name)
        for key in keys:
            if getattr(before, key) != getattr(after, key):
                sections.setdefault(name, {})[key] = getattr(after, key)
    return tomli_w.dumps(sections)
