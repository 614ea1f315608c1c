"""Switches that might make a job fit, each tried."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import tomli_w

from meshwright.config.job_config import JobConfig
from meshwright.config.update import Update, changed
from meshwright.errors import ConfigError, numbered
from meshwright.planning.devices import GIB, Device, verdict
from meshwright.planning.job import plan_job
from meshwright.planning.predict import (
    Figures,
    beside_tensors,
    in_processes,
    predict_config,
    telling_ranks,
)
from meshwright.planning.report import RankPlan
from meshwright.preflight import Plan


@dataclass(frozen=True)
class Remedy:
    """A change of the config, and the peak that it leads to."""

    change: str
    peak_bytes: int
    verdict: str


def find(job: Plan, ranks: int, shown: RankPlan, device: Device, workers: int) -> list[Remedy]:
    """Try every switch that this job can take, from two shallow depths each; the lowest first.

    Args:
        shown: the rank that does not fit.
    """
    plans: dict[str, Plan] = {}
    for change, update in _switches(job.config, ranks):
        with suppress(ConfigError):
            plans[change] = plan_job(changed(job.config, update), ranks, is_gpu=device.is_gpu)
    tries = [(change, rank) for change, plan in plans.items() for rank in telling_ranks(plan)]
    if plans:
        said = f"trying {numbered(len(plans), 'change')} that might make it fit ..."
        print(said, file=sys.stderr, flush=True)
    tasks = [(plans[change].config, ranks, rank, device) for change, rank in tries]
    found: dict[str, Remedy] = {}
    refused = set()
    for index, figures in in_processes(tasks, predict_config, workers):
        change, _ = tries[index]
        if not isinstance(figures, Figures):
            refused.add(change)
        else:
            modelled, peak = beside_tensors(figures, plans[change], device), figures.peak_bytes
            tried = Remedy(change, peak, verdict(device, peak, modelled))
            # a job's peak is that of the rank that needs most
            found[change] = max(tried, found.get(change, tried), key=lambda one: one.peak_bytes)
    judged = [one for change, one in found.items() if change not in refused]
    saving = [one for one in judged if one.peak_bytes < 0.99 * shown.peak.num_bytes]
    return sorted(saving, key=lambda one: one.peak_bytes)


def lines(found: list[Remedy]) -> list[str]:
    """Return the remedies as text."""
    if not found:
        return []
    return ["", "with one change, from two shallow depths:"] + [
        f"  {one.peak_bytes / GIB:8.2f} GiB, {one.verdict:12} {one.change}" for one in found
    ]


def _switches(config: JobConfig, ranks: int) -> list[tuple[str, Update]]:
    """Return every switch that saves memory, as a person would write it."""
    parallelism, training = config.parallelism, config.training
    found: list[tuple[str, Update]] = []

    def add(section: str, **keys: Any) -> None:
        old = getattr(config, section)
        if any(getattr(old, key) != value for key, value in keys.items()):
            words = (f"{section}.{tomli_w.dumps({key: keys[key]}).strip()}" for key in keys)
            found.append((", ".join(words), {section: keys}))

    for mode in ("selective", "full"):
        add("activation_checkpoint", mode=mode)
    if training.local_batch_size > 1:
        add("training", local_batch_size=training.local_batch_size // 2)
    add("training", enable_cpu_offload=True)
    add("training", mixed_precision_reduce="bfloat16")
    add("parallelism", fsdp_reshard_after_forward="always")
    add("parallelism", fsdp_reduce_gradients="every_microbatch")
    if training.max_norm == float("inf"):
        add("optimizer", early_step_in_backward=True)
    shard = {"data_parallel_shard_degree": -1}
    if parallelism.data_parallel_replicate_degree > 1:
        add("parallelism", data_parallel_replicate_degree=1, **shard)
    for key in ("tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree"):
        degree = 2 * getattr(parallelism, key)
        if ranks % degree == 0:
            add("parallelism", **{key: degree}, **shard)
    return found
