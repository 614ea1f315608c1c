"""A plan as text, as JSON and as a page."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from meshwright.commands.options import write_output
from meshwright.commands.plan import devices, figures
from meshwright.commands.plan.devices import GIB, WAIT_S, Device, error_of_time, parts_of
from meshwright.commands.plan.figures import StepTime
from meshwright.commands.plan.predict import Need, find_remedies, telling_ranks
from meshwright.commands.plan.simulate import plan_job, simulate, worst_imbalance
from meshwright.config.changes import changed
from meshwright.config.job_config import JobConfig
from meshwright.metrics.report.document import Chart, Curve, document, draw
from meshwright.system.errors import check
from meshwright.system.processes import in_processes
from meshwright.train.resolve import ResolvedJob


def plan(config: JobConfig, given: Namespace, device: Device) -> str:
    """Return the plan of the rank that `given` names, of the ranks that need most, or of the first
    rank of every place of the pipeline.

    Raises:
        ConfigError: if the job can't run.
    """
    world_size = given.world_size
    job = plan_job(config, world_size, is_gpu=device.is_gpu)
    worst = math.floor(1000 * worst_imbalance(job)) / 1000
    rule = f"experts of a rank of this job get at most {worst} times the mean of rows"
    check(given.imbalance <= worst, "--imbalance", given.imbalance, rule, f"--imbalance {worst}")
    rates = devices.rates_of(job, device, given.imbalance)
    ranks = telling_ranks(job) if given.rank is None else [given.rank]
    if given.all_stages:
        ranks = [*job.dims.first_ranks]
    tasks = [(job.config, world_size, rank, rates) for rank in ranks]
    if len(ranks) == 1:
        found = [plan_rank(*tasks[0])]
    else:
        found = in_processes(tasks, plan_rank, given.workers, "simulated ranks")
    shown, remedies = largest_rank(found), list[tuple[str, Need]]()
    if shown.verdict != "fits" and not given.no_remedies:
        as_given = changed(job.config, {"compile": {"enable": config.compile.enable}})
        peak = shown.peak.num_bytes
        remedies = find_remedies(as_given, peak, world_size, rates, given.workers)
    if given.html is not None:
        write_output(given.html, to_html(job, found, device), "--html")
    if given.json:
        return json.dumps(to_json(job, found, device, remedies), indent=1)
    lines = [f"  {x.peak_bytes / GIB:8.2f} GiB, {x.verdict:12} {change}" for change, x in remedies]
    if remedies:
        lines = ["", "with one change, from two shallow depths:", *lines]
    return "\n".join([to_text(job, found, device), *lines])


@dataclass(frozen=True)
class RankPlan:
    """All numbers of one rank."""

    rank: int
    stages: list[int]
    peak: figures.Peak
    most: dict[str, int]
    """Most bytes of each purpose over the step."""
    overheads: list[devices.Overhead]
    verdict: str
    traffic: list[figures.Traffic]
    flops: dict[str, int]
    time: StepTime | None
    """None: nothing is published of the device."""
    simulated: int
    """Microbatches that were simulated."""
    imbalance: float
    """As `simulate` takes it."""
    curve: list[dict[str, int]]


def plan_rank(config: JobConfig, world_size: int, rank: int, device: devices.Rates) -> RankPlan:
    """Return the numbers of one rank, simulated in this process."""
    resolved = plan_job(config, world_size, is_gpu=device.is_gpu)
    simulation = simulate(resolved, rank, is_gpu=device.is_gpu, imbalance=device.imbalance)
    memory, time = (
        figures.Memory(simulation.record),
        figures.step_time(simulation, resolved, device),
    )
    peak, most = memory.peak, memory.most()
    modelled = devices.non_tensor_memory(
        resolved, device, peak.num_bytes, simulation.num_groups, most
    )
    return RankPlan(
        rank,
        resolved.pipeline_stages_of(rank) if resolved.dims.pp > 1 else [],
        peak,
        most,
        modelled,
        devices.verdict(device, peak.num_bytes, modelled),
        figures.traffic(simulation, device.per_node),
        figures.flops(simulation),
        time,
        simulation.simulated,
        device.imbalance,
        memory.curve(),
    )


def mfu(resolved: ResolvedJob, device: Device, seconds: float, *, is_causal: bool = False) -> float:
    """Return the model FLOPs utilization of a step; `is_causal` as `flops_per_token` takes it."""
    training, table = resolved.config.training, resolved.model_args.table
    peak = device.peak(training.mixed_precision_param)
    per_token = table.flops_per_token(training.seq_len, is_causal=is_causal)
    return resolved.config.tokens_per_step * per_token / resolved.dims.num_ranks / seconds / peak


def largest_rank(ranks: list[RankPlan]) -> RankPlan:
    """Return the rank that needs most memory: its verdict is the job's."""
    return max(ranks, key=lambda x: x.peak.num_bytes + sum(part.high for part in x.overheads))


