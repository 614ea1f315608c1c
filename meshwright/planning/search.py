"""The best mesh and modes of a job: legal ones enumerated, sized, timed, and ranked."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, replace

from tqdm import tqdm

from meshwright.config.job_config import JobConfig
from meshwright.errors import check
from meshwright.parallelisms.memory import BYTES
from meshwright.planning.choices import Choice, Mesh, difference, legal
from meshwright.planning.devices import GIB, Device, overheads, verdict
from meshwright.planning.job import plan_job
from meshwright.planning.predict import Figures, error_of_line, measure, predict, processes
from meshwright.planning.remedies import changed
from meshwright.planning.timing import Rates
from meshwright.preflight import Plan

LEAST_PART = 2 / 3
"""Of a step's time, that stays if nothing is computed or gathered again: forward is at most a third
of what full recomputation computes and sends, and its gathers are one of three collectives."""
MOST_SIMULATED = 32
"""Candidates of a search; the rest are estimated to be slower than these."""
CHECKED = 3
"""Of the best, those that a third depth checks."""
FARTHEST_OFF = 0.005


@dataclass(frozen=True)
class Candidate:
    """A choice, sized and timed."""

    choice: Choice
    plan: Plan
    figures: Figures


@dataclass(frozen=True)
class Found:
    """A search's outcome."""

    config: JobConfig
    """With the winner's choice, as a person would write it."""
    num_legal: int
    num_too_large: int
    """Whose parameters, gradients and optimizer alone do not fit."""
    num_simulated: int
    ranked: list[Candidate]
    """Of the simulated ones, those that fit; best first."""
    corrected: int
    """Of the best, those that a third depth found wrong, and that were simulated whole."""
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
    fitting = {c: p for c, p in plans.items() if _least(p) <= device.memory_gib * GIB}
    board = Board(fitting, device, rates)
    with processes(workers) as pool, tqdm(desc="simulated", disable=None, file=sys.stderr) as bar:
        running: dict[Future[Figures], tuple[Choice, Figures | None]] = {}
        while True:
            while (
                len(running) < workers
                and len(board.found) + len(running) < MOST_SIMULATED
                and (choice := board.next()) is not None
            ):
                task = (plans[choice].config, ranks, 0, device, rates)
                running[pool.submit(_predict, *task)] = choice, None
            if not running:
                break
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                (choice, first), figures = running.pop(done), done.result()
                plan = plans[choice]
                if first is not None:
                    figures = _most([first, figures])
                elif plan.dims.pp > 1 and _fits(figures, plan, device):  # the last stage, too
                    task = (plan.config, ranks, _ends(plan)[-1], device, rates)
                    running[pool.submit(_predict, *task)] = choice, figures
                    continue
                board.note(choice, figures)
                bar.update()
        ranked = board.ranked()
        num_simulated = len(board.found)
        check(bool(ranked), "--device", device.name, f"none of {len(plans)} candidates fits")
        best, corrected = _checked(ranked[:CHECKED], ranks, device, rates, pool)
        ranked = sorted(best + ranked[CHECKED:], key=lambda one: one.figures.seconds)
        winner_bytes, ranked = _first_that_fits(ranked, ranks, device, rates, pool)
    batch = ranked[0].plan.config.training.global_batch_size
    return Found(
        changed(config, ranked[0].choice.update(batch)),
        len(plans),
        len(plans) - len(fitting),
        num_simulated,
        ranked,
        corrected,
        winner_bytes,
        time.perf_counter() - start,
        batch * config.training.seq_len,
    )


def _least(plan: Plan) -> float:
    return sum(plan.least_bytes.values())


