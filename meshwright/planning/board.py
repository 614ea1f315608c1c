"""Which candidate of a search is simulated next, and which need not be."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.planning.choices import Choice, Mesh
from meshwright.planning.devices import Device, overheads, verdict
from meshwright.planning.floors import Floor
from meshwright.planning.predict import Figures, beside_tensors
from meshwright.preflight import Plan


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