def slowest(ranks: list[RankPlan]) -> StepTime | None:
    """Return the time of the rank with the longest step; None without rates."""
    times = [rank.time for rank in ranks if rank.time is not None]
    return max(times, key=lambda time: time.seconds, default=None)


def to_json(
    resolved: ResolvedJob,
    ranks: list[RankPlan],
    device: Device,
    remedies: Sequence[tuple[str, Need]],
) -> dict[str, Any]:
    """Return the plan for programs; numbers at the top are of the rank that needs most.

    `step_seconds` and `mfu` are of the slowest rank, and null if nothing is published of the
    device. `mfu` counts all pairs of attention, `mfu_causal` half of them. `step_seconds_error` is
    a part of `step_seconds`, and null if no run on the device was compared.
    """
    shown, time, training = largest_rank(ranks), slowest(ranks), resolved.config.training
    kinds = ("parameters", "optimizer", "gradients", "activations")
    return {
        "peak_bytes": shown.peak.num_bytes,
        **{f"{kind}_bytes": shown.peak.by_purpose[kind] for kind in kinds},
        "step_seconds": time and time.seconds,
        "step_seconds_error": time and error_of_time(device),
        "step_seconds_source": parts_of(device).source if time else "",
        "mfu": time and mfu(resolved, device, time.seconds),
        "mfu_causal": time and mfu(resolved, device, time.seconds, is_causal=True),
        "fits": shown.verdict == "fits",
        "verdict": shown.verdict,
        "rank": shown.rank,
        "world_size": resolved.dims.num_ranks,
        "device": asdict(device),
        "mesh": asdict(resolved.dims),
        "samples_per_step": training.global_batch_size,
        "tokens_per_step": resolved.config.tokens_per_step,
        "microbatches": resolved.config.num_microbatches,
        "parameters": resolved.model_args.table.num_params,
        "active_parameters": resolved.model_args.table.num_active_params,
        "flops_per_token_for_mfu": resolved.model_args.table.flops_per_token(training.seq_len),
        "ranks": [asdict(rank) for rank in ranks],
        "remedies": [
            {"change": change, "peak_bytes": need.peak_bytes, "verdict": need.verdict}
            for change, need in remedies
        ],
    }


def to_text(resolved: ResolvedJob, ranks: list[RankPlan], device: Device) -> str:
    """Return the plan for people."""
    shown, count, dims = largest_rank(ranks), resolved.config.num_microbatches, resolved.dims
    of = f" (of rank {shown.rank})" if len(ranks) > 1 else ""
    table, active = resolved.model_args.table, ""
    if table.mixtures:
        active = f", {_parameters(table.num_active_params)} of them active for a token,"
    lines = [
        f"{shown.verdict}{of}: {_parameters(table.num_params)} parameters{active} on "
        f"{dims.num_ranks} x {device.name} ({str(dims) or 'one rank'})",
        f"{resolved.config.training.global_batch_size} samples, "
        f"{resolved.config.tokens_per_step:,} tokens per step, "
        f"in {count} {'microbatch' if count == 1 else 'microbatches'} per rank",
    ]
    if table.mixtures:
        lines.append(f"experts of a rank get {shown.imbalance:g} times the mean of rows")
    for rank in ranks:
        lines += ["", *_rank_lines(rank, device)]
    if len(ranks) == 1 and dims.pp > 1:
        lines += ["", f"of rank {shown.rank} only: without --rank, the ranks that need most"]
    return "\n".join([*lines, "", *_time_lines(resolved, slowest(ranks), device)])


def _parameters(count: int) -> str:
    """Return a number of parameters with three digits: 8.03 B, 5.77 M."""
    unit, size = ("B", 1e9) if count >= 1e9 else ("M", 1e6)
    return f"{count / size:.3g} {unit}" if count < 100 * size else f"{count / size:.0f} {unit}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.3f}" if num_bytes < 0.1 * GIB else f"{num_bytes / GIB:.2f}"