class Board:
    """Decides which candidate is simulated next, and which need not be.

    Next is the one with the lowest estimate: its bound, times the ratio of time to bound of
    simulated candidates with the same degree of tensor parallelism. Left out are those that fit
    worse or run slower than one that is known: on the same mesh, modes
    that keep more than one that does not fit, and modes that do more than one that fits; and every
    candidate whose time is more than the best one's even by `least_seconds` alone.

    Args:
        plans: candidates whose weights, gradients and optimizer fit.

    Attributes:
        found: figures of those that were simulated.
    """

    def __init__(self, plans: dict[Choice, Plan], device: Device, rates: Rates) -> None:
        self._plans, self._device = plans, device
        self._open = dict.fromkeys(plans)  # in order
        self._busy: set[Mesh] = set()
        self._bounds = {
            choice: least_seconds(plan, device, rates) for choice, plan in plans.items()
        }
        self._floors = dict(self._bounds)
        self._best = float("inf")
        self.found: dict[Choice, Figures] = {}
        self._fits: dict[Choice, bool] = {}

    def next(self) -> Choice | None:
        """Return the open candidate with the lowest estimate, of a mesh that none runs of.

        Of a mesh, first the one that needs least, then the fastest.
        """
        for choice in [c for c in self._open if self._bounds[c] >= self._best]:
            del self._open[choice]
        idle = [choice for choice in self._open if choice.mesh not in self._busy]
        if not idle:
            return None
        factors = self._factors()
        usual = min(factors.values(), default=1.0)  # so that every degree is tried
        mesh = min(idle, key=lambda c: self._bounds[c] * factors.get(c.mesh.tensor, usual)).mesh
        of_mesh = sorted((c for c in idle if c.mesh == mesh), key=lambda c: c.speed)
        is_new = all(choice.mesh != mesh for choice in self.found)
        choice = of_mesh[-1 if is_new else 0]
        del self._open[choice]
        self._busy.add(mesh)
        return choice

    def _factors(self) -> dict[int, float]:
        """The least ratio of time to bound, by degree of tensor parallelism."""
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
        fits = self._fits[choice] = _fits(figures, self._plans[choice], self._device)
        if fits:
            self._best = min(self._best, figures.seconds)
        for other in list(self._open):
            if other.mesh == choice.mesh:
                if other.is_slower(choice) if fits else choice.is_slower(other):
                    del self._open[other]
                bound = max(self._bounds[other], LEAST_PART * figures.seconds)
                self._bounds[other] = bound
            elif not fits and self._needs_more(other, choice):
                del self._open[other]
            else:
                self._bounds[other] = max(self._bounds[other], self._of_schedule(other, choice))

    def _needs_more(self, other: Choice, choice: Choice) -> bool:
        """Whether `other` is `choice` with larger microbatches; several add gradients up, too."""
        smaller = replace(other.mesh, local_batch_size=choice.mesh.local_batch_size)
        is_larger = other.mesh.local_batch_size > choice.mesh.local_batch_size
        modes = choice.speed == other.speed or choice.is_slower(other)
        return smaller == choice.mesh and is_larger and modes and _adds_up(self._plans[other])

    def _of_schedule(self, other: Choice, choice: Choice) -> float:
        """What is left of the time of `choice` without waiting, if only the schedule differs."""
        same = replace(other.mesh, schedule=choice.mesh.schedule) == choice.mesh
        busy = 1 - waiting(self._plans[choice])
        if not same or other.speed[0] < choice.speed[0] or other.speed[1] < choice.speed[1]:
            return 0.0
        return self.found[choice].seconds * busy

    def ranked(self) -> list[Candidate]:
        """Return those that fit, the fastest first."""
        fitting = [choice for choice, fits in self._fits.items() if fits]
        fitting.sort(key=lambda choice: self.found[choice].seconds)
        return [Candidate(one, self._plans[one], self.found[one]) for one in fitting]


def _adds_up(plan: Plan) -> bool:
    return plan.num_microbatches > 1


def waiting(plan: Plan) -> float:
    """Return the least part of a step that a rank of the pipeline waits: (p - 1) / (v m + p - 1)
    with v stages per rank, of Narayanan et al. 2021, arXiv:2104.04473; 0 for others."""
    ranks, schedule = plan.dims.pp, plan.config.parallelism.pipeline_parallel_schedule
    if ranks == 1 or schedule not in ("1F1B", "Interleaved1F1B"):
        return 0.0
    per_rank = len(plan.stage_modules) // ranks
    return (ranks - 1) / (per_rank * plan.num_microbatches + ranks - 1)


