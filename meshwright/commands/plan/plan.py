"""`meshwright plan`, once its command line is read."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from meshwright.commands.plan import report
from meshwright.commands.plan import report as page
from meshwright.commands.plan import search as searching
from meshwright.commands.plan.devices import DEVICES, GIB, Device, find_device, verdict
from meshwright.commands.plan.predict import (
    Figures,
    beside_tensors,
    in_processes,
    predict_config,
    telling_ranks,
)
from meshwright.commands.plan.rates import Rates, assumed, read_rates
from meshwright.commands.plan.report import RankPlan
from meshwright.commands.plan.simulate import plan_job, simulate
from meshwright.config.job_config import JobConfig, Update, changed
from meshwright.parallelisms.rules.compile_choice import resolve_compile
from meshwright.parallelisms.rules.stages import stages_of_rank
from meshwright.system.errors import ConfigError, check, numbered
from meshwright.train.preflight import Plan


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


def plan(
    config: JobConfig,
    world_size: int,
    device_word: str,
    rates_file: Path | None,
    *,
    rank: int | None,
    all_stages: bool,
    as_json: bool,
    html: Path | None,
    tries_remedies: bool,
    workers: int,
) -> str:
    """Return the plan of `rank`, of the ranks that need most, or of the first rank of every place
    of the pipeline.

    Args:
        rank: None: the ranks that need most; their worst verdict is the job's.
        rates_file: a file of `--calibrate`; None: times are a range.
        html: where to write the picture, too.
        tries_remedies: if it does not fit, try switches that might help.
        workers: processes.

    Raises:
        ConfigError: if the job cannot run.
    """
    device = find_device(device_word, world_size)
    job = plan_job(config, world_size, is_gpu=device.is_gpu)
    rule = f"must be below {world_size}, the number of ranks"
    check(rank is None or rank < world_size, "--rank", rank, rule, "--rank 0")
    rates = _rates(_is_compiled(config, job, device), device, rates_file, world_size)
    ranks = telling_ranks(job) if rank is None else [rank]
    if all_stages:
        ranks = [*range(0, world_size, world_size // job.dims.pp)]
    if len(ranks) == 1:
        found = [of_rank(job.config, world_size, ranks[0], device, rates)]
    else:
        tasks = [(job.config, world_size, one, device, rates) for one in ranks]
        done = dict(in_processes(tasks, of_rank, workers))
        found = []
        for _, result in sorted(done.items()):
            if isinstance(result, ConfigError):
                raise result
            found.append(result)
    shown = report.most_needed(found)
    tried = []
    if shown.verdict != "fits" and tries_remedies:
        tried = find(job, world_size, shown, device, workers)
    if html is not None:
        html.write_text(page.to_html(job, found, device))
    if as_json:
        values = [dataclasses.asdict(one) for one in tried]
        return json.dumps(report.to_json(job, found, device, values), indent=1)
    return "\n".join([report.to_text(job, found, device), *lines(tried)])


def _is_compiled(config: JobConfig, job: Plan, device: Device) -> bool:
    """Return whether the job's blocks will be compiled; a plan is of eager ones."""
    whole = changed(
        config, {"training": {"global_batch_size": job.config.training.global_batch_size}}
    )
    resolved, _ = resolve_compile(whole, job.model_args, job.fp32_modules, is_gpu=device.is_gpu)
    return resolved.compile.enable is True


def _rates(is_compiled: bool, device: Device, file: Path | None, world_size: int) -> list[Rates]:
    """Return the measured rates; without a file an estimate and a bound, or nothing."""
    if file is None:
        both = assumed(device, is_compiled=is_compiled)
        return [] if both is None else [both[1], both[0]]
    rates = read_rates(file, device, world_size)
    has_network = world_size <= device.per_node or device.network_bytes_per_s > 0
    rule = f"{world_size} ranks are more than a node, and its network is not known"
    check(has_network, "--device", device.name, rule, f"name one of {', '.join(DEVICES)}")
    # other nodes are not measured
    return [dataclasses.replace(rates, network=device.network_bytes_per_s / 2)]


def of_rank(
    config: JobConfig, world_size: int, rank: int, device: Device, rates: list[Rates]
) -> RankPlan:
    """Return the figures of one rank, simulated in this process."""
    job = plan_job(config, world_size, is_gpu=device.is_gpu)
    simulation = simulate(job, world_size, rank, is_gpu=device.is_gpu)
    stages = []
    if job.dims.pp > 1:
        schedule = job.config.parallelism.pipeline_parallel_schedule
        place = rank // (world_size // job.dims.pp)
        stages = stages_of_rank(place, job.dims.pp, len(job.stage_modules), schedule)
    return report.summarize(job, simulation, device, rates, stages)


def search(
    config: JobConfig,
    world_size: int,
    device_word: str,
    rates_file: Path | None,
    workers: int,
    *,
    as_json: bool,
) -> str:
    """Return the best mesh and modes for the job, as a table and as TOML.

    Args:
        rates_file: a file of `--calibrate`; None: rates are estimated.

    Raises:
        ConfigError: if nothing fits.
    """
    device = find_device(device_word, world_size)
    job = plan_job(config, world_size, is_gpu=device.is_gpu)
    rates = _rates(_is_compiled(config, job, device), device, rates_file, world_size)
    found = searching.find(config, world_size, device, rates[0], workers)
    show = searching.to_json if as_json else searching.to_text
    return show(config, found, rates[0].source)
