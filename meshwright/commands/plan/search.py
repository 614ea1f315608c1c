"""The best mesh and modes of a job: legal ones enumerated, estimated, and the best simulated."""

from __future__ import annotations

import json
import math
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple

import tomli_w

from meshwright.commands.plan import devices
from meshwright.commands.plan.devices import GIB, Device, Rates
from meshwright.commands.plan.figures import bubble, entry_seconds, layer_of, ring_width
from meshwright.commands.plan.predict import at_depth, need_of, period
from meshwright.commands.plan.simulate import plan_job, simulate
from meshwright.commands.plan.trace import FORWARD, UPDATE
from meshwright.config.changes import changed
from meshwright.config.job_config import JobConfig, Update, differing
from meshwright.parallelisms.rules.degrees import DEGREES, power_meshes
from meshwright.parallelisms.rules.memory import BYTES
from meshwright.system.errors import ConfigError, check
from meshwright.system.processes import in_processes
from meshwright.train.resolve import ResolvedJob

AXES = ("tp", "cp", "pp", "ep")
"""Axes whose degrees a search chooses. FSDP takes the ranks that they leave."""

ALONE: dict[str, Any] = {
    "pipeline_parallel_degree": 1,
    "data_parallel_replicate_degree": 1,
    "data_parallel_shard_degree": -1,
    "pipeline_parallel_stages_per_rank": -1,
    "module_fqns_per_model_part": [],
    "fsdp_reshard_after_forward": "always",
}
"""Neither a pipeline nor replicas."""

MODES = ("none", "selective", "full")
"""Of recomputation, the fastest first; each keeps less than the one before it."""

SCHEDULES_TRIED = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
"""GPipe waits as long as 1F1B and keeps more."""

LONG = 16384
"""Tokens of a sequence from which context parallelism is tried."""

SIMULATED = 8
"""Candidates that fit, of a search."""

Candidate = tuple[Update, ResolvedJob]
"""Keys to change, and the job with them."""


def legal(config: JobConfig, ranks: int, device: Device) -> Iterator[Candidate]:
    """Yield every candidate that `resolve` lets pass.

    The global batch stays the config's, so more tokens per second are a shorter step. So does the
    use of the compiler, whose blocks have their own rates.
    """
    resolved = plan_job(config, ranks, is_gpu=device.is_gpu)
    batch, is_compiled = resolved.config.training.global_batch_size, resolved.config.compile.is_on
    config = changed(config, {"training": {"global_batch_size": batch}})
    config = changed(config, {"compile": {"enable": is_compiled}})
    num_experts = math.gcd(*(m.n_experts for m in resolved.model_args.table.mixtures.values())) or 1
    for update in _updates(config, ranks, device, num_experts):
        with suppress(ConfigError):
            yield update, plan_job(changed(config, update), ranks, is_gpu=device.is_gpu)