def least_seconds(plan: Plan, device: Device, rates: Rates) -> float:
    """Return less time than a step can take in the replay of `timing.step_time`: that of its matrix
    products and of what tensor parallelism sends, or of FSDP's traffic, if that is more."""
    training, dims, args = plan.config.training, plan.dims, plan.model_args
    ranks = dims.pp * dims.dp * dims.cp * dims.tp
    tokens = training.global_batch_size * training.seq_len
    weights = {name: p.numel * p.token_share for name, p in args.table.parameters.items()}
    in_layers = sum(n for name, n in weights.items() if name.startswith("layers."))
    is_full = plan.config.activation_checkpoint.mode == "full"
    products = 6 * sum(weights.values()) + 2 * in_layers * is_full
    rate = max(rate for _, rate in rates.matrix[training.mixed_precision_param])
    width = BYTES[training.mixed_precision_param]
    compute = tokens * products / ranks / rate
    # per layer two gathers and two scatters of the activations, and as many in backward
    near = rates.link if dims.tp <= device.per_node else rates.network
    per_token = 8 * args.n_layers * args.dim * width * (dims.tp - 1) / dims.tp
    compute += tokens / (dims.dp * dims.cp * dims.pp) * per_token / near
    # weights gathered once, twice if they are freed between, and gradients scattered once
    shards = dims.dp_shard * dims.cp
    policy = plan.config.parallelism.fsdp_reshard_after_forward
    frees = policy == "always" or (policy == "default" and dims.pp == 1)
    per_weight = width * (1 + frees) + BYTES[training.mixed_precision_reduce]
    sent = in_layers / (dims.tp * dims.pp) * per_weight * (shards - 1) / shards
    link = rates.link if shards * dims.tp <= device.per_node else rates.network
    return max(compute / (1 - waiting(plan)), sent / link)


def _ends(plan: Plan) -> list[int]:
    """The first rank, and of a pipeline the first of the last stage: they have embedding or output.

    Each is simulated in a process of its own, as torch keeps groups of gone meshes in caches.
    """
    ranks = plan.dims.pp * plan.dims.dp * plan.dims.cp * plan.dims.tp
    return sorted({0, (plan.dims.pp - 1) * (ranks // plan.dims.pp)})


def _most(found: list[Figures]) -> Figures:
    """Of several ranks, the figures of the one with the highest peak; the time of the slowest."""
    most = max(found, key=lambda figures: figures.rounded_bytes)
    return replace(most, seconds=max(figures.seconds for figures in found))


def _predict(config: JobConfig, ranks: int, rank: int, device: Device, rates: Rates) -> Figures:
    return predict(plan_job(config, ranks, is_gpu=device.is_gpu), ranks, rank, device, rates)


def _measure(config: JobConfig, ranks: int, rank: int, device: Device, rates: Rates) -> Figures:
    """All layers."""
    return measure(plan_job(config, ranks, is_gpu=device.is_gpu), ranks, rank, device, rates)


def _whole(
    plan: Plan, ranks: int, device: Device, rates: Rates, pool: Executor
) -> list[Future[Figures]]:
    ends = _ends(plan)
    return [pool.submit(_measure, plan.config, ranks, rank, device, rates) for rank in ends]


def _fits(figures: Figures, plan: Plan, device: Device) -> bool:
    peak, rounded, dims = figures.peak_bytes, figures.rounded_bytes, plan.dims
    groups = sum(size > 1 for size in vars(dims).values()) + 1  # data-parallel ones together, too
    return verdict(device, peak, overheads(device, peak, rounded, groups)) == "fits"


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
    return [one for one in found if _fits(one.figures, one.plan, device)], len(whole)


def _first_that_fits(
    ranked: list[Candidate], ranks: int, device: Device, rates: Rates, pool: Executor
) -> tuple[int, list[Candidate]]:
    """Simulate the best with all layers; return its peak, and the list from it on."""
    for index, one in enumerate(ranked):
        figures = one.figures
        if figures.line is not None:
            futures = _whole(one.plan, ranks, device, rates, pool)
            figures = _most([future.result() for future in futures])
        if _fits(figures, one.plan, device):
            return figures.peak_bytes, ranked[index:]
    check(False, "--device", device.name, "no candidate fits with all of its layers")
    raise AssertionError


def to_text(config: JobConfig, found: Found, source: str) -> str:
    """Return the ranked candidates, and the TOML that the winner differs by."""
    others = found.num_legal - found.num_too_large - found.num_simulated
    lines = [
        f"{found.num_legal} candidates: {found.num_too_large} too large by parameters, gradients "
        f"and optimizer alone, {found.num_simulated} simulated, {others} of which a simulated one "
        f"tells that they do not fit or are slower, or estimated slower; {found.seconds:.0f} s",
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
        "corrected": found.corrected,
        "seconds": found.seconds,
        "source": source,
        "ranked": rows,
        "winner_bytes": found.winner_bytes,
        "toml": difference(config, found.config),
    }
    return json.dumps(values, indent=1)
