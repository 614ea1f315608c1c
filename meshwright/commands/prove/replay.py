"""Which experts tokens went through on one process, and the same again on a mesh.

The choice of the highest scores is no continuous function: where two are nearly equal, rounding may
turn them, and the loss with them. So a mesh is told the choices, and held to have made them itself.
"""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from meshwright.parallelisms.context_parallel import local_positions
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes

Choices = Mapping[int, Mapping[str, Tensor]]
"""By step and layer: the experts of each token of the global batch, (tokens, K) int64."""


class Books:
    """Loads and biases as the choices of a step make them, counted here once more: a reference that
    counts validation, recomputation or a part of the tokens would be wrong as the mesh is.

    Args:
        rate: `experts.bias_update_rate`.
    """

    step = 0
    choices: Choices

    def __init__(self, rate: float) -> None:
        self._rate, self._biases = rate, dict[str, Tensor]()

    def wrong_counts(self, model: LocalModel) -> list[str]:
        """Return the names of loads and biases that are others, to the bit, after `step`."""
        found, state = [], router_state(model)
        for name, load in state.items():
            if not name.endswith(".load"):
                continue
            chosen = self.choices[self.step][name.split(".")[1]].flatten()
            counts = torch.bincount(chosen, minlength=len(load))
            name_of_bias = name.removesuffix("load") + "bias"
            bias = self._biases.setdefault(name_of_bias, torch.zeros(len(load)))
            bias += self._rate * (len(chosen) - counts * len(load)).sign()
            found += [name] * (not torch.equal(load, counts))
            found += [name_of_bias] * (not torch.equal(state[name_of_bias], bias))
        return found


class Recording(Books):
    """Notes the choices of one process, which has every token, in order."""

    num_others, num_tokens = 0, 0
    choices: dict[int, dict[str, Tensor]]

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.choices = {}

    def given(self, layer: str) -> Tensor | None:
        """As `Routing`'s: the router chooses."""
        return None

    def note(self, layer: str, choice: Tensor) -> None:
        """As `Routing`'s."""
        if torch.is_grad_enabled():  # not in a validation
            layers = self.choices.setdefault(self.step, {})
            before = [layers[layer]] if layer in layers else []
            layers[layer] = torch.cat([*before, choice.detach()])


class Replay(Books):
    """Prescribes recorded choices to a rank, and counts tokens whose router has chosen others.

    Every schedule takes the microbatches of a stage in their order, so the number of a call is that
    of its microbatch.

    Args:
        shape: sequences of a rank's microbatch, and tokens of a whole sequence.
    """

    def __init__(
        self, choices: Choices, meshes: Meshes, shape: tuple[int, int], rate: float
    ) -> None:
        super().__init__(rate)
        self.choices, self._meshes, self._shape = choices, meshes, shape
        self._calls = Counter[tuple[int, str]]()
        self._given: dict[str, Tensor] = {}
        self.num_tokens = self.num_others = 0

    def given(self, layer: str) -> Tensor | None:
        """As `Routing`'s."""
        if not torch.is_grad_enabled():
            return None
        number = self._calls[self.step, layer]
        self._calls[self.step, layer] += 1
        self._given[layer] = self._part(self.choices[self.step][layer], number)
        return self._given[layer]

    def note(self, layer: str, choice: Tensor) -> None:
        """As `Routing`'s."""
        if torch.is_grad_enabled():  # as sets: the order of a token's experts is no choice
            differ = choice.sort().values != self._given[layer].sort().values
            self.num_others += int(differ.any(1).sum())
            self.num_tokens += len(choice)

    def _part(self, whole: Tensor, number: int) -> Tensor:
        """Return this rank's tokens of its microbatch `number`, (B S / (cp tp), K)."""
        size, seq_len = self._shape
        meshes = self._meshes
        first = (number * meshes.dp.size() + meshes.dp.get_local_rank()) * size
        own = whole.unflatten(0, (-1, seq_len))[first : first + size]
        own = own[:, local_positions(seq_len, meshes.cp, whole.device)]
        return own.chunk(meshes.tp.size(), 1)[meshes.tp.get_local_rank()].flatten(0, 1)


def set_routing(model: LocalModel, routing: Recording | Replay) -> None:
    """Let `routing` see, and prescribe, the choices of every layer with experts."""
    for stage in model.stages:
        if stage.mixtures():
            stage.routing = routing


def unbalance(model: LocalModel) -> None:
    """Give routers loads as if of a step before, uneven: at even ones losses have no gradient."""
    for stage in model.stages:
        for mixture in stage.mixtures().values():
            mixture.load.copy_(torch.arange(1, len(mixture.load) + 1))


def router_state(model: LocalModel) -> dict[str, Tensor]:
    """Return copies of the routers' loads and biases, by name."""
    return {
        name: buffer.clone()
        for stage in model.stages
        for name, buffer in stage.named_buffers()
        if name in stage.table.state
    }
