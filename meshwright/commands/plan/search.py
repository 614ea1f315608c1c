"""The best mesh and modes of a job: legal ones enumerated, estimated, and the best simulated."""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from itertools import product

import tomli_w
from tqdm import tqdm

from meshwright.commands.plan.devices import GIB, SOURCE, Device, Rates, overheads, verdict
from meshwright.commands.plan.figures import bubble, entry_seconds, layer_of, ring_width
from meshwright.commands.plan.predict import (
    Need,
    at_depth,
    in_processes,
    modules_of,
    need_of,
    num_parameters,
    period,
)
from meshwright.commands.plan.simulate import plan_job, simulate
from meshwright.commands.plan.trace import FORWARD, UPDATE
from meshwright.config.job_config import JobConfig, Update, changed, is_compiled
from meshwright.parallelisms.rules.compile_choice import resolve_compile
from meshwright.parallelisms.rules.memory import BYTES
from meshwright.parallelisms.rules.stages import SCHEDULES
from meshwright.system.errors import ConfigError, check
from meshwright.train.preflight import Plan

AXES = {
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "pp": "pipeline_parallel_degree",
}
"""Axes whose degrees a search chooses, with their keys. FSDP takes the ranks that they leave."""

MODES = ("none", "selective", "full")
"""Of recomputation, the fastest first; each keeps less than the one before it."""

LONG = 16384
"""Tokens of a sequence from which context parallelism is tried."""

SIMULATED = 8
"""Candidates that fit, of a search."""


@dataclass(frozen=True)
class Choice:
    """A mesh, with the modes of its pipeline, its microbatches and its memory."""

    degrees: tuple[int, ...]
    """In the order of `AXES`."""
    schedule: str
    """Empty without a pipeline."""
    local_batch_size: int
    recomputation: str
    keeps_gathered: bool
    """Gathered parameters stay from forward to backward."""

    @property
    def mesh(self) -> dict[str, int]:
        """Degrees by axis."""
        return dict(zip(AXES, self.degrees, strict=True))

    @property
    def shape(self) -> tuple[object, ...]:
        """The operators of a layer depend on nothing else that a search chooses, and grow with its
        sequences."""
        cut = (degree for axis, degree in self.mesh.items() if axis != "pp")
        return *cut, self.recomputation

    def update(self, global_batch_size: int) -> Update:
        """Return the keys to change."""
        # "default" keeps gathered parameters in a pipeline, and frees them without one
        policy = "never" if self.keeps_gathered else "always"
        is_default = self.keeps_gathered == (self.mesh["pp"] > 1)
        parallelism = {
            **{key: self.mesh[axis] for axis, key in AXES.items()},
            "data_parallel_replicate_degree": 1,
            "data_parallel_shard_degree": -1,
            "pipeline_parallel_stages_per_rank": -1,
            "module_fqns_per_model_part": [],
            "fsdp_reshard_after_forward": "default" if is_default else policy,
        }
        if self.schedule:
            parallelism["pipeline_parallel_schedule"] = self.schedule
        sizes = {"local_batch_size": self.local_batch_size, "global_batch_size": global_batch_size}
        return {
            "parallelism": parallelism,
            "activation_checkpoint": {"mode": self.recomputation},
            "training": sizes,
        }

    def __str__(self) -> str:
        """Return it in words."""
        names = [f"{axis} {size}" for axis, size in self.mesh.items() if size > 1]
        names = [*(names or ["FSDP alone"]), *([self.schedule] if self.schedule else [])]
        kept = ", gathered parameters kept" * self.keeps_gathered
        return (
            f"{', '.join(names)}; microbatch {self.local_batch_size}; "
            f"recomputation {self.recomputation}{kept}"
        )