def _updates(config: JobConfig, ranks: int, device: Device, num_experts: int) -> Iterator[Update]:
    """Yield powers of two: tensor parallelism within a node, pipelines of up to 16 ranks; and of
    expert parallelism no ranks, the config's, as many as a node has, and the most.

    Replicas (HSDP) aren't tried: they send and keep more, and the latency that they spare large
    groups is in no rate.
    """
    longest = 8 if config.training.seq_len >= LONG else 1
    most = {"tp": min(device.per_node, 8), "cp": longest, "pp": 16}
    sizes = sorted({1, 2, 4, config.training.local_batch_size})
    own, batch = config.parallelism.expert_parallel_degree, config.training.global_batch_size
    for mesh in power_meshes(most):
        if ranks % math.prod(mesh.values()):
            continue
        schedules = SCHEDULES_TRIED if mesh["pp"] > 1 else ("",)
        largest = math.gcd(num_experts, ranks // mesh["pp"])
        shared = {1, own, math.gcd(largest, device.per_node), largest}
        choices = product(schedules, sizes, MODES, (True, False), sorted(shared))
        for schedule, size, mode, keeps, mesh["ep"] in choices:
            # "default" keeps gathered parameters in a pipeline, and frees them without one
            policy = "never" if keeps else "always"
            parallelism = ALONE | {
                **{DEGREES[axis]: mesh[axis] for axis in AXES},
                "fsdp_reshard_after_forward": "default" if keeps == (mesh["pp"] > 1) else policy,
                **({"pipeline_parallel_schedule": schedule} if schedule else {}),
            }
            yield {
                "parallelism": parallelism,
                "activation_checkpoint": {"mode": mode},
                "training": {"local_batch_size": size, "global_batch_size": batch},
            }


def describe(resolved: ResolvedJob) -> str:
    """Return a candidate in words."""
    sizes = {axis: getattr(resolved.dims, axis) for axis in AXES}
    names = [f"{axis} {size}" for axis, size in sizes.items() if size > 1] or ["FSDP only"]
    if resolved.dims.pp > 1:
        names.append(resolved.config.parallelism.pipeline_parallel_schedule)
    kept = ", gathered parameters kept" if resolved.config.parallelism.keeps_gathered else ""
    size, mode = (
        resolved.config.training.local_batch_size,
        resolved.config.activation_checkpoint.mode,
    )
    return f"{', '.join(names)}; microbatch {size}; recomputation {mode}{kept}"


class Layer(NamedTuple):
    """Time and memory of one sequence in a layer, on one rank."""

    seconds: float
    """Forward, backward and recomputation; without FSDP's traffic, which depends on the ranks."""
    num_bytes: float
    """Activations that its forward leaves behind for backward."""


class Work(NamedTuple):
    """Time and memory of one sequence on one rank of a model, and of its optimizer."""

    layers: Sequence[Layer]
    """Of a shallow model. Those of a deeper one repeat them."""
    rest_s: float
    """Of the embedding, the last norm, the output projection and the loss."""
    update_s: float
    """Of the optimizer, per parameter of the rank."""


def shape_of(resolved: ResolvedJob) -> tuple[tuple[int, ...], str]:
    """Return the key of a candidate's `Work`, its cut and its mode: a layer's operators depend on
    nothing else that a search chooses, and grow with the sequences."""
    cut = tuple(getattr(resolved.dims, axis) for axis in AXES if axis != "pp")
    return cut, resolved.config.activation_checkpoint.mode


def measure_work(config: JobConfig, device: Rates) -> Work:
    """Simulate one sequence in a model of few layers on few ranks, without a pipeline.

    Args:
        config: of any candidate of the shape.
    """
    cut = math.prod(getattr(config.parallelism, DEGREES[axis]) for axis in ("tp", "cp"))
    ranks = math.lcm(2 * cut, config.parallelism.expert_parallel_degree)
    batch = {"local_batch_size": 1, "global_batch_size": ranks // cut}
    update = {"parallelism": ALONE, "training": batch}
    resolved = plan_job(changed(config, update), ranks, is_gpu=device.is_gpu)
    with suppress(ConfigError):  # if the config gives layers that a shallow model lacks
        resolved = at_depth(resolved, device, 2 * period(config))
    simulation = simulate(resolved, 0, is_gpu=device.is_gpu, imbalance=device.imbalance)
    seconds, kept = defaultdict[int | str, float](float), defaultdict[int, float](float)
    for entry in simulation.entries:
        part = UPDATE if entry.at.phase == UPDATE else layer_of(entry.at.module)
        if part == UPDATE or not entry.is_fsdp:
            seconds[part] += entry_seconds(entry, device)
    record = simulation.record
    born = {event.item: event.delta for event in reversed(record.events)}  # the first of each
    for number, size in born.items():
        item = record.items[number]
        if item.purpose == "activations" and item.born.phase == FORWARD:
            kept[layer_of(item.born.module)] += size
    layers = [Layer(seconds[n], kept[n]) for n in range(resolved.model_args.n_layers)]
    return Work(layers, seconds[-1], seconds[UPDATE] * ranks / resolved.num_parameters(0))


def estimate(resolved: ResolvedJob, work: Work, device: Rates) -> tuple[float, float]:
    """Return a candidate's seconds per step, and bytes that its first rank surely has at once."""
    dims, size = resolved.dims, resolved.config.training.local_batch_size
    busy, num_bytes = list[float](), list[float]()
    for rank in (0, dims.first_ranks[-1]):
        names = resolved.modules_of(rank)
        numbers = (number for name in names if (number := layer_of(name)) >= 0)
        layers = [work.layers[number % len(work.layers)] for number in numbers]
        seconds = sum(one.seconds for one in layers) + ("output" in names) * work.rest_s
        busy.append(resolved.config.num_microbatches * size * seconds)
        num_bytes.append(size * sum(one.num_bytes for one in layers))
    copies, sent = _fsdp_seconds(resolved, device)
    parameters = resolved.num_parameters(0) / (dims.tp * dims.dp_shard * dims.cp)
    backward = 0.75 if resolved.config.activation_checkpoint.mode == "full" else 2 / 3
    seconds = max(copies + max(busy), sent) / (1 - bubble(resolved, backward))
    return seconds + work.update_s * parameters, _least_bytes(resolved, num_bytes[0])


def _fsdp_seconds(resolved: ResolvedJob, device: Rates) -> tuple[float, float]:
    """Return the time of FSDP's copies and of its collectives, on the first rank."""
    training, dims, parallelism = (
        resolved.config.training,
        resolved.dims,
        resolved.config.parallelism,
    )
    count, shards = resolved.config.num_microbatches, dims.dp_shard * dims.cp
    once = 1 if dims.pp > 1 else count  # in a pipeline they stay until the end of the step
    gathers = once if parallelism.keeps_gathered else 2 * count
    reductions = count if parallelism.fsdp_reduce_gradients == "every_microbatch" else 1
    width = gathers * BYTES[training.mixed_precision_param]
    width += reductions * BYTES[training.mixed_precision_reduce]
    own = resolved.model_args.table.of_blocks(resolved.modules_of(0))
    experts = sum(p.numel for p in own if p.layout == "experts")
    others = sum(p.numel for p in own) - experts
    parts = ((others / dims.tp, shards), (experts / max(dims.ep, 1), dims.efsdp))
    moved = [(width * number, ranks) for number, ranks in parts if ranks > 1]
    link = ring_width(range(0, shards * dims.tp, dims.tp), device)
    sent = sum(size * (ranks - 1) / ranks for size, ranks in moved)
    return 2 * sum(size for size, _ in moved) / device.bytes_per_s, sent / link


def _least_bytes(resolved: ResolvedJob, activations: float) -> float:
    """Return the bytes that the first rank surely has at once: a candidate that is left out by them
    wouldn't fit.

    At the end of the last forward in flight these are its state, its gathered weights, the
    gradients of earlier microbatches, and the `activations` of its layers, per microbatch.
    """
    least, ranks, count = resolved.least_bytes, resolved.dims.pp, resolved.config.num_microbatches
    in_flight: float = min(ranks, count)
    if resolved.config.parallelism.pipeline_parallel_schedule == "Interleaved1F1B":
        per_rank = len(resolved.pipeline_modules) // ranks
        ahead = (per_rank - 1) * ranks + 2 * (ranks - 1) + 1  # then one for each backward
        in_flight = min(ahead, count * per_rank) / per_rank
    then = ["weights", "optimizer", "gathered weights"]
    if count > in_flight:  # an earlier microbatch has left its gradients
        then.append("unsharded gradients")
    held = sum(least.get(purpose, 0.0) for purpose in then)
    return max(sum(least.values()), held + in_flight * activations)


@dataclass(frozen=True, order=True)
class Simulated:
    """A simulated candidate, in words. The best sorts first."""

    step_seconds: float
    peak_bytes: int
    candidate: str
    tokens_per_second: float


@dataclass(frozen=True)
class Found:
    """A search's outcome."""

    candidates: int
    too_large: int
    """By their estimates."""
    simulated: int
    ranked: list[Simulated]
    """The ones that fit; best first."""
    seconds: float
    source: str
    """Of the rates."""
    toml: str
    """Keys in which the best differs from the config."""


def search(config: JobConfig, given: Namespace, device: Device) -> str:
    """Return the best mesh and modes for the job, as a table and as TOML.

    Raises:
        ConfigError: if nothing fits.
    """
    job = plan_job(config, given.world_size, is_gpu=device.is_gpu)
    rule = "the model has no experts"
    is_used = given.imbalance == 1 or job.model_args.table.mixtures
    check(bool(is_used), "--imbalance", given.imbalance, rule, "leave it out")
    rates = devices.rates_of(job, device, given.imbalance)
    found = find(config, given.world_size, rates, given.workers)
    return json.dumps(asdict(found), indent=1) if given.json else to_text(found)


def find(config: JobConfig, ranks: int, device: Rates, workers: int) -> Found:
    """Estimate every legal candidate, simulate the fastest until `SIMULATED` fit, and rank these.

    Raises:
        ConfigError: if no candidate fits.
    """
    start = time.perf_counter()
    candidates = list(legal(config, ranks, device))
    estimates = estimate_all([resolved for _, resolved in candidates], device, workers)
    fitting = []
    for (update, resolved), (seconds, size) in zip(candidates, estimates, strict=True):
        peak, groups = round(size), sum(degree > 1 for degree in vars(resolved.dims).values())
        modelled = devices.non_tensor_memory(resolved, device, peak, groups, {})
        if devices.verdict(device, peak, modelled) == "fits":  # it might
            fitting.append((seconds, describe(resolved), update, resolved))
    queue = sorted(fitting, key=itemgetter(0, 1))
    found: list[tuple[Simulated, Update]] = []
    while queue and len(found) < SIMULATED:
        missing = SIMULATED - len(found)
        now, queue = queue[:missing], queue[missing:]
        tasks = [(resolved.config, ranks, device) for *_, resolved in now]
        needs = in_processes(tasks, need_of, workers, "simulated candidates")
        for (_, words, update, resolved), need in zip(now, needs, strict=True):
            if need.verdict == "fits":
                speed = resolved.config.tokens_per_step / need.seconds
                one = Simulated(need.seconds, need.peak_bytes, words, speed)
                found.append((one, update))
    check(bool(found), "--device", device.name, f"none of {len(candidates)} candidates fits")
    found.sort(key=itemgetter(0))
    return Found(
        len(candidates),
        len(candidates) - len(fitting),
        len(fitting) - len(queue),
        [one for one, _ in found],
        time.perf_counter() - start,
        device.parts.source,
        tomli_w.dumps(differing(config, found[0][1])),
    )


def estimate_all(
    plans: Sequence[ResolvedJob], device: Rates, workers: int
) -> list[tuple[float, float]]:
    """Measure the work of every shape once, and estimate all candidates."""
    configs = {shape_of(resolved): resolved.config for resolved in plans}
    tasks = [(config, device) for config in configs.values()]
    found = in_processes(tasks, measure_work, workers, "simulated layers")
    works = dict(zip(configs, found, strict=True))
    return [estimate(resolved, works[shape_of(resolved)], device) for resolved in plans]


def to_text(found: Found) -> str:
    """Return the ranked candidates, and the TOML that the best differs by."""
    lines = [
        f"{found.candidates} candidates, {found.too_large} too large; of {found.simulated} that "
        f"are estimated to be the fastest and were simulated, {len(found.ranked)} fit; "
        f"{found.seconds:.0f} s",
        f"ranked by tokens per second, {found.source}",
        f"  {'tokens/s':>12} {'GiB':>8}",
    ]
    for one in found.ranked:
        size = one.peak_bytes / GIB
        lines.append(f"  {one.tokens_per_second:>12,.0f} {size:>8.2f}  {one.candidate}")
    return "\n".join([*lines, "", found.toml.rstrip() or "# the config is the best already"])
