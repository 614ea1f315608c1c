"""The best mesh and modes of a job: legal ones enumerated, estimated, and the best simulated."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from itertools import product
from typing import Any

import tomli_w
from tqdm import tqdm

from meshwright.commands.plan.devices import GIB, SOURCE, Device, Rates, overheads, verdict
from meshwright.commands.plan.figures import bubble, entry_seconds, peaks_by_place, ring_width
from meshwright.commands.plan.ledger import AT_START
from meshwright.commands.plan.predict import (
    Need,
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

MODES = ("none", "selective", "full")
"""Of recomputation, the fastest first; each keeps less than the one before it."""


LONG = 16384
"""Tokens of a sequence from which context parallelism is tried."""


@dataclass(frozen=True)
class Choice:
    """A mesh, with the modes of its pipeline, its microbatches and its memory."""

    tensor: int
    context: int
    pipeline: int
    schedule: str
    """Empty without a pipeline."""
    local_batch_size: int
    recomputation: str
    keeps_gathered: bool
    """Gathered parameters stay from forward to backward."""

    def update(self, global_batch_size: int) -> Update:
        """Return the keys to change."""
        # "default" keeps gathered parameters in a pipeline, and frees them without one
        policy = "never" if self.keeps_gathered else "always"
        is_default = self.keeps_gathered == (self.pipeline > 1)
        parallelism: dict[str, Any] = {
            "tensor_parallel_degree": self.tensor,
            "context_parallel_degree": self.context,
            "pipeline_parallel_degree": self.pipeline,
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
        axes = {"tp": self.tensor, "cp": self.context, "pp": self.pipeline}
        names = [f"{axis} {size}" for axis, size in axes.items() if size > 1] or ["FSDP alone"]
        if self.schedule:
            names.append(self.schedule)
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
    powers = [1 << i for i in range(ranks.bit_length())]
    tensor = [n for n in powers if n <= min(device.per_node, ranks, 8)]
    context = [n for n in powers if n <= 8] if config.training.seq_len >= LONG else [1]
    pipeline = [n for n in powers if n <= 16]
    local = sorted({1, 2, 4, config.training.local_batch_size})
    for tp, cp, pp, size in product(tensor, context, pipeline, local):
        if ranks % (tp * cp * pp) == 0:
            schedules = _schedules(config) if pp > 1 else [""]
            for schedule, mode, keeps in product(schedules, MODES, (True, False)):
                yield Choice(tp, cp, pp, schedule, size, mode, keeps)


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
class Work:
    """Time and memory of one sequence on one rank of a model, and of its optimizer.

    FSDP's traffic is left out: it depends on the ranks, and not on the sequences.
    """

    layer_s: float
    """Forward, backward and recomputation of a layer."""
    rest_s: float
    """Of the embedding, the last norm, the output projection and the loss."""
    update_s: float
    """Of the optimizer, per parameter of the rank."""
    layer_bytes: float
    """Activations that a layer's forward leaves behind for backward."""
    rest_bytes: float
    """The most that there is besides before the optimizer's step, taken as if it did not grow with
    the sequences: a low estimate costs a simulation, a high one might lose the best."""


Shape = tuple[int, int, str]
"""Degrees of tensor and context parallelism, mode of recomputation: the operators of a layer depend
on nothing else that a search chooses, and grow with its sequences."""


def shape_of(choice: Choice) -> Shape:
    """Return the key of the `Work` that is `choice`'s."""
    return choice.tensor, choice.context, choice.recomputation


def measure_work(config: JobConfig, shape: Shape, device: Device, rates: Rates) -> Work:
    """Simulate one sequence in a model of few layers, with as few ranks as have TP, CP and FSDP."""
    tensor, context, mode = shape
    ranks = 2 * tensor * context
    alone = Choice(tensor, context, 1, "", 1, mode, False)
    config = changed(config, alone.update(2))
    args = config.model.args | {"n_layers": 2 * period(config)}
    try:
        plan = plan_job(changed(config, {"model": {"args": args}}), ranks, is_gpu=device.is_gpu)
    except ConfigError:  # the config names layers that a shallow model lacks
        plan = plan_job(config, ranks, is_gpu=device.is_gpu)
    simulation, layers = simulate(plan, 0, is_gpu=device.is_gpu), plan.model_args.n_layers
    seconds = dict.fromkeys(("layers", "rest", UPDATE), 0.0)
    for entry in simulation.entries:
        part = "layers" if entry.at.module.startswith("layers.") else "rest"
        if entry.at.phase == UPDATE or not entry.is_fsdp:
            part = UPDATE if entry.at.phase == UPDATE else part
            seconds[part] += entry_seconds(entry, rates, device.per_node)
    record = simulation.record
    born = {event.item: event.delta for event in reversed(record.events)}  # the first of each
    kept = sum(
        born[number]
        for number, item in enumerate(record.items)
        if item.purpose == "activations"
        and item.born.phase == FORWARD
        and item.born.module.startswith("layers.")
        and number in born
    )
    places = peaks_by_place(record).items()
    peak = max(size for place, size in places if not place.startswith((UPDATE, AT_START.phase)))
    state = plan.least_bytes.get("weights", 0.0) + plan.least_bytes.get("optimizer", 0.0)
    return Work(
        seconds["layers"] / layers,
        seconds["rest"],
        seconds[UPDATE] * ranks / num_parameters(plan, 0),
        kept / layers,
        max(0.0, peak - state - kept),
    )


