"""A plan as text, and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from meshwright.planning import analysis
from meshwright.planning.analysis import Peak, Traffic
from meshwright.planning.devices import GIB, Device, Overhead, overheads, verdict
from meshwright.planning.ledger import PURPOSES
from meshwright.planning.rates import Assumed, Rates
from meshwright.planning.simulate import Simulation
from meshwright.planning.timing import StepTime, step_time
from meshwright.preflight import Plan


@dataclass(frozen=True)
class Timing:
    """Step time at one set of rates."""

    source: str
    step: StepTime
    mfu: float


@dataclass(frozen=True)
class RankPlan:
    """All figures of one rank."""

    rank: int
    stages: list[int]
    peak: Peak
    most: dict[str, int]
    """Most bytes of each purpose over the step."""
    overheads: list[Overhead]
    verdict: str
    traffic: list[Traffic]
    flops: dict[str, int]
    timings: list[Timing]
    """By measured rates; or of a bound and of a poor case; or none, if nothing is published."""
    simulated: int
    """Microbatches that were simulated."""
    curve: list[dict[str, int]]


def summarize(
    plan: Plan, simulation: Simulation, device: Device, rates: list[Rates], stages: list[int]
) -> RankPlan:
    """Return the figures of a simulated rank."""
    record, count = simulation.record, plan.num_microbatches
    peak = analysis.find_peak(record)
    traffic = analysis.traffic(simulation, count, device.per_node)
    groups = analysis.num_groups(traffic)
    modelled = overheads(device, peak.num_bytes, analysis.rounded_peak(record), groups)
    timings = []
    for rate in rates:
        step = step_time(simulation, count, rate, device.per_node)
        timings.append(Timing(rate.source, step, _mfu(plan, device, rate, step.seconds)))
    return RankPlan(
        simulation.rank,
        stages,
        peak,
        analysis.most_by_purpose(record),
        modelled,
        verdict(device, peak.num_bytes, modelled),
        traffic,
        analysis.flops(simulation, count),
        timings,
        simulation.simulated,
        analysis.curve(record),
    )


def tokens_per_step(plan: Plan) -> int:
    """Return the tokens of a step, over all ranks."""
    return plan.config.training.global_batch_size * plan.config.training.seq_len


def _mfu(plan: Plan, device: Device, rates: Rates, seconds: float) -> float:
    """At most 1: the bound skips masked pairs of attention, which MFU counts."""
    dtype = plan.config.training.mixed_precision_param
    is_by_sheet = isinstance(rates, Assumed) or (device.flops_per_s and dtype == "bfloat16")
    peak = device.peak(dtype) if is_by_sheet else rates.peak[dtype]
    per_token = plan.model_args.table.flops_per_token(plan.config.training.seq_len)
    return min(1.0, tokens_per_step(plan) * per_token / plan.dims.num_ranks / seconds / peak)


def _range(values: list[float]) -> Any:
    return values[0] if len(values) == 1 else sorted(values) or None


def to_json(plan: Plan, ranks: list[RankPlan], device: Device, remedies: Any) -> dict[str, Any]:
    """Return the plan for programs; figures at the top are those of the rank with the highest peak.

    `step_seconds` and `mfu` are numbers if the rates are measured, [low, high] if they are assumed,
    and null if nothing is published of the device.
    """
    shown = max(ranks, key=lambda rank: rank.peak.num_bytes)
    at_peak = shown.peak.by_purpose
    return {
        "peak_bytes": shown.peak.num_bytes,
        "parameters_bytes": at_peak["parameters"],
        "optimizer_bytes": at_peak["optimizer"],
        "gradients_bytes": at_peak["gradients"],
        "activations_bytes": at_peak["activations"],
        "step_seconds": _range([timing.step.seconds for timing in shown.timings]),
        "mfu": _range([timing.mfu for timing in shown.timings]),
        "fits": shown.verdict == "fits",
        "verdict": shown.verdict,
        "step_seconds_source": " to ".join(timing.source for timing in shown.timings),
        "rank": shown.rank,
        "world_size": plan.dims.num_ranks,
        "device": asdict(device),
        "mesh": asdict(plan.dims),
        "samples_per_step": plan.config.training.global_batch_size,
        "tokens_per_step": tokens_per_step(plan),
        "microbatches": plan.num_microbatches,
        "flops_per_token_for_mfu": plan.model_args.table.flops_per_token(
            plan.config.training.seq_len
        ),
        "ranks": [asdict(rank) for rank in ranks],
        "remedies": remedies,
    }


def to_text(plan: Plan, ranks: list[RankPlan], device: Device) -> str:
    """Return the plan for people."""
    shown = max(ranks, key=lambda rank: rank.peak.num_bytes)
    lines = [
        f"{shown.verdict}: {plan.model_args.table.num_params / 1e9:.2f} B parameters on "
        f"{plan.dims.num_ranks} x {device.name} ({str(plan.dims) or 'one rank'})",
        f"{plan.config.training.global_batch_size} samples, {tokens_per_step(plan):,} tokens per "
        f"step, in {plan.num_microbatches} microbatches per rank",
    ]
    for rank in ranks:
        lines += ["", *_rank_lines(rank, device)]
    if len(ranks) < plan.dims.pp:
        lines += ["", "other stages differ: --all-stages plans one rank of each"]
    lines += ["", *_timing_lines(shown)]
    return "\n".join(lines)


def _rank_lines(rank: RankPlan, device: Device) -> list[str]:
    peak = rank.peak
    stage = f", stage {', '.join(map(str, rank.stages))}" if rank.stages else ""
    low, high = (sum(getattr(part, end) for part in rank.overheads) for end in ("low", "high"))
    lines = [
        f"rank {rank.rank}{stage}: {_gib(peak.num_bytes)} GiB of tensors at the peak of a step "
        f"(eager; compiled blocks need less)",
        f"  at {peak.operator} in {peak.module or 'the step'}, {peak.phase} of microbatch "
        f"{peak.microbatch}",
        f"  {'GiB':32} at the peak   most in the step",
    ]
    for purpose in PURPOSES:
        if rank.most[purpose]:
            at_peak, most = _gib(peak.by_purpose[purpose]), _gib(rank.most[purpose])
            lines.append(f"  {purpose:32} {at_peak:>11} {most:>18}")
    lines.append(f"  {'sum':32} {_gib(peak.num_bytes):>11}")
    modules = [f"{name} {_gib(size)}" for name, size in list(peak.by_module.items())[:6]]
    if modules:
        lines.append(f"  activations at the peak: {', '.join(modules)}")
    lines.append(f"  modelled besides: {_gib(low)} to {_gib(high)} GiB")
    lines += [
        f"    {part.what:30} {_gib(part.low):>11} to {_gib(part.high)}" for part in rank.overheads
    ]
    total = f"{_gib(peak.num_bytes + low)} to {_gib(peak.num_bytes + high)}"
    lines.append(f"  {rank.verdict}: {total} of {device.memory_gib:g} GiB")
    if rank.traffic:
        lines.append(f"  {'sent per step':32} {'calls':>11} {'GiB':>18}")
    for row in rank.traffic:
        where = "in a node" if row.is_in_node else "across nodes"
        lines.append(
            f"  {f'{row.axis} {row.kind}, {where}':32} {row.calls:>11} {_gib(row.sent_bytes):>18}"
        )
    lines.append(f"  {'TFLOP per step':32}")
    lines += [f"  {kind:32} {count / 1e12:>11.3f}" for kind, count in rank.flops.items()]
    return lines


def _timing_lines(rank: RankPlan) -> list[str]:
    if not rank.timings:
        return ["step time: not known; --calibrate measures a device of this machine"]
    lines = []
    for timing in rank.timings:
        step = timing.step
        lines.append(
            f"step: {step.seconds:.4g} s, {100 * timing.mfu:.1f} % MFU: {timing.source} "
            f"(exposed communication {step.exposed_s:.3g} s, "
            f"pipeline bubble {100 * step.bubble:.1f} %)"
        )
    return lines


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.3f}" if num_bytes < 0.1 * GIB else f"{num_bytes / GIB:.2f}"
