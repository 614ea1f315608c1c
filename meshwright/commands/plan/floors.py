"""Floors under a candidate's step time and memory, from a trace that many candidates share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from meshwright.commands.plan.candidates import Choice, Mesh
from meshwright.commands.plan.devices import Device
from meshwright.commands.plan.figures import entry_seconds
from meshwright.commands.plan.predict import modules_at, num_parameters, period
from meshwright.commands.plan.rates import Rates
from meshwright.commands.plan.simulate import Simulation, plan_job, simulate
from meshwright.commands.plan.trace import AGAIN, BACKWARD, FORWARD
from meshwright.config.job_config import JobConfig, changed
from meshwright.parallelisms.rules.memory import BYTES
from meshwright.system.errors import ConfigError
from meshwright.train.preflight import Plan


@dataclass(frozen=True)
class Work:
    """Time and memory of one microbatch on one rank, without FSDP and the optimizer."""

    forward_s: float
    backward_s: float
    """With recomputation."""
    kept_bytes: float
    """Activations that forward leaves behind for backward."""

    def plus(self, other: Work, factor: float = 1.0) -> Work:
        """Add `factor` times `other`."""
        return Work(
            self.forward_s + factor * other.forward_s,
            self.backward_s + factor * other.backward_s,
            self.kept_bytes + factor * other.kept_bytes,
        )


NONE = Work(0.0, 0.0, 0.0)


NEXT_TO_NOTHING_S = 1e-9


@dataclass(frozen=True)
class Parts:
    """The work of the parts of a model."""

    embedding: Work
    layer: Work
    output: Work
    """The last norm, the output projection and the loss."""


Shape = tuple[int, int, int, str]
"""Degrees of tensor and context parallelism, sequences of a microbatch, mode of recomputation: the
operators of a layer depend on nothing else that a search chooses."""


def shape_of(choice: Choice) -> Shape:
    """Return the key of the trace that is `choice`'s."""
    mesh = choice.mesh
    return mesh.tensor, mesh.context, mesh.local_batch_size, choice.mode


def traces(
    config: JobConfig, shapes: Sequence[Shape], device: Device, rates: Rates
) -> dict[Shape, Parts]:
    """Trace several shapes in one process: torch caches much of the work.

    Shapes are left out if a shallow model cannot stand for the job: parts of it are frozen, or
    patterns of the config name layers that a shallow model lacks.
    """
    found: dict[Shape, Parts] = {}
    for shape in shapes if not config.model.frozen else ():
        with suppress(ConfigError):
            found[shape] = trace(config, shape, device, rates)
    return found


def trace(config: JobConfig, shape: Shape, device: Device, rates: Rates) -> Parts:
    """Simulate one microbatch of two shallow models, with as few ranks as have TP, CP and FSDP."""
    tensor, context, size, mode = shape
    ranks = 2 * tensor * context
    alone = Choice(Mesh(tensor, context, 1, 1, "", size), mode, False)
    config = changed(config, alone.update(2 * size))
    step, found = period(config), []
    for layers in (step, 2 * step):
        model = {"args": config.model.args | {"n_layers": layers}}
        plan = plan_job(changed(config, {"model": model}), ranks, is_gpu=device.is_gpu)
        found.append(simulate(plan, ranks, 0, is_gpu=device.is_gpu))
    shallow, deeper = (_work(simulation, rates, device) for simulation in found)
    layers_work = deeper.plus(shallow, -1.0)
    embedding = _work(found[0], rates, device, "tok_embeddings")
    output = shallow.plus(layers_work, -1.0).plus(embedding, -1.0)
    return Parts(embedding, NONE.plus(layers_work, 1 / step), output)


def _work(simulation: Simulation, rates: Rates, device: Device, module: str = "") -> Work:
    """Sum up a simulation's microbatch, in modules whose names begin with `module`."""
    forward = backward = 0.0
    for entry in simulation.entries:
        if not entry.is_fsdp and entry.module.startswith(module):
            seconds = entry_seconds(entry, rates, device.per_node)
            forward += seconds * (entry.phase == FORWARD)
            backward += seconds * (entry.phase in (BACKWARD, AGAIN))
    record = simulation.record
    born = {event.item: event.delta for event in reversed(record.events)}  # the first of each
    kept = sum(
        born[number]
        for number, item in enumerate(record.items)
        if item.purpose == "activations"
        and item.born.phase == FORWARD
        and item.born.module.startswith(module)
        and number in born
    )
    return Work(forward, backward, kept)


@dataclass(frozen=True)
class Floor:
    """Bounds from below on a candidate's step time and peak."""

    seconds: float
    num_bytes: float


def floor_of(plan: Plan, parts: Parts | None, device: Device, rates: Rates) -> Floor:
    """Return less than the step time and memory of the first rank, or of the last stage's.

    Args:
        parts: None: not known; only the memory of weights, gradients and optimizer is.
    """
    if parts is None:
        return Floor(NEXT_TO_NOTHING_S, sum(plan.least_bytes.values()))
    count = plan.num_microbatches
    ends = [_of_rank(plan, parts, place) for place in {0, plan.dims.pp - 1}]
    busy = max(count * (work.forward_s + work.backward_s) for work in ends)
    seconds = max(busy, _fsdp_seconds(plan, device, rates)) / (1 - waiting(plan))
    return Floor(seconds, _least_bytes(plan, parts))


