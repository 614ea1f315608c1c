"""The tensors of a checkpoint, by name: sharded as they are, keyed as in the plain model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

MODEL, OPTIMIZER, RNG, AVERAGE = "model.", "optimizer.", "rng.", "average."

HYPERPARAMETERS = "param_groups."
"""torch's name for them in an optimizer's flat state."""


class TrainingTensors:
    """Model, optimizer state and random number generators as one flat dict, and back.

    Only tensors, so that loading never unpickles an object. The optimizer's hyperparameters are
    not among them: they are the config's, and the learning rate is a function of the step.

    Args:
        average: EMAs of the weights, by their names; if there are any.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        rank: int,
        average: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._model, self._optimizer, self._rank = model, optimizer, rank
        self._average = average or {}

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors that share memory with the model and the optimizer; RNG states are copies.

        Raises:
            TypeError: if the optimizer keeps any state that is no tensor.
        """
        model_state: dict[str, Any] = get_model_state_dict(self._model)
        state: dict[str, Tensor] = {MODEL + k: v for k, v in model_state.items()}
        for key, value in self._optimizer_state().items():
            if key.startswith(HYPERPARAMETERS):
                continue
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"optimizer {key} is of type {type(value).__name__}: a checkpoint holds only "
                    "tensors, and a resume would miss it"
                )
            state[OPTIMIZER + key] = value
        state |= {AVERAGE + name: tensor for name, tensor in self._average.items()}
        state[f"{RNG}cpu.rank_{self._rank}"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            state[f"{RNG}cuda.rank_{self._rank}"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load the tensors of `state_dict`, or a different mesh's resharded to ours; without
        any of the optimizer's, it starts fresh; without any means, they start with the weights."""
        set_model_state_dict(self._model, _below(MODEL, state))
        means = _below(AVERAGE, state) or dict(self._model.named_parameters())
        with torch.no_grad():
            for name, tensor in self._average.items():
                tensor.copy_(means[name])
        if saved := _below(OPTIMIZER, state):
            whole = self._optimizer_state() | saved
            set_optimizer_state_dict(self._model, self._optimizer, whole, options=FLAT)
        else:  # to ask for its state is to take a step with gradients of 0, which Adam counts
            self._optimizer.state.clear()
        rng = _below(RNG, state)
        if (cpu := rng.get(f"cpu.rank_{self._rank}")) is not None:
            torch.set_rng_state(cpu)
        if (cuda := rng.get(f"cuda.rank_{self._rank}")) is not None:
            torch.cuda.set_rng_state(cuda)

    def _optimizer_state(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self._model, self._optimizer, options=FLAT)


class ModelTensors:
    """The weights only, and their means, in `dtype`: to start from, not to resume."""

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, average: Mapping[str, Tensor] | None = None
    ) -> None:
        self._model, self._dtype, self._average = model, dtype, average or {}

    def state_dict(self) -> dict[str, Tensor]:
        """Copies where the type differs, under the names that `TrainingTensors` gives. Tensors that
        are no parameters keep their types."""
        state: dict[str, Any] = get_model_state_dict(self._model)
        kept = {MODEL + name for name, _ in self._model.named_buffers()}
        named = {MODEL + name: tensor for name, tensor in state.items()}
        named |= {AVERAGE + name: tensor for name, tensor in self._average.items()}
        return {
            name: tensor.detach() if name in kept else tensor.detach().to(self._dtype)
            for name, tensor in named.items()
        }


def _below(prefix: str, state: dict[str, Tensor]) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
