"""The best mesh and modes of a job: legal ones enumerated, sized, timed, and ranked."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, replace

from tqdm import tqdm

from meshwright.config.job_config import JobConfig
from meshwright.config.update import changed
from meshwright.errors import check, config_error
from meshwright.planning.board import Board, Candidate, fits_in, may_fit
from meshwright.planning.choices import Choice, difference, legal
from meshwright.planning.devices import GIB, Device
from meshwright.planning.floors import Floor, Shape, floor_of, shape_of, traces
from meshwright.planning.job import plan_job
from meshwright.planning.predict import (
    Figures,
    error_of_line,
    measure,
    predict_config,
    processes,
    telling_ranks,
)
from meshwright.planning.rates import Rates
from meshwright.preflight import Plan

MOST_SIMULATED = 32
"""Candidates of a search; the rest are estimated to be slower than these."""
CHECKED = 3
"""How many of the best a third depth checks."""
FARTHEST_OFF = 0.005
BAR = "{n_fmt} of {total_fmt} candidates decided, {elapsed}"


@dataclass(frozen=True)
class Found:
    """A search's outcome."""

    config: JobConfig
    """With the winner's choice, as a person would write it."""
    num_legal: int
    num_too_large: int
    """Whose parameters, gradients and optimizer do not fit, or not with the activations kept."""
    num_simulated: int
    num_open: int
    """Not simulated, though they could be the best: others were estimated faster."""
    ranked: list[Candidate]
    """Simulated candidates that fit; best first."""
    corrected: int
    """How many of the best a third depth found wrong; they were simulated whole."""
    winner_bytes: int
    """Peak of the first, with all of its layers simulated."""
    seconds: float
    tokens: int
    """Per step."""


def find(config: JobConfig, ranks: int, device: Device, rates: Rates, workers: int) -> Found:
    """Enumerate, prune, predict and rank; simulate the winner whole.

    Raises:
        ConfigError: if no candidate fits.
    """
    start = time.perf_counter()
    plans = dict(legal(config, ranks, device))
    bar = tqdm(total=len(plans), bar_format=BAR, disable=None, file=sys.stderr)
    with processes(workers) as pool, bar:
        fitting = {
            choice: plan
            for choice, plan in plans.items()
            if may_fit(sum(plan.least_bytes.values()), plan, device)
        }
        board = Board(fitting, find_floors(config, fitting, device, rates, pool), device)
        running: dict[Future[Figures], tuple[Choice, Figures | None]] = {}
        while True:
            while (
                len(running) < workers
                and len(board.found) + len(running) < MOST_SIMULATED
                and (choice := board.next()) is not None
            ):
                task = (plans[choice].config, ranks, 0, device, rates)
                running[pool.submit(predict_config, *task)] = choice, None
            if not running:
                break
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                (choice, first), figures = running.pop(done), done.result()
                plan = plans[choice]
                if first is not None:
                    figures = _most([first, figures])
                elif plan.dims.pp > 1 and fits_in(figures, plan, device):  # the last stage, too
                    task = (plan.config, ranks, telling_ranks(plan)[-1], device, rates)
                    running[pool.submit(predict_config, *task)] = choice, figures
                    continue
                board.note(choice, figures)
                bar.update(len(plans) - board.num_open - bar.n)
        ranked = board.ranked()
        num_simulated, num_open = len(board.found), board.num_open
        check(bool(ranked), "--device", device.name, f"none of {len(plans)} candidates fits")
        best, corrected = _checked(ranked[:CHECKED], ranks, device, rates, pool)
        ranked = sorted(best + ranked[CHECKED:], key=Candidate.rank)
        winner_bytes, ranked = _first_that_fits(ranked, ranks, device, rates, pool)
    batch = ranked[0].plan.config.training.global_batch_size
    return Found(
        changed(config, ranked[0].choice.update(batch)),
        len(plans),
        len(plans) - len(fitting) + board.num_too_large,
        num_simulated,
        num_open,
        ranked,
        corrected,
        winner_bytes,
        time.perf_counter() - start,
        batch * config.training.seq_len,
    )


def find_floors(
    config: JobConfig, plans: dict[Choice, Plan], device: Device, rates: Rates, pool: Executor
) -> dict[Choice, Floor]:
    """Trace every shape once, and return the floors of all candidates."""
    by_mesh: dict[tuple[int, ...], list[Shape]] = {}
    for shape in dict.fromkeys(shape_of(choice) for choice in plans):
        by_mesh.setdefault(shape[:3], []).append(shape)
    calls = [pool.submit(traces, config, shapes, device, rates) for shapes in by_mesh.values()]
    parts = {shape: found for call in calls for shape, found in call.result().items()}
    return {
        choice: floor_of(plan, parts.get(shape_of(choice)), device, rates)
        for choice, plan in plans.items()
    }