def legal(config: JobConfig, ranks: int, device: Device) -> Iterator[tuple[Choice, Plan]]:
    """Yield every choice that preflight's checks let pass, with its plan.

    The global batch stays the config's, so more tokens per second are a shorter step.
    """
    plan = plan_job(config, ranks, is_gpu=device.is_gpu)
    batch = plan.config.training.global_batch_size
    whole = changed(config, {"training": {"global_batch_size": batch}})
    config, _ = resolve_compile(whole, plan.model_args, plan.fp32_modules, is_gpu=device.is_gpu)
    for choice in _choices(config, ranks, device):
        with suppress(ConfigError):
            candidate = changed(config, choice.update(batch))
            yield choice, plan_job(candidate, ranks, is_gpu=device.is_gpu)


def _choices(config: JobConfig, ranks: int, device: Device) -> Iterator[Choice]:
    """Yield powers of two: tensor parallelism within a node, pipelines of up to 16 ranks.

    Copies (HSDP) are not tried: they send and keep more, and the latency that they spare large
    groups is in no rate.
    """
    most = {
        "tp": min(device.per_node, 8),
        "cp": 8 if config.training.seq_len >= LONG else 1,
        "pp": 16,
    }
    powers = [1 << i for i in range(ranks.bit_length())]
    local = sorted({1, 2, 4, config.training.local_batch_size})
    for degrees in product(*([n for n in powers if n <= most[axis]] for axis in AXES)):
        mesh = dict(zip(AXES, degrees, strict=True))
        if ranks % math.prod(degrees) == 0:
            schedules = _schedules(config) if mesh["pp"] > 1 else [""]
            for words in product(schedules, local, MODES, (True, False)):
                yield Choice(degrees, *words)


def _schedules(config: JobConfig) -> list[str]:
    """Return the schedules to try. GPipe waits as long as 1F1B and keeps more. A plan leaves
    compilation out, which schedules that split backward do not allow."""
    names = ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
    is_split_refused = is_compiled(config.compile)
    return [name for name in names if not (is_split_refused and SCHEDULES[name].splits_backward)]


def difference(old: JobConfig, update: Update) -> str:
    """Return the keys of `update` in which it differs from `old`, as TOML."""
    sections = {
        name: {
            key: value for key, value in keys.items() if getattr(getattr(old, name), key) != value
        }
        for name, keys in update.items()
    }
    return tomli_w.dumps({name: keys for name, keys in sections.items() if keys})


@dataclass(frozen=True)
class Layer:
    """Time and memory of one sequence in a layer, on one rank; without FSDP's traffic, which
    depends on the ranks and not on the sequences."""

    seconds: float
    """Forward, backward and recomputation."""
    num_bytes: float
    """Activations that its forward leaves behind for backward."""


@dataclass(frozen=True)
class Work:
    """Time and memory of one sequence on one rank of a model, and of its optimizer."""

    layers: Sequence[Layer]
    """Of a shallow model. Those of a deeper one repeat them."""
    rest_s: float
    """Of the embedding, the last norm, the output projection and the loss."""
    update_s: float
    """Of the optimizer, per parameter of the rank."""


def measure_work(config: JobConfig, choice: Choice, device: Rates) -> Work:
    """Simulate one sequence in a model of few layers, with as few ranks as have the axes and FSDP.

    Args:
        choice: the work is that of every other with its `shape`, too.
    """
    ranks = 2 * math.prod(choice.degrees) // choice.mesh["pp"]
    degrees = tuple(1 if axis == "pp" else degree for axis, degree in choice.mesh.items())
    alone = Choice(degrees, "", 1, choice.recomputation, False)
    plan = plan_job(changed(config, alone.update(2)), ranks, is_gpu=device.is_gpu)
    with suppress(ConfigError):  # if the config names layers that a shallow model lacks
        plan = at_depth(plan, device, 2 * period(config))
    simulation = simulate(plan, 0, is_gpu=device.is_gpu)
    seconds, kept = defaultdict[int | str, float](float), defaultdict[int, float](float)
    for entry in simulation.entries:
        layer = layer_of(entry.at.module)
        if entry.at.phase == UPDATE or not entry.is_fsdp:
            seconds[UPDATE if entry.at.phase == UPDATE else layer] += entry_seconds(entry, device)
    record = simulation.record
    born = {event.item: event.delta for event in reversed(record.events)}  # the first of each
    for number, size in born.items():
        item = record.items[number]
        if item.purpose == "activations" and item.born.phase == FORWARD:
            kept[layer_of(item.born.module)] += size
    return Work(
        [Layer(seconds[n], kept[n]) for n in range(plan.model_args.n_layers)],
        seconds[-1],
        seconds[UPDATE] * ranks / num_parameters(plan, 0),
    )