def estimate(plan: Plan, work: Work, device: Device, rates: Rates) -> tuple[float, float]:
    """Return a candidate's seconds per step, and the bytes of its first rank's tensors."""
    dims, count, size = plan.dims, plan.num_microbatches, plan.config.training.local_batch_size
    ends = [modules_of(plan, rank) for rank in (0, dims.num_ranks // dims.pp * (dims.pp - 1))]
    depths = [sum("layers." in name for name in names) for names in ends]
    copies, sent = _fsdp_seconds(plan, device, rates)
    busy = copies + max(
        count * size * (depth * work.layer_s + ("output" in names) * work.rest_s)
        for depth, names in zip(depths, ends, strict=True)
    )
    parameters = num_parameters(plan, 0) / (dims.tp * dims.dp_shard * dims.cp)
    backward = 0.75 if plan.config.activation_checkpoint.mode == "full" else 2 / 3
    seconds = max(busy, sent) / (1 - bubble(plan, backward)) + work.update_s * parameters
    return seconds, _num_bytes(plan, work, depths[0])


def _fsdp_seconds(plan: Plan, device: Device, rates: Rates) -> tuple[float, float]:
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
    link = ring_width(range(0, shards * dims.tp, dims.tp), rates, device.per_node)
    return 2 * moved / rates.stream, moved * (shards - 1) / shards / link


def _in_flight(plan: Plan) -> float:
    """Return the most microbatches whose activations the first rank keeps at once, in parts that
    are stages."""
    ranks, schedule = plan.dims.pp, plan.config.parallelism.pipeline_parallel_schedule
    count, per_rank = plan.num_microbatches, len(plan.stage_modules) // plan.dims.pp
    if schedule != "Interleaved1F1B":
        return min(ranks, count)
    ahead = (per_rank - 1) * ranks + 2 * (ranks - 1) + 1  # then one for each backward
    return min(ahead, count * per_rank) / per_rank


def _num_bytes(plan: Plan, work: Work, depth: int) -> float:
    """Return the peak of the first rank's tensors, with `depth` layers."""
    least, size = plan.least_bytes, plan.config.training.local_batch_size
    in_flight = _in_flight(plan)
    state = least.get("weights", 0.0) + least.get("optimizer", 0.0)
    kept = size * in_flight * depth * work.layer_bytes + work.rest_bytes
    whole = least.get("gathered weights", 0.0)
    if plan.num_microbatches > in_flight:
        whole += least.get("whole gradients", 0.0)
    return max(sum(least.values()), state + whole + kept)


SIMULATED = 8
"""Candidates that fit, of a search."""


MOST_OVER = 1.1
"""How many times the simulated peak an estimate may be: benchmarks/results/plans.md."""


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


def find(config: JobConfig, ranks: int, device: Device, rates: Rates, workers: int) -> Found:
    """Estimate every legal candidate, simulate the fastest until `SIMULATED` fit, and rank these.

    Raises:
        ConfigError: if no candidate fits.
    """
    start = time.perf_counter()
    plans = dict(legal(config, ranks, device))
    estimates = estimate_all(config, plans, device, rates, workers)
    fitting = [c for c, plan in plans.items() if may_fit(estimates[c][1], plan, device)]
    queue = sorted(fitting, key=lambda choice: (estimates[choice][0], str(choice)))
    found: dict[Candidate, Choice] = {}
    num_simulated = 0
    with tqdm(total=SIMULATED, desc="simulated", disable=None, file=sys.stderr) as bar:
        while queue and len(found) < SIMULATED:
            missing = SIMULATED - len(found)
            now, queue = queue[:missing], queue[missing:]
            num_simulated += len(now)
            tasks = [(plans[choice].config, ranks, device, rates) for choice in now]
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
        num_simulated,
        ranked,
        time.perf_counter() - start,
        SOURCE,
        difference(config, best.update(plans[best].config.training.global_batch_size)),
    )


def estimate_all(
    config: JobConfig, plans: dict[Choice, Plan], device: Device, rates: Rates, workers: int
) -> dict[Choice, tuple[float, float]]:
    """Measure the work of every shape once, and estimate all candidates."""
    shapes = [*dict.fromkeys(shape_of(choice) for choice in plans)]
    tasks = [(config, shape, device, rates) for shape in shapes]
    works = dict(in_processes(tasks, measure_work, workers))
    found = {}
    for choice, plan in plans.items():
        work = works[shapes.index(shape_of(choice))]
        assert isinstance(work, Work), work
        found[choice] = estimate(plan, work, device, rates)
    return found


def may_fit(num_bytes: float, plan: Plan, device: Device) -> bool:
    """Return whether tensors that are estimated to take so many bytes might fit."""
    peak = round(num_bytes / MOST_OVER)
    groups = sum(size > 1 for size in vars(plan.dims).values())
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
