"""Peak and step time of one rank: in full, or from two shallow models."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from meshwright.commands.plan.devices import Device, Overhead, overheads
from meshwright.commands.plan.figures import (
    find_peak,
    num_groups,
    peaks_by_place,
    rounded_peak,
    step_time,
)
from meshwright.commands.plan.rates import Rates
from meshwright.commands.plan.simulate import Simulation, plan_job, simulate
from meshwright.commands.plan.trace import Collective
from meshwright.config.job_config import JobConfig
from meshwright.parallelisms.rules.stages import stages_of_rank
from meshwright.system.errors import ConfigError
from meshwright.system.processes import fork_server
from meshwright.train.preflight import Plan

Result = TypeVar("Result")


@dataclass(frozen=True)
class Figures:
    """Of one rank."""

    peaks: dict[str, float]
    """Most bytes at every place of the step."""
    rounding: float
    """How much more the CUDA allocator takes for them, as a factor of the peak."""
    seconds: float
    """Of a step at the given rates; 0 without them."""
    rank: int = 0
    num_groups: int = 0
    """Process groups that communicate."""
    fsdp_bytes: int = 0
    """Of the largest tensor that FSDP2 gathers or reduces."""
    line: tuple[Figures, Figures] | None = None
    """The figures of two shallow models, if these are predicted from them."""

    @property
    def peak_bytes(self) -> int:
        """Of tensors."""
        return round(max(self.peaks.values()))

    @property
    def rounded_bytes(self) -> int:
        """The same, as the CUDA allocator rounds tensors."""
        return round(self.peak_bytes * self.rounding)

    def extend(self, deeper: Figures, factor: float) -> Figures:
        """Extrapolate along the line through these figures and those of a deeper model."""
        peaks = {
            place: size + factor * (deeper.peaks[place] - size)
            for place, size in self.peaks.items()
            if place in deeper.peaks
        }
        seconds = self.seconds + factor * (deeper.seconds - self.seconds)
        return replace(deeper, peaks=peaks, seconds=seconds, line=(self, deeper))


def measure(plan: Plan, world_size: int, rank: int, device: Device, rates: Rates | None) -> Figures:
    """Simulate `rank` of `plan`."""
    simulation = simulate(plan, world_size, rank, is_gpu=device.is_gpu)
    return figures_of(simulation, plan.num_microbatches, device, rates)


def figures_of(
    simulation: Simulation, num_microbatches: int, device: Device, rates: Rates | None
) -> Figures:
    """Return the figures of a simulation."""
    record, seconds = simulation.record, 0.0
    if rates is not None:
        seconds = step_time(simulation, num_microbatches, rates, device.per_node).seconds
    rounding = rounded_peak(record) / find_peak(record).num_bytes
    of_fsdp = (one for one in simulation.entries if isinstance(one, Collective) and one.is_fsdp)
    return Figures(
        {**peaks_by_place(record)},
        rounding,
        seconds,
        simulation.rank,
        num_groups(simulation),
        max((one.num_bytes for one in of_fsdp), default=0),
    )


def beside_tensors(figures: Figures, plan: Plan, device: Device) -> list[Overhead]:
    """Model the memory that a rank of `plan` needs besides its tensors."""
    checkpoint, least = plan.config.checkpoint, plan.least_bytes
    is_staged = checkpoint.enable and checkpoint.async_mode == "thread"
    return overheads(
        device,
        figures.peak_bytes,
        figures.rounded_bytes,
        figures.num_groups,
        staged=round(least["weights"] + least["optimizer"]) if is_staged else 0,
        sends_by_gloo=figures.fsdp_bytes > 0,
    )


def predict(
    plan: Plan, world_size: int, rank: int, device: Device, rates: Rates | None = None
) -> Figures:
    """Predict a rank's figures from two depths; each layer adds the same."""
    depth, step = depth_of_rank(plan, rank), period(plan.config)
    few = _few(plan, rank)
    more = few + step
    if depth <= more:
        return measure(plan, world_size, rank, device, rates)
    try:
        shallow, deeper = (at_depth(plan, rank, device, layers) for layers in (few, more))
    except ConfigError:  # the config names layers that a shallow model lacks
        return measure(plan, world_size, rank, device, rates)
    first = measure(shallow, world_size, rank, device, rates)
    second = measure(deeper, world_size, rank, device, rates)
    return first.extend(second, (depth - few) / step)


def predict_config(
    config: JobConfig, world_size: int, rank: int, device: Device, rates: Rates | None = None
) -> Figures:
    """Plan and predict: for a process of its own, as a plan cannot be sent to one.

    Raises:
        ConfigError: if the job cannot run.
    """
    plan = plan_job(config, world_size, is_gpu=device.is_gpu)
    return predict(plan, world_size, rank, device, rates)


def error_of_line(
    config: JobConfig, world_size: int, found: Figures, device: Device, rates: Rates | None
) -> float:
    """Simulate a third depth of a prediction; return by what part the line is off there, in bytes
    or seconds, whichever is more. 0 for figures of a whole model."""
    if found.line is None:
        return 0.0
    first, second = found.line
    plan = plan_job(config, world_size, is_gpu=device.is_gpu)
    third = at_depth(plan, found.rank, device, _few(plan, found.rank) + 2 * period(config))
    simulated = measure(third, world_size, found.rank, device, rates)
    expected = first.extend(second, 2.0)
    seconds = expected.seconds / simulated.seconds - 1 if rates is not None else 0.0
    return max(abs(expected.peak_bytes / simulated.peak_bytes - 1), abs(seconds))


