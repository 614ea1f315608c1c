"""Which candidate of a search is simulated next, and which need not be."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.parallelisms.memory import BYTES
from meshwright.planning.choices import Choice, Mesh
from meshwright.planning.devices import Device, overheads, verdict
from meshwright.planning.predict import Figures
from meshwright.planning.timing import Rates
from meshwright.preflight import Plan

LEAST_PART = 2 / 3
"""Of a step's time, that stays if nothing is computed or gathered again: forward is at most a third
of what full recomputation computes and sends, and its gathers are one of three collectives."""


@dataclass(frozen=True)
class Candidate:
    """A choice, sized and timed."""

    choice: Choice
    plan: Plan
    figures: Figures


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
        fits = self._fits[choice] = fits_in(figures, self._plans[choice], self._device)
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


def fits_in(figures: Figures, plan: Plan, device: Device) -> bool:
    """Return whether they do even with the most that is modelled beside tensors."""
    peak, rounded, dims = figures.peak_bytes, figures.rounded_bytes, plan.dims
    groups = sum(size > 1 for size in vars(dims).values()) + 1  # data-parallel ones together, too
    return verdict(device, peak, overheads(device, peak, rounded, groups)) == "fits"