def _rank_lines(rank: RankPlan, device: Device) -> list[str]:
    peak, total = rank.peak, _gib(rank.peak.num_bytes)
    stage = f", stage {', '.join(map(str, rank.stages))}" if rank.stages else ""
    low, high = (sum(getattr(part, end) for part in rank.overheads) for end in ("low", "high"))
    ends = f"{_gib(peak.num_bytes + low)} to {_gib(peak.num_bytes + high)}"

    def row(name: str, first: object, second: object = "") -> str:
        return f"  {name:32} {first:>11} {second:>18}".rstrip()

    lines = [
        f"rank {rank.rank}{stage}: {total} GiB of tensors at the peak of a step "
        f"(eager; compiled blocks need less)",
        f"  at {peak.operator} in {peak.module or 'the step'}, {peak.phase} of microbatch "
        f"{peak.microbatch}",
        f"  {'GiB':32} at the peak   most in the step",
    ]
    for purpose, most in rank.most.items():
        if most:
            lines.append(row(purpose, _gib(peak.by_purpose[purpose]), _gib(most)))
    lines.append(row("sum", total))
    if peak.by_module:
        lines.append("  activations at the peak:")
    lines += [row(f"  {name}", _gib(size)) for name, size in [*peak.by_module.items()][:6]]
    lines.append(f"  modeled besides: {_gib(low)} to {_gib(high)} GiB")
    lines += [f"{row(f'  {x.what}', _gib(x.low))} to {_gib(x.high)}" for x in rank.overheads]
    lines.append(f"  {rank.verdict}: {ends} of {device.memory_gib:g} GiB")
    if rank.traffic:
        lines.append(row("sent per step", "calls", "GiB"))
    for sent in rank.traffic:
        where = "in a node" if sent.is_in_node else "across nodes"
        lines.append(row(f"{sent.axis} {sent.kind}, {where}", sent.calls, _gib(sent.sent_bytes)))
    lines.append("  TFLOP per step")
    return lines + [row(kind, f"{count / 1e12:.3f}") for kind, count in rank.flops.items()]


def _time_lines(resolved: ResolvedJob, time: StepTime | None, device: Device) -> list[str]:
    if time is None:
        return [f"step time: not known, as no rates are published of a {device.name}"]
    tokens, part = resolved.config.tokens_per_step / resolved.dims.num_ranks, error_of_time(device)
    error = f" (+-{100 * part:.0f} %)" if part else ""
    unlike = "" if part else "; no run on this device was compared"
    waits = [
        f"  the host waits for experts' split sizes {time.waits} times, for about "
        f"{1e6 * WAIT_S:.0f} us each"
    ]
    return [
        f"step: {time.seconds:.4g} s{error}, {tokens / time.seconds:,.0f} tokens/s per rank, "
        f"{100 * mfu(resolved, device, time.seconds):.1f} % MFU "
        f"({100 * mfu(resolved, device, time.seconds, is_causal=True):.1f} % with half of "
        f"attention's pairs): {parts_of(device).source}{unlike}",
        f"  exposed communication {time.exposed_s:.3g} s, "
        f"pipeline bubble {100 * time.bubble:.1f} %",
        *(waits if time.waits else ()),
    ]


def to_html(resolved: ResolvedJob, ranks: list[RankPlan], device: Device) -> str:
    """Return a page that needs no other file."""
    title = f"{resolved.config.model.flavor} on {device.name}"
    curves = "".join(_curve(rank, device) for rank in ranks)
    return document(
        title,
        f'<h1>{escape(title)}</h1><h2>Memory</h2><div class="charts">{curves}</div>'
        f'<div class="card scroll"><pre>{escape(to_text(resolved, ranks, device))}</pre></div>',
    )


def _curve(rank: RankPlan, device: Device) -> str:
    """Return a chart of the bytes over the step, stacked by purpose."""
    curves = [
        Curve(purpose, [(i, point[purpose] / GIB) for i, point in enumerate(rank.curve, 1)])
        for purpose in rank.most
    ]
    title = f"Rank {rank.rank}: {rank.peak.num_bytes / GIB:.2f} GiB of tensors, {rank.verdict}"
    unit, limit = "GiB over the operators of step 2", device.memory_gib
    return draw(Chart(title, unit, curves, is_stacked=True, limit=limit, x_name="moment"))
