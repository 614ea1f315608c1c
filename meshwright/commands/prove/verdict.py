"""The result of a case: how far it is from its reference, and its failures."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from meshwright.commands.prove.bounds import BOUNDS

NAMED = 3
"""Tensors in the failure of one quantity."""


@dataclass
class Verdict:
    """How far a case is from the reference, where, and the failures."""

    failures: list[str] = field(default_factory=list)
    """One line each, naming the quantity or the parameter; none: the case is proved, if it ran."""
    not_run: str = ""
    """The reason, if this machine can't run the case."""
    details: str = ""
    """The traceback of a case that stopped."""
    errors: dict[str, float | str] = field(default_factory=dict)
    """Of each quantity in `MEANINGS`, by its name; and `OTHER_CHOICES`, `LATER_GRADIENT`,
    `GRADIENT_BOUND` and `DIFFERENT`."""


MEANINGS = {
    "weights": "initial weights that differ, bit by bit (bound: 0)",
    "batches": "samples that differ, bit by bit (bound: 0)",
    "loss": "largest relative error of the loss, over all steps and ranks "
    f"(bound in fp32: {BOUNDS['fp32'].loss:g})",
    "norm": f"the same of the gradient norm ({BOUNDS['fp32'].grad_norm:g})",
    "gradient": "relative error of a parameter's gradient at step 1, as norm of the difference "
    "over norm, and its bound: of the parameter nearest to its bound",
    "of": "that parameter",
    "update": "the same error of the sum of a parameter's first updates "
    f"({BOUNDS['fp32'].update:g})",
    "validation": f"largest relative error of its metrics ({BOUNDS['fp32'].later_loss:g})",
    "metrics": "tokens, rates per device, learning rate, epochs and other metrics of records that "
    "differ from one process's, of any step (bound: 0)",
    "resume": "tensors and metrics that a save and a resume have changed, bit by bit (bound: 0)",
}
"""Of the columns of the table that are errors."""

OTHER_CHOICES, LATER_GRADIENT = "other choices", "later gradient"
"""Tokens, over all ranks and layers, whose router would have chosen other experts; and the largest
error of a gradient of step `LATER_STEP`."""

GRADIENT_BOUND, DIFFERENT = "gradient's bound", "different"
"""Keys of the bound on the error that "gradient" is, and of the part of the elements of gradients
in bf16 that differ."""


def worst_of(errors: Iterable[float]) -> float:
    """Return the largest of at least one error; NaN is larger than any number."""
    return max(errors, key=lambda error: (math.isnan(error), error))


def relative(difference: float, of: float) -> float:
    """Return `difference` as a part of `of`; infinite for a part of zero that isn't zero."""
    return difference / of if of else (0.0 if difference == 0 else math.inf)


def some_names(names: Sequence[str]) -> str:
    """Return the first names of a failure, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def join_ranks(indices: Sequence[int]) -> str:
    """Return the numbers of ranks, as in "0, 2"."""
    return ", ".join(map(str, indices))
