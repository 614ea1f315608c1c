"""Peak and step time of a job's ranks: in full, or from two shallow models."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tqdm import tqdm

from meshwright.commands.plan.devices import Device, Rates, beside_tensors, verdict
from meshwright.commands.plan.figures import Memory, step_time
from meshwright.commands.plan.simulate import plan_job, simulate
from meshwright.config.job_config import JobConfig, changed
from meshwright.parallelisms.rules.compile_choice import resolve_compile
from meshwright.parallelisms.rules.stages import stages_of_rank
from meshwright.system.errors import ConfigError
from meshwright.system.processes import fork_server
from meshwright.train.preflight import Plan

Result = TypeVar("Result")


@dataclass(frozen=True)
class Figures:
    """Of one rank."""

    peaks: Mapping[str, float]
    """Most bytes at every place of the step."""
    seconds: float
    """Of a step; 0 without rates."""
    num_groups: int = 0
    """Process groups that communicate: one for each axis."""

    @property
    def peak_bytes(self) -> int:
        """Of tensors."""
        return round(max(self.peaks.values()))


def measure(plan: Plan, rank: int, device: Rates) -> Figures:
    """Simulate `rank` of `plan`."""
    simulation = simulate(plan, rank, is_gpu=device.is_gpu, imbalance=device.imbalance)
    time, places = step_time(simulation, plan, device), Memory(simulation.record).by_place()
    return Figures(places, time.seconds if time else 0.0, simulation.num_groups)


def predict(plan: Plan, rank: int, device: Rates) -> Figures:
    """Predict a rank's figures from two depths, as each layer adds the same; of a pipeline, whose
    ranks have few layers, simulate all of them."""
    depth, step = plan.model_args.n_layers, period(plan.config)
    # from 4 on there is a layer with the usual neighbours: the next is gathered ahead of it, while
    # the gradients of the one before are reduced
    few = 4 * step + depth % step
    depths: list[Plan] = []
    if plan.dims.pp == 1 and depth > few + step:
        with suppress(ConfigError):  # if the config names layers that a shallow model lacks
            depths = [at_depth(plan, device, layers) for layers in (few, few + step)]
    if not depths:
        return measure(plan, rank, device)
    first, second = (measure(one, rank, device) for one in depths)

    def along(at_few: float, at_more: float) -> float:
        return at_few + (at_more - at_few) * (depth - few) / step

    shared = first.peaks.keys() & second.peaks.keys()
    peaks = {place: along(first.peaks[place], second.peaks[place]) for place in shared}
    return replace(second, peaks=peaks, seconds=along(first.seconds, second.seconds))


@dataclass(frozen=True)
class Need:
    """Memory and time that a job needs."""

    peak_bytes: int
    """Of tensors, on the rank that needs most memory."""
    needed_bytes: float
    """With the most that is modelled besides."""
    verdict: str
    seconds: float
    """Of a step of the slowest rank; 0 without rates."""


def need_of(config: JobConfig, world_size: int, device: Rates) -> Need:
    """Plan a job, and predict the ranks that need most: for a process of its own.

    Raises:
        ConfigError: if the job cannot run.
    """
    plan = plan_job(config, world_size, is_gpu=device.is_gpu)
    ranks = []
    for figures in (predict(plan, rank, device) for rank in telling_ranks(plan)):
        peak = figures.peak_bytes
        modelled = beside_tensors(plan, device, peak, figures.num_groups)
        high = peak + sum(part.high for part in modelled)
        ranks.append(Need(peak, high, verdict(device, peak, modelled), figures.seconds))
    neediest = max(ranks, key=lambda rank: rank.needed_bytes)
    return replace(neediest, seconds=max(rank.seconds for rank in ranks))


def telling_ranks(plan: Plan) -> list[int]:
    """Return the ranks that tell whether a job fits: the first, and of a pipeline also the last and
    the one with most parameters. The others have shards as large or smaller."""
    firsts = plan.dims.first_ranks
    return sorted({0, firsts[-1], max(firsts, key=lambda rank: num_parameters(plan, rank))})


def stages_of(plan: Plan, rank: int) -> list[int]:
    """Return the stages of `rank`."""
    place = rank // plan.dims.first_ranks.step
    schedule = plan.config.parallelism.pipeline_parallel_schedule
    return stages_of_rank(place, plan.dims.pp, len(plan.stage_modules), schedule)


def modules_of(plan: Plan, rank: int) -> list[str]:
    """Return the modules of all stages of `rank`."""
    return [name for index in stages_of(plan, rank) for name in plan.stage_modules[index]]


def num_parameters(plan: Plan, rank: int) -> int:
    """Return the parameters of all stages of `rank`, over its tensor-parallel ranks."""
    return sum(p.numel for p in plan.model_args.table.of_blocks(modules_of(plan, rank)))


def period(config: JobConfig) -> int:
    """Layers after which activation checkpointing repeats itself."""
    option = config.activation_checkpoint.selective_ac_option
    is_counted = config.activation_checkpoint.mode == "selective" and option != "op"
    return int(option) if is_counted else 1


def with_compile(config: JobConfig, plan: Plan, device: Device) -> JobConfig:
    """Return the config of a job, as it was given, with the batch and the use of the compiler that
    follow; `plan` is the job's, whose blocks are eager."""
    batch = plan.config.training.global_batch_size
    config = changed(config, {"training": {"global_batch_size": batch}})
    args, modules = plan.model_args, plan.fp32_modules
    return resolve_compile(config, args, modules, is_gpu=device.is_gpu)[0]


def at_depth(plan: Plan, device: Device, layers: int) -> Plan:
    """Return the same job, without a pipeline, with a model of `layers` layers.

    Raises:
        ConfigError: if the config names layers that this model lacks.
    """
    config = plan.config
    config = changed(config, {"model": {"args": config.model.args | {"n_layers": layers}}})
    shallow = plan_job(config, plan.dims.num_ranks, is_gpu=device.is_gpu)
    # "auto" is settled by the whole model
    reduction = plan.config.parallelism.fsdp_reduce_gradients
    parallelism = {"parallelism": {"fsdp_reduce_gradients": reduction}}
    return replace(shallow, config=changed(shallow.config, parallelism))


def in_processes(
    tasks: Sequence[tuple[Any, ...]], function: Callable[..., Result], workers: int, what: str = ""
) -> list[Result]:
    """Return the result of `function` with each of `tasks`, in a new process for each.

    torch keeps meshes of groups that are gone in caches. Processes are forks of one that has
    imported torch, and has no threads.

    Args:
        what: shown on a terminal with how many have ended: "tried: 3 of 11"; "": nothing is.
    """
    shown = {"bar_format": "{desc}: {n_fmt} of {total_fmt}", "disable": None if what else True}
    with ProcessPoolExecutor(workers, fork_server(__name__), max_tasks_per_child=1) as pool:
        calls = [pool.submit(_call, function, task) for task in tasks]
        ended = as_completed(calls)
        try:
            for call in tqdm(ended, what, len(tasks), leave=False, file=sys.stderr, **shown):
                call.result()  # an error is raised at once
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [call.result() for call in calls]


def _call(function: Callable[..., Result], task: tuple[Any, ...]) -> Result:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word
    gc.freeze()  # or each full collection goes through all of torch's modules, for 0.3 s
    return function(*task)
