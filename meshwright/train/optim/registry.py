"""The optimizers by name, and the part of a parameter that each must see. Free of torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.config.optimizer import Muon

Groups = list[dict[str, Any]]
"""Parameter groups, as torch's optimizers take them."""

Function = Callable[..., Any] | str
"""A function, or "package.module:name" of one: then its module is not imported by a check."""


@dataclass(frozen=True)
class ElementWise:
    """An optimizer that updates each element by itself, so that it may see any shard."""

    build: Function
    """From parameter groups and the section `optimizer` to a fused `torch.optim.Optimizer`."""


@dataclass(frozen=True)
class MatrixWise:
    """An optimizer whose update of a matrix follows from the whole of it, on any mesh.

    Momentum, weight decay and the learning rate are applied around it (`matrices.py`).
    """

    direction: Function
    """From B matrices (B, R, C), in `optimizer.muon.dtype`, and the section `optimizer.muon` to
    their updates, of the same shape and type. Each follows from its own matrix alone."""
    scale: Callable[[int, int, Muon], float]
    """From R and C to the factor on the update."""


def _scale(rows: int, columns: int, config: Muon) -> float:
    """Return the factor of `optimizer.muon.lr_scale`."""
    if config.lr_scale == "spectral":
        return float(max(1.0, rows / columns) ** 0.5)
    return 0.2 * float(max(rows, columns)) ** 0.5


OPTIMIZERS: dict[str, ElementWise | MatrixWise] = {
    "AdamW": ElementWise("meshwright.train.optim.optimizers:build_adamw"),
    "Adam": ElementWise("meshwright.train.optim.optimizers:build_adam"),
    "muon": MatrixWise("meshwright.train.optim.matrices:orthogonalise", _scale),
}