def telling_ranks(plan: Plan) -> list[int]:
    """Return the ranks that tell whether a job fits: the first, and of a pipeline also the first of
    its last rank and of the rank with most parameters. The others have shards as large or smaller.
    """
    per_place = plan.dims.num_ranks // plan.dims.pp
    sizes = [num_parameters(plan, place) for place in range(plan.dims.pp)]
    return sorted({0, per_place * (plan.dims.pp - 1), per_place * sizes.index(max(sizes))})


def num_parameters(plan: Plan, place: int) -> int:
    """Return the parameters of the rank at `place` of the pipeline, over its tensor-parallel
    ranks."""
    inside = tuple(f"{name}." for name in modules_at(plan, place))
    shapes = plan.model_args.table.parameters.items()
    return sum(p.numel for name, p in shapes if name.startswith(inside))


def modules_at(plan: Plan, place: int) -> list[str]:
    """Return the modules of all stages of the rank at `place` of the pipeline."""
    schedule = plan.config.parallelism.pipeline_parallel_schedule
    mine = stages_of_rank(place, plan.dims.pp, len(plan.stage_modules), schedule)
    return [name for index in mine for name in plan.stage_modules[index]]


def _few(plan: Plan, rank: int) -> int:
    """Return the layers of the shallower model: whole periods fewer than the stage of `rank` has.

    From 4 on there is a layer with the usual neighbours: the next is gathered ahead of it, while
    the gradients of the one before are reduced. In a pipeline layers are gathered once and stay.
    """
    step = period(plan.config)
    few = (4 if plan.dims.pp == 1 else 2) * step
    return few + (depth_of_rank(plan, rank) - few) % step


def period(config: JobConfig) -> int:
    """Layers after which activation checkpointing repeats itself."""
    option = config.activation_checkpoint.selective_ac_option
    is_counted = config.activation_checkpoint.mode == "selective" and option != "op"
    return int(option) if is_counted else 1


def depth_of_rank(plan: Plan, rank: int) -> int:
    """Return the fewest layers of a stage of this rank."""
    layers = _layers_of_stages(plan)
    return min(layers[index] for index in _stages(plan, rank))


def _stages(plan: Plan, rank: int) -> list[int]:
    per_pipeline_rank = plan.dims.dp * plan.dims.cp * plan.dims.tp
    schedule = plan.config.parallelism.pipeline_parallel_schedule
    place = rank // per_pipeline_rank
    return stages_of_rank(place, plan.dims.pp, len(plan.stage_modules), schedule)


def _layers_of_stages(plan: Plan) -> list[int]:
    return [sum("layers." in name for name in names) for names in plan.stage_modules]


def at_depth(plan: Plan, rank: int, device: Device, layers: int) -> Plan:
    """Return the same job with `layers` layers in the stage of `rank` that has fewest, and as many
    fewer in its others: figures are straight along that line. Stages of other ranks keep 1 or more.

    Every stage loses whole periods, so that each still begins where it began in a period.

    Args:
        layers: of `_few`, or whole periods more.

    Raises:
        ConfigError: if the config names layers that this model lacks.
    """
    config, dims, removed = plan.config, plan.dims, depth_of_rank(plan, rank) - layers
    step = period(config)
    counts = [max((n - 1) % step + 1, n - removed) for n in _layers_of_stages(plan)]
    args = config.model.args | {"n_layers": sum(counts)}
    update: dict[str, Any] = {"model": config.model.model_copy(update={"args": args})}
    if len(counts) > 1:
        names = iter(range(sum(counts)))
        parts = [[f"layers.{next(names)}" for _ in range(count)] for count in counts]
        parts[0].insert(0, "tok_embeddings")
        parts[-1] += ["norm", "output"]
        update["parallelism"] = config.parallelism.model_copy(
            update={"module_fqns_per_model_part": parts}
        )
    world_size = dims.pp * dims.dp * dims.cp * dims.tp
    shallow = plan_job(config.model_copy(update=update), world_size, is_gpu=device.is_gpu)
    # "auto" is settled by the whole model
    reduction = config.parallelism.fsdp_reduce_gradients
    parallelism = shallow.config.parallelism.model_copy(update={"fsdp_reduce_gradients": reduction})
    return replace(shallow, config=shallow.config.model_copy(update={"parallelism": parallelism}))


def in_processes(
    tasks: Sequence[tuple[Any, ...]], function: Callable[..., Result], workers: int
) -> Iterator[tuple[int, Result | ConfigError]]:
    """Run `function` with each of `tasks`, in processes of their own; yield as they end."""
    with processes(workers) as pool:
        calls = {pool.submit(_call, function, task): i for i, task in enumerate(tasks)}
        for call in as_completed(calls):
            yield calls[call], call.result()


def processes(workers: int) -> ProcessPoolExecutor:
    """Return a pool that takes a new process for every call: torch keeps meshes of groups that are
    gone in caches. Processes are forks of one that has imported torch, and has no threads."""
    return ProcessPoolExecutor(workers, fork_server(__name__), max_tasks_per_child=1)


def _call(function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
    gc.freeze()  # or each full collection goes through all of torch's modules, for 0.3 s
    try:
        return function(*task)
    except ConfigError as error:
        return error