def _of_rank(plan: Plan, parts: Parts, place: int) -> Work:
    """Return a microbatch's work on all stages of the rank at `place` of the pipeline."""
    names = modules_at(plan, place)
    work = NONE.plus(parts.layer, _whole_periods(plan, place))
    if "tok_embeddings" in names:
        work = work.plus(parts.embedding)
    return work.plus(parts.output) if "output" in names else work


def _fsdp_seconds(plan: Plan, device: Device, rates: Rates) -> float:
    """Return fewer seconds than FSDP's collectives take on the first rank: they gather the weights
    of its layers, and reduce their gradients, among copies (HSDP) too."""
    training, dims, parallelism = plan.config.training, plan.dims, plan.config.parallelism
    count, shards = plan.num_microbatches, dims.dp_shard * dims.cp
    shapes = plan.model_args.table.parameters.items()
    in_layers = sum(p.numel for name, p in shapes if name.startswith("layers."))
    weights = in_layers / plan.model_args.n_layers * _depth(plan, 0) / dims.tp
    policy = parallelism.fsdp_reshard_after_forward
    gathers: float
    if dims.pp > 1:  # gathered weights stay until the end of the step
        gathers = count if policy == "always" else 1
    else:  # by default the last layer's stay until its backward
        again = {"never": 0.0, "always": 1.0}.get(policy, 1 - 1 / max(1, _depth(plan, 0)))
        gathers = count * (1 + again)
    reductions = count if parallelism.fsdp_reduce_gradients == "every_microbatch" else 1
    width = BYTES[training.mixed_precision_reduce]
    sent = gathers * BYTES[training.mixed_precision_param] + reductions * width
    inside = shards * dims.tp
    link = rates.width(range(0, inside, dims.tp), device.per_node)
    seconds = _over(weights * sent * (shards - 1) / shards, link)
    copies = dims.dp_replicate
    link = rates.width(range(0, copies * inside, inside), device.per_node)
    return seconds + _over(weights / shards * width * 2 * (copies - 1) / copies, link)


def _over(num_bytes: float, width: float) -> float:
    """Return the seconds of `num_bytes`; 0 of none, even if one rank alone measured no links."""
    return num_bytes / width if num_bytes else 0.0


def _depth(plan: Plan, place: int) -> int:
    """Return the layers of the rank at `place` of the pipeline."""
    return sum("layers." in name for name in modules_at(plan, place))


def _whole_periods(plan: Plan, place: int) -> int:
    """Return the layers of that rank, without those past the last period of recomputation: they may
    be the cheap ones."""
    step = period(plan.config)
    return _depth(plan, place) // step * step


def waiting(plan: Plan) -> float:
    """Return the least part of a step that a rank of the pipeline waits: (p - 1) / (v m + p - 1)
    with v stages per rank, of Narayanan et al. 2021, arXiv:2104.04473; 0 for others."""
    ranks, schedule = plan.dims.pp, plan.config.parallelism.pipeline_parallel_schedule
    if ranks == 1 or schedule not in ("1F1B", "Interleaved1F1B"):
        return 0.0
    per_rank = len(plan.stage_modules) // ranks
    return (ranks - 1) / (per_rank * plan.num_microbatches + ranks - 1)


def _in_flight(plan: Plan) -> float:
    """Return the most microbatches whose activations the first rank keeps at once, in parts that
    are stages."""
    ranks, schedule = plan.dims.pp, plan.config.parallelism.pipeline_parallel_schedule
    count = plan.num_microbatches
    if ranks == 1:
        return 1
    if schedule == "1F1B":
        return min(ranks, count)
    if schedule == "Interleaved1F1B":
        per_rank, in_round = len(plan.stage_modules) // ranks, count // max(1, count // ranks)
        ahead = (per_rank - 1) * in_round + 2 * (ranks - 1) + 1  # then one for each backward
        return min(ahead, count * per_rank) / per_rank
    return 1  # schedules that are not modelled


def _least_bytes(plan: Plan, parts: Parts) -> float:
    """Return less than the first rank's tensors: weights, optimizer and activations, together with
    gradients if these are there while as many microbatches are in flight as can be."""
    in_flight = _in_flight(plan)
    kept = in_flight * _whole_periods(plan, 0) * parts.layer.kept_bytes
    sizes = [num_parameters(plan, place) for place in range(plan.dims.pp)]
    least = {name: sizes[0] / max(sizes) * size for name, size in plan.least_bytes.items()}
    state = least.get("weights", 0.0) + least.get("optimizer", 0.0)
    if plan.num_microbatches <= in_flight:
        return max(sum(plan.least_bytes.values()), state + kept)
    in_backward = sum(least.values()) - state
    if plan.dims.pp > 1:  # of all stages of the rank, until the end of the step
        in_backward = max(in_backward, sizes[0] / plan.dims.tp * _bytes_in_backward(plan))
    return max(sum(plan.least_bytes.values()), state + in_backward + kept)


def _bytes_in_backward(plan: Plan) -> int:
    """Return the bytes of a parameter that a pipeline keeps whole: gradient, and gathered copy."""
    training, policy = plan.config.training, plan.config.parallelism.fsdp_reshard_after_forward
    is_gathered = policy != "always" and plan.dims.dp_shard * plan.dims.cp > 1
    whole = BYTES[training.mixed_precision_reduce]
    return whole + is_gathered * BYTES[training.mixed_precision_param]
