"""`meshwright plan`, once its command line is read and checked."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import tomli_w

from meshwright.commands.options import write_output
from meshwright.commands.plan import report
from meshwright.commands.plan import search as searching
from meshwright.commands.plan.devices import GIB, Device, Rates, estimated, find_device
from meshwright.commands.plan.predict import (
    Need,
    in_processes,
    need_of,
    telling_ranks,
    with_compile,
)
from meshwright.commands.plan.report import RankPlan
from meshwright.commands.plan.simulate import plan_job, worst_imbalance
from meshwright.config.job_config import JobConfig, Update, changed
from meshwright.system.errors import ConfigError, check, numbered
from meshwright.train.preflight import Plan


def plan(config: JobConfig, given: Namespace) -> str:
    """Return the plan of the rank that `given` names, of the ranks that need most, or of the first
    rank of every place of the pipeline.

    Raises:
        ConfigError: if the job cannot run.
    """
    world_size = given.world_size
    device = find_device(given.device, world_size)
    job = plan_job(config, world_size, is_gpu=device.is_gpu)
    worst = math.floor(1000 * worst_imbalance(job)) / 1000
    rule = f"experts of a rank of this job get at most {worst} times the mean of rows"
    check(given.imbalance <= worst, "--imbalance", given.imbalance, rule, f"--imbalance {worst}")
    rates = _rates(config, job, device, given.imbalance)
    ranks = telling_ranks(job) if given.rank is None else [given.rank]
    if given.all_stages:
        ranks = [*job.dims.first_ranks]
    tasks = [(job.config, world_size, rank, rates) for rank in ranks]
    if len(ranks) == 1:
        found = [report.plan_rank(*tasks[0])]
    else:
        found = in_processes(tasks, report.plan_rank, given.workers, "simulated ranks")
    shown = report.neediest(found)
    remedies = []
    if shown.verdict != "fits" and not given.no_remedies:
        remedies = find_remedies(job, shown, rates, given.workers)
    if given.html is not None:
        write_output(given.html, report.to_html(job, found, device), "--html")
    if given.json:
        return json.dumps(report.to_json(job, found, device, map(asdict, remedies)), indent=1)
    lines = [f"  {x.peak_bytes / GIB:8.2f} GiB, {x.verdict:12} {x.change}" for x in remedies]
    if remedies:
        lines = ["", "with one change, from two shallow depths:", *lines]
    return "\n".join([report.to_text(job, found, device), *lines])


def search(config: JobConfig, given: Namespace) -> str:
    """Return the best mesh and modes for the job, as a table and as TOML.

    Raises:
        ConfigError: if nothing fits.
    """
    device = find_device(given.device, given.world_size)
    job = plan_job(config, given.world_size, is_gpu=device.is_gpu)
    rule = "the model has no experts"
    is_used = given.imbalance == 1 or job.model_args.table.mixtures
    check(bool(is_used), "--imbalance", given.imbalance, rule, "leave it out")
    rates = _rates(config, job, device, given.imbalance)
    found = searching.find(config, given.world_size, rates, given.workers)
    return json.dumps(asdict(found), indent=1) if given.json else searching.to_text(found)


def _rates(config: JobConfig, job: Plan, device: Device, imbalance: float) -> Rates:
    """Return the rates of blocks that are compiled if the job's will be."""
    is_compiled = with_compile(config, job, device).compile.enable is True
    return estimated(device, is_compiled=is_compiled, imbalance=imbalance)


@dataclass(frozen=True)
class Remedy:
    """A change of the config, and the peak that it leads to."""

    change: str
    peak_bytes: int
    verdict: str


def find_remedies(job: Plan, shown: RankPlan, device: Rates, workers: int) -> list[Remedy]:
    """Try every change that this job can take, from two shallow depths each; the lowest first.

    Args:
        shown: the rank that does not fit.
    """
    ranks, configs = job.dims.num_ranks, dict[str, JobConfig]()
    for change, update in _changes(job.config, ranks):
        with suppress(ConfigError):
            tried = plan_job(changed(job.config, update), ranks, is_gpu=device.is_gpu)
            configs[change] = tried.config
    if configs:
        said = f"trying {numbered(len(configs), 'change')} that might make it fit ..."
        print(said, file=sys.stderr, flush=True)
    tasks = [(config, ranks, device) for config in configs.values()]
    needs = in_processes(tasks, _need_if_it_runs, workers, "tried")
    found = [
        Remedy(change, need.peak_bytes, need.verdict)
        for change, need in zip(configs, needs, strict=True)
        if need is not None and need.peak_bytes < 0.99 * shown.peak.num_bytes
    ]
    return sorted(found, key=lambda one: one.peak_bytes)


def _need_if_it_runs(config: JobConfig, world_size: int, device: Rates) -> Need | None:
    """As `need_of`; None if the model cannot be built: operators of `saved_ops` may be unknown."""
    try:
        return need_of(config, world_size, device)
    except ConfigError:
        return None


def _changes(config: JobConfig, ranks: int) -> list[tuple[str, Update]]:
    """Return every change that saves memory, as a person would write it."""
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