def estimate(plan: Plan, work: Work, device: Rates) -> tuple[float, float]:
    """Return a candidate's seconds per step, and bytes that its first rank surely has at once."""
    dims, count, size = plan.dims, plan.num_microbatches, plan.config.training.local_batch_size
    ends = [modules_of(plan, rank) for rank in (0, dims.num_ranks // dims.pp * (dims.pp - 1))]
    layers = [[work.layers[n % len(work.layers)] for n in _numbers(names)] for names in ends]
    copies, sent = _fsdp_seconds(plan, device)
    busy = copies + max(
        count * size * (sum(one.seconds for one in of) + ("output" in names) * work.rest_s)
        for of, names in zip(layers, ends, strict=True)
    )
    parameters = num_parameters(plan, 0) / (dims.tp * dims.dp_shard * dims.cp)
    backward = 0.75 if plan.config.activation_checkpoint.mode == "full" else 2 / 3
    seconds = max(busy, sent) / (1 - bubble(plan, backward)) + work.update_s * parameters
    return seconds, _least_bytes(plan, size * sum(one.num_bytes for one in layers[0]))


def _numbers(names: Sequence[str]) -> list[int]:
    """Return the numbers of the layers among the modules."""
    return [number for name in names if (number := layer_of(name)) >= 0]


def _fsdp_seconds(plan: Plan, device: Rates) -> tuple[float, float]:
    """Return the time of FSDP's copies into and out of its buffers, and of its collectives, on the
    first rank."""
    training, dims, parallelism = plan.config.training, plan.dims, plan.config.parallelism
    count, shards = plan.num_microbatches, dims.dp_shard * dims.cp
    if shards == 1:
        return 0.0, 0.0
    policy = parallelism.fsdp_reshard_after_forward
    if dims.pp > 1:  # gathered weights stay until the end of the step
        gathers = 2 * count if policy == "always" else 1
    else:
        gathers = count if policy == "never" else 2 * count
    reductions = count if parallelism.fsdp_reduce_gradients == "every_microbatch" else 1
    width = gathers * BYTES[training.mixed_precision_param]
    width += reductions * BYTES[training.mixed_precision_reduce]
    moved = num_parameters(plan, 0) / dims.tp * width
    link = ring_width(range(0, shards * dims.tp, dims.tp), device)
    return 2 * moved / device.bytes_per_s, moved * (shards - 1) / shards / link


def _in_flight(plan: Plan) -> float:
    """Return the most microbatches whose activations the first rank keeps at once, in parts that
    are stages."""
    ranks, schedule = plan.dims.pp, plan.config.parallelism.pipeline_parallel_schedule
    count, per_rank = plan.num_microbatches, len(plan.stage_modules) // plan.dims.pp
    if schedule != "Interleaved1F1B":
        return min(ranks, count)
    ahead = (per_rank - 1) * ranks + 2 * (ranks - 1) + 1  # then one for each backward
    return min(ahead, count * per_rank) / per_rank


def _least_bytes(plan: Plan, activations: float) -> float:
    """Return the bytes that the first rank surely has at once: a candidate that is left out by them
    would not fit.

    At the end of the last forward in flight these are its state, its gathered weights, the
    gradients of earlier microbatches, and the activations of its layers. The loss and the layer
    that runs come on top.

    Args:
        activations: of a microbatch, in all layers.
    """
    least, in_flight = plan.least_bytes, _in_flight(plan)
    whole = least.get("gathered weights", 0.0)
    if plan.num_microbatches > in_flight:
        whole += least.get("whole gradients", 0.0)
    state = least.get("weights", 0.0) + least.get("optimizer", 0.0)
    return max(sum(least.values()), state + whole + in_flight * activations)


@dataclass(frozen=True)
class Candidate:
    """A choice, simulated."""

    step_seconds: float
    peak_bytes: int
    candidate: str
    """In words. Fields are in the order that the best are sorted by."""
    tokens_per_second: float


@dataclass(frozen=True)
class Found:
    """A search's outcome."""

    candidates: int
    """Legal ones."""
    too_large: int
    """By their estimates."""
    simulated: int
    ranked: list[Candidate]
    """Simulated ones that fit; best first."""
    seconds: float
    source: str
    """Of the rates."""
    toml: str
    """Keys in which the best differs from the config."""


def find(config: JobConfig, ranks: int, device: Rates, workers: int) -> Found:
    """Estimate every legal candidate, simulate the fastest until `SIMULATED` fit, and rank these.

    Raises:
        ConfigError: if no candidate fits.
    """
    start = time.perf_counter()
    plans = dict(legal(config, ranks, device))
    estimates = estimate_all(config, plans, device, workers)
    fitting = [c for c, plan in plans.items() if may_fit(estimates[c][1], plan, device)]
    queue = sorted(fitting, key=lambda choice: (estimates[choice][0], str(choice)))
    found: dict[Candidate, Choice] = {}
    with tqdm(total=SIMULATED, desc="simulated", disable=None, file=sys.stderr) as bar:
        while queue and len(found) < SIMULATED:
            missing = SIMULATED - len(found)
            now, queue = queue[:missing], queue[missing:]
            tasks = [(plans[choice].config, ranks, device) for choice in now]
            for index, need in in_processes(tasks, need_of, workers):
                assert isinstance(need, Need), need
                if need.verdict == "fits":
                    training = plans[now[index]].config.training
                    speed = training.global_batch_size * training.seq_len / need.seconds
                    words = str(now[index])
                    one = Candidate(need.seconds, need.peak_bytes, words, speed)
                    found[one] = now[index]
                    bar.update()
    check(bool(found), "--device", device.name, f"none of {len(plans)} candidates fits")
    ranked = sorted(found, key=astuple)
    best = found[ranked[0]]
    return Found(
        len(plans),
        len(plans) - len(fitting),
        len(fitting) - len(queue),
        ranked,
        time.perf_counter() - start,
        SOURCE,
        difference(config, best.update(plans[best].config.training.global_batch_size)),
    )


def estimate_all(
    config: JobConfig, plans: dict[Choice, Plan], device: Rates, workers: int
) -> dict[Choice, tuple[float, float]]:
    """Measure the work of every shape once, and estimate all candidates."""
    shapes = {choice.shape: choice for choice in plans}
    tasks = [(config, choice, device) for choice in shapes.values()]
    works = dict(in_processes(tasks, measure_work, workers))
    by_shape = {shape: works[number] for number, shape in enumerate(shapes)}
    found = {}
    for choice, plan in plans.items():
        work = by_shape[choice.shape]
        assert isinstance(work, Work), work
        found[choice] = estimate(plan, work, device)
    return found


def may_fit(num_bytes: float, plan: Plan, device: Device) -> bool:
    """Return whether a rank with at least so many bytes of tensors might fit."""
    peak, groups = round(num_bytes), sum(size > 1 for size in vars(plan.dims).values())
    return verdict(device, peak, overheads(device, peak, peak, groups)) == "fits"


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
