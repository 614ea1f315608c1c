"""The result of a comparison of the one-process reference with plain PyTorch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

NAMED = 3
"""Parameters in the failures of one quantity."""

SHOWN = ("loss", "gradient", "update")
"""Quantities in the row of the reference."""


@dataclass
class Checked:
    """The comparison of a reference with plain PyTorch."""

    not_checked: list[str] = field(default_factory=list)
    """Options, or parts, that plain PyTorch doesn't have."""
    errors: dict[str, float] = field(default_factory=dict)
    """The largest relative error of each quantity."""
    lines: dict[str, list[str]] = field(default_factory=dict)
    """The differences, by quantity: at the first place that has one."""
    seconds: float = 0.0

    @property
    def failures(self) -> list[str]:
        """One line each, which begins with the quantity that differs."""
        return [f"{what} {line}" for what, lines in self.lines.items() for line in lines]

    @property
    def verdict(self) -> str:
        """Equal, FAILED, or "not checked" if no step was compared."""
        if self.lines:
            return "FAILED"
        return "equal" if "loss" in self.errors else "not checked"

    @property
    def row(self) -> str:
        """The verdict, the errors that every model has, and what was not checked."""
        shown = [f"{what} {self.errors[what]:.1e}" for what in SHOWN if what in self.errors]
        gaps = [f"not checked: {text}" for text in self.not_checked]
        verdict = "" if self.verdict == "not checked" and gaps else self.verdict
        parts = [verdict, ", ".join(shown), *gaps, f"{self.seconds:.1f} s"]
        return "; ".join(part for part in parts if part)

    @property
    def record(self) -> dict[str, Any]:
        """The same for `proof.json`."""
        return {
            "verdict": self.verdict,
            "failures": self.failures,
            "not_checked": self.not_checked,
            "errors": self.errors,
            "seconds": round(self.seconds, 2),
        }

    def fail(self, what: str, lines: Sequence[str]) -> None:
        """Note the failures of a quantity, unless it has failed before."""
        self.lines.setdefault(what, [*lines])

    def number(self, what: str, place: str, got: float, want: float, bound: float) -> None:
        """Compare a number by its relative error; `what` names the quantity."""
        error = abs(got - want) / (abs(want) or 1.0)
        self._note(what, error)
        if not error <= bound:
            text = f"{got:.7g} instead of {want:.7g}, relative error {error:.1e}"
            self.fail(what, [f"{place}: {text}"])

    def tensors(
        self,
        what: str,
        place: str,
        got: Mapping[str, Tensor],
        want: Mapping[str, Tensor],
        bounds: Mapping[str, float],
        scales: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Compare tensors by name: norm of the difference over the norm of `scales`, or `want`."""
        wrong = [(math.inf, name) for name in got.keys() ^ want.keys()]
        for name in got.keys() & want.keys():
            difference = (got[name] - want[name]).norm().item()
            norm = (scales or want)[name].norm().item()
            error = difference / norm if norm else (math.inf if difference else 0.0)
            self._note(what, error)
            if not error <= bounds[name]:
                wrong.append((error, name))
        wrong.sort(key=lambda pair: (not math.isnan(pair[0]), -pair[0], pair[1]))
        lines = [f"of {name} {place}: relative error {error:.1e}" for error, name in wrong[:NAMED]]
        if len(wrong) > NAMED:
            lines[-1] += f", and {len(wrong) - NAMED} more"
        if lines:
            self.fail(what, lines)

    def _note(self, what: str, error: float) -> None:
        worst = self.errors.get(what, 0.0)
        self.errors[what] = error if math.isnan(error) else max(worst, error)