def _most(found: list[Figures]) -> Figures:
    """Return the figures of the rank with the highest peak, with the time of the slowest rank."""
    most = max(found, key=lambda figures: figures.rounded_bytes)
    return replace(most, seconds=max(figures.seconds for figures in found))


def _measure(config: JobConfig, ranks: int, rank: int, device: Device, rates: Rates) -> Figures:
    """Simulate all layers."""
    return measure(plan_job(config, ranks, is_gpu=device.is_gpu), ranks, rank, device, rates)


def _whole(
    plan: Plan, ranks: int, device: Device, rates: Rates, pool: Executor
) -> list[Future[Figures]]:
    return [
        pool.submit(_measure, plan.config, ranks, rank, device, rates)
        for rank in telling_ranks(plan)
    ]


def _checked(
    best: list[Candidate], ranks: int, device: Device, rates: Rates, pool: Executor
) -> tuple[list[Candidate], int]:
    """Compare a third depth with the line through two; where it is off, simulate all layers.

    Returns:
        Those that still fit, and how many were simulated whole.
    """
    errors = [
        pool.submit(error_of_line, one.plan.config, ranks, one.figures, device, rates)
        for one in best
    ]
    whole = {
        index: _whole(one.plan, ranks, device, rates, pool)
        for index, one in enumerate(best)
        if errors[index].result() > FARTHEST_OFF
    }
    found = list(best)
    for index, futures in whole.items():
        figures = _most([future.result() for future in futures])
        found[index] = replace(best[index], figures=figures)
    return [one for one in found if fits_in(one.figures, one.plan, device)], len(whole)


def _first_that_fits(
    ranked: list[Candidate], ranks: int, device: Device, rates: Rates, pool: Executor
) -> tuple[int, list[Candidate]]:
    """Simulate the best with all layers; return its peak, and the list from it on."""
    for index, one in enumerate(ranked):
        figures = one.figures
        if figures.line is not None:
            futures = _whole(one.plan, ranks, device, rates, pool)
            figures = _most([future.result() for future in futures])
        if fits_in(figures, one.plan, device):
            return figures.peak_bytes, ranked[index:]
    raise config_error("--device", device.name, "no candidate fits with all of its layers")


def to_text(config: JobConfig, found: Found, source: str) -> str:
    """Return the ranked candidates, and the TOML that the winner differs by."""
    others = found.num_legal - found.num_too_large - found.num_simulated - found.num_open
    lines = [
        f"{found.num_legal} candidates: {found.num_too_large} too large, {others} slower than the "
        f"best or too large beside one that was simulated, {found.num_simulated} simulated, "
        f"{found.num_open} open; {found.seconds:.0f} s",
        f"ranked by tokens per second at {source}",
        f"  {'tokens/s':>12} {'GiB':>8}",
    ]
    for one in found.ranked[:12]:
        speed = found.tokens / one.figures.seconds
        size = one.figures.peak_bytes / GIB
        lines.append(f"  {speed:>12,.0f} {size:>8.2f}  {one.choice.words}")
    off = found.winner_bytes / found.ranked[0].figures.peak_bytes - 1
    toml = difference(config, found.config).rstrip()
    lines += [
        f"the first with all of its layers: {found.winner_bytes / GIB:.2f} GiB ({off:+.2%}); "
        f"a third depth found {found.corrected} of the first {CHECKED} off by more than 0.5 %",
        "",
        toml or "# the config is the best already",
    ]
    return "\n".join(lines)


def to_json(config: JobConfig, found: Found, source: str) -> str:
    """Return the same for programs."""
    rows = [
        {
            "candidate": one.choice.words,
            "peak_bytes": one.figures.peak_bytes,
            "step_seconds": one.figures.seconds,
            "tokens_per_second": found.tokens / one.figures.seconds,
        }
        for one in found.ranked
    ]
    values = {
        "candidates": found.num_legal,
        "too_large": found.num_too_large,
        "simulated": found.num_simulated,
        "open": found.num_open,
        "corrected": found.corrected,
        "seconds": found.seconds,
        "source": source,
        "ranked": rows,
        "winner_bytes": found.winner_bytes,
        "toml": difference(config, found.config),
    }
    return json.dumps(values, indent=1)
