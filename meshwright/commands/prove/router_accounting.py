"""Counts once more how a step's choices of experts change the state of their routers."""

import torch
from torch import Tensor

from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.routing_replay import Choices


class RouterAccounting:
    """Loads and biases as the choices of a step make them, counted here once more: a reference that
    counts validation, recomputation, padding or a part of the tokens would be wrong as the mesh is.

    Args:
        rate: `experts.bias_update_rate`.
    """

    def __init__(self, rate: float) -> None:
        self._rate, self._biases = rate, dict[str, Tensor]()

    def wrong_counts(self, model: LocalModel, choices: Choices, is_token: Tensor) -> list[str]:
        """Return the names of loads and biases that are others, to the bit.

        Args:
            choices: of the step that was taken last.
            is_token: (sequences, 1 + k, S) bool, of all ranks: at each of k depths of MTP, whether
                there is a token so many places further.
        """
        wrong, table = list[str](), model.stages[0].table
        mixtures = [pair for stage in model.stages for pair in stage.mixtures().items()]
        for number, mixture in mixtures:
            depth = max(0, number + 1 + table.mtp_depth - len(table.layers))
            chosen = choices[number].cpu()[is_token[:, depth]].flatten()
            name = f"layers.{number}.feed_forward"
            counts = torch.bincount(chosen, minlength=len(mixture.load))
            bias = self._biases.setdefault(name, torch.zeros(len(counts)))
            if mixture.router.weight.requires_grad:  # a frozen router keeps its choice
                bias += self._rate * (len(chosen) - counts * len(counts)).sign()
            for field, counted in (("load", counts), ("bias", bias)):
                if not torch.equal(getattr(mixture, field).cpu(), counted):
                    wrong.append(f"{name}.{field}")
        return wrong
