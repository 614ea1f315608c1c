"""`meshwright plan`, once its command line is read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from meshwright.config.job_config import JobConfig
from meshwright.config.update import changed
from meshwright.errors import ConfigError, check
from meshwright.parallelisms.compile_choice import resolve_compile
from meshwright.parallelisms.pipeline_split import stages_of_rank
from meshwright.planning import page, remedies, report
from meshwright.planning import search as searching
from meshwright.planning.devices import DEVICES, Device, find_device
from meshwright.planning.job import plan_job
from meshwright.planning.predict import in_processes, telling_ranks
from meshwright.planning.rates import Rates, assumed, read_rates
from meshwright.planning.report import RankPlan
from meshwright.planning.simulate import simulate
from meshwright.preflight import Plan


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
        tried = remedies.find(job, world_size, shown, device, workers)
    if html is not None:
        html.write_text(page.to_html(job, found, device))
    if as_json:
        values = [dataclasses.asdict(one) for one in tried]
        return json.dumps(report.to_json(job, found, device, values), indent=1)
    return "\n".join([report.to_text(job, found, device), *remedies.lines(tried)])


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
