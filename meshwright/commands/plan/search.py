"""The best mesh and modes of a job: legal ones enumerated, sized, timed, and ranked."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, replace

from tqdm import tqdm

from meshwright.commands.plan.candidates import Choice, Mesh, difference, legal
from meshwright.commands.plan.devices import GIB, Device, overheads, verdict
from meshwright.commands.plan.floors import Floor, Shape, floor_of, shape_of, traces
from meshwright.commands.plan.predict import (
    Figures,
    beside_tensors,
    error_of_line,
    measure,
    predict_config,
    processes,
    telling_ranks,
)
from meshwright.commands.plan.rates import Rates
from meshwright.commands.plan.simulate import plan_job
from meshwright.config.job_config import JobConfig, changed
from meshwright.system.errors import check, config_error
from meshwright.train.preflight import Plan


@dataclass(frozen=True)
class Candidate:
    """A choice, sized and timed."""

    choice: Choice
    plan: Plan
    figures: Figures

    def rank(self) -> tuple[float, float, str]:
        """Return the key that the best is sorted by: of equally fast ones it needs least memory."""
        return self.figures.seconds, self.figures.peak_bytes, self.choice.words


class Board:
    """Decides which candidate is simulated next, and which need not be.

    Next is the one with the lowest estimate: its floor, times the least ratio of time to floor of
    simulated candidates with the same degree of tensor parallelism. Left out is every candidate
    whose floor is above the best time; and on the mesh of one that was simulated, modes that keep
    more if it does not fit, and modes that do more if it does.

    Args:
        plans: candidates.
        floors: less than the bytes and seconds of each.

    Attributes:
        found: figures of the simulated candidates.
        num_too_large: candidates whose floor of bytes does not fit.
    """

    def __init__(
        self, plans: dict[Choice, Plan], floors: dict[Choice, Floor], device: Device
    ) -> None:
        self._plans, self._device = plans, device
        self._floors = {choice: floor.seconds for choice, floor in floors.items()}
        self._open = {
            choice: None
            for choice, plan in plans.items()
            if may_fit(floors[choice].num_bytes, plan, device)
        }
        self.num_too_large = len(plans) - len(self._open)
        self._busy: set[Mesh] = set()
        self._best = float("inf")
        self.found: dict[Choice, Figures] = {}
        self._fits: dict[Choice, bool] = {}

    def next(self) -> Choice | None:
        """Return the open candidate with the lowest estimate, of a mesh that none runs of."""
        idle = [
            choice
            for choice in self._open
            if self._floors[choice] < self._best and choice.mesh not in self._busy
        ]
        if not idle:
            return None
        factors = self._factors()
        usual = min(factors.values(), default=1.0)  # so that every degree is tried
        choice = min(idle, key=lambda c: self._floors[c] * factors.get(c.mesh.tensor, usual))
        del self._open[choice]
        self._busy.add(choice.mesh)
        return choice

    def _factors(self) -> dict[int, float]:
        """Return the least ratio of time to floor, by degree of tensor parallelism."""
        found: dict[int, float] = {}
        for choice, figures in self.found.items():
            ratio = figures.seconds / self._floors[choice]
            degree = choice.mesh.tensor
            found[degree] = min(ratio, found.get(degree, ratio))
        return found

    def note(self, choice: Choice, figures: Figures) -> None:
        """Learn from a simulation."""
        self._busy.discard(choice.mesh)
        self.found[choice] = figures
        fits = self._fits[choice] = fits_in(figures, self._plans[choice], self._device)
        if fits:
            self._best = min(self._best, figures.seconds)
        for other in list(self._open):
            if other.mesh == choice.mesh:
                if other.is_slower(choice) if fits else choice.is_slower(other):
                    del self._open[other]
            elif not fits and self._needs_more(other, choice):
                del self._open[other]

    def _needs_more(self, other: Choice, choice: Choice) -> bool:
        """Return whether `other` is `choice` with larger microbatches; several add gradients up,
        too."""
        smaller = replace(other.mesh, local_batch_size=choice.mesh.local_batch_size)
        is_larger = other.mesh.local_batch_size > choice.mesh.local_batch_size
        modes = choice.speed == other.speed or choice.is_slower(other)
        adds_up = self._plans[other].num_microbatches > 1
        return smaller == choice.mesh and is_larger and modes and adds_up

    @property
    def num_open(self) -> int:
        """Candidates of which neither a simulation nor a floor tells that another is better."""
        return sum(self._floors[choice] < self._best for choice in self._open)

    def ranked(self) -> list[Candidate]:
        """Return the candidates that fit, the fastest first."""
        fitting = [choice for choice, fits in self._fits.items() if fits]
        found = [Candidate(one, self._plans[one], self.found[one]) for one in fitting]
        return sorted(found, key=Candidate.rank)


def fits_in(figures: Figures, plan: Plan, device: Device) -> bool:
    """Return whether they do even with the most that is modelled beside tensors."""
    modelled = beside_tensors(figures, plan, device)
    return verdict(device, figures.peak_bytes, modelled) == "fits"


def may_fit(num_bytes: float, plan: Plan, device: Device) -> bool:
    """Return whether a peak of so many bytes might fit."""
    peak = int(num_bytes)
    groups = sum(size > 1 for size in vars(plan.dims).values()) + 1  # data-parallel ones, too
    return verdict(device, peak, overheads(device, peak, peak, groups)) == "fits"


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
