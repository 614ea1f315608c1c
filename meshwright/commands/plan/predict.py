"""Peak and step time of a job: in full, or from two shallow models; also with one change."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import tomli_w

from meshwright.commands.plan.devices import Device, Rates, non_tensor_memory, verdict
from meshwright.commands.plan.figures import Memory, step_time
from meshwright.commands.plan.simulate import plan_job, simulate
from meshwright.config.changes import changed
from meshwright.config.job_config import JobConfig, Update, differing
from meshwright.system.errors import ConfigError, numbered
from meshwright.system.processes import in_processes
from meshwright.train.resolve import ResolvedJob


@dataclass(frozen=True)
class Figures:
    """Of one rank."""

    peaks: Mapping[str, float]
    """Most bytes at every place of the step."""
    seconds: float
    """Of a step; 0 without rates."""
    num_groups: int = 0
    """Process groups that communicate: one for each axis."""
    most: Mapping[str, float] = field(default_factory=dict)
    """Most bytes of each purpose over the step."""

    @property
    def peak_bytes(self) -> int:
        """Of tensors."""
        return round(max(self.peaks.values()))


def measure(resolved: ResolvedJob, rank: int, device: Rates) -> Figures:
    """Simulate `rank` of `plan`."""
    simulation = simulate(resolved, rank, is_gpu=device.is_gpu, imbalance=device.imbalance)
    time, memory = step_time(simulation, resolved, device), Memory(simulation.record)
    seconds = time.seconds if time else 0.0
    return Figures(memory.by_place(), seconds, simulation.num_groups, memory.most())


def predict(resolved: ResolvedJob, rank: int, device: Rates) -> Figures:
    """Predict a rank's numbers from two depths, as each layer adds the same; of a pipeline, whose
    ranks have few layers, simulate all of them."""
    depth, step = resolved.model_args.n_layers, period(resolved.config)
    # from 4 on there is a layer with the usual neighbors: the next is gathered ahead of it, while
    # the gradients of the one before are reduced
    few = 4 * step + depth % step
    depths: list[ResolvedJob] = []
    if resolved.dims.pp == 1 and depth > few + step:
        with suppress(ConfigError):  # if the config gives layers that a shallow model lacks
            depths = [at_depth(resolved, device, layers) for layers in (few, few + step)]
    if not depths:
        return measure(resolved, rank, device)
    first, second = (measure(one, rank, device) for one in depths)

    def along(at_few: float, at_more: float) -> float:
        return at_few + (at_more - at_few) * (depth - few) / step

    def each(of_few: Mapping[str, float], of_more: Mapping[str, float]) -> dict[str, float]:
        return {key: along(of_few[key], of_more[key]) for key in of_few.keys() & of_more.keys()}

    peaks, most = each(first.peaks, second.peaks), each(first.most, second.most)
    return replace(second, peaks=peaks, most=most, seconds=along(first.seconds, second.seconds))


@dataclass(frozen=True)
class Need:
    """Memory and time that a job needs."""

    peak_bytes: int
    """Of tensors, on the rank that needs most memory."""
    verdict: str
    seconds: float
    """Of a step of the slowest rank; 0 without rates."""


def need_of(config: JobConfig, world_size: int, device: Rates) -> Need:
    """Plan a job, and predict the ranks that need most: for its own process.

    Raises:
        ConfigError: if the job can't run.
    """
    resolved = plan_job(config, world_size, is_gpu=device.is_gpu)
    needs, seconds = list[tuple[float, int, str]](), 0.0
    for figures in (predict(resolved, rank, device) for rank in telling_ranks(resolved)):
        peak = figures.peak_bytes
        modelled = non_tensor_memory(resolved, device, peak, figures.num_groups, figures.most)
        needed = peak + sum(part.high for part in modelled)
        needs.append((needed, peak, verdict(device, peak, modelled)))
        seconds = max(seconds, figures.seconds)
    _, peak, word = max(needs)
    return Need(peak, word, seconds)


def telling_ranks(resolved: ResolvedJob) -> list[int]:
    """Return the ranks that tell whether a job fits: the first, and of a pipeline also the last and
    the one with most parameters. The others have shards as large or smaller."""
    firsts = resolved.dims.first_ranks
    return sorted({0, firsts[-1], max(firsts, key=lambda rank: resolved.num_parameters(rank))})


def period(config: JobConfig) -> int:
    """Layers after which activation checkpointing repeats itself."""
    option = config.activation_checkpoint.selective_ac_option
    is_counted = config.activation_checkpoint.mode == "selective" and option != "op"
    return int(option) if is_counted else 1


def at_depth(resolved: ResolvedJob, device: Device, layers: int) -> ResolvedJob:
    """Return the same job, without a pipeline, with a model of `layers` layers.

    Raises:
        ConfigError: if the config gives layers that this model lacks.
    """
    args = resolved.config.model.args | {"n_layers": layers}
    config = changed(resolved.config, {"model": {"args": args}})
    return plan_job(config, resolved.dims.num_ranks, is_gpu=device.is_gpu)


def find_remedies(
    config: JobConfig, peak_bytes: int, ranks: int, device: Rates, workers: int
) -> list[tuple[str, Need]]:
    """Try every change that this job can take, from two shallow depths each; return those that save
    memory, as a person would write them, the lowest first.

    Args:
        peak_bytes: of the rank that doesn't fit.
    """
    configs = dict[str, JobConfig]()
    for update in _changes(config, ranks):
        tables = differing(config, update).items()
        lines = (f"{name}.{x}" for name, keys in tables for x in tomli_w.dumps(keys).splitlines())
        if words := ", ".join(lines):
            with suppress(ConfigError):
                tried = plan_job(changed(config, update), ranks, is_gpu=device.is_gpu)
                configs[words] = tried.config
    if configs:
        said = f"trying {numbered(len(configs), 'change')} that might make it fit ..."
        print(said, file=sys.stderr, flush=True)
    tasks = [(config, ranks, device) for config in configs.values()]
    needs = in_processes(tasks, _need_if_it_runs, workers, "tried")
    found = [
        (change, need)
        for change, need in zip(configs, needs, strict=True)
        if need is not None and need.peak_bytes < 0.99 * peak_bytes
    ]
    return sorted(found, key=lambda one: one[1].peak_bytes)


def _need_if_it_runs(config: JobConfig, world_size: int, device: Rates) -> Need | None:
    """As `need_of`; None if the model can't be built: operators of `saved_ops` may be unknown."""
    try:
        return need_of(config, world_size, device)
    except ConfigError:
        return None


def _changes(config: JobConfig, ranks: int) -> Iterator[Update]:
    """Yield every change that saves memory."""
    parallelism, training = config.parallelism, config.training
    for mode in ("selective", "full"):
        yield {"activation_checkpoint": {"mode": mode}}
    if training.local_batch_size > 1:
        yield {"training": {"local_batch_size": training.local_batch_size // 2}}
    yield {"training": {"enable_cpu_offload": True}}
    yield {"training": {"mixed_precision_reduce": "bfloat16"}}
    yield {"parallelism": {"fsdp_reshard_after_forward": "always"}}
    yield {"parallelism": {"fsdp_reduce_gradients": "every_microbatch"}}
    if training.max_norm == float("inf"):
        yield {"optimizer": {"early_step_in_backward": True}}
    shard = {"data_parallel_shard_degree": -1}
    if parallelism.data_parallel_replicate_degree > 1:
        yield {"parallelism": {"data_parallel_replicate_degree": 1} | shard}
    for key in ("tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree"):
        degree = 2 * getattr(parallelism, key)
        if ranks % degree == 0:
            yield {"parallelism": {key: degree} | shard}
