"""The optimizer in backward: no gradient waits for the others."""

from functools import partial

import torch
from torch import Tensor, nn

from meshwright.optim.optimizers import update
from meshwright.parallelisms.gradients import local_square_sum


class OptimizerInBackward:
    """Makes `optimizer` update each parameter as soon as its gradient is final, and frees that.

    Its state and learning rate stay where they are, so checkpoints are the same with or without.

    Args:
        optimizer: of `build_optimizer`.
    """

    square_sum: Tensor
    """() fp32: of the gradients of this step so far, as `local_square_sum` defines it."""
    gradients_are_final: bool
    """Whether a gradient that is computed now is its parameter's last in this step. Where FSDP2
    reduces gradients, it hands over no other."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(partial(self._update, index))

    def begin(self, is_held_back: Tensor) -> None:
        """A step begins.

        Args:
            is_held_back: () bool: no parameter is to change in this step.
        """
        self._is_held_back = is_held_back
        self.square_sum = torch.zeros((), device=is_held_back.device)
        self.gradients_are_final = True

    def _update(self, group: int, parameter: nn.Parameter) -> None:
        if not self.gradients_are_final:
            return
        square_sum = local_square_sum([parameter], self.square_sum.device)
        self.square_sum += square_sum
        optimizer = self._optimizer
        # gradients of other parameters and ranks are not known yet
        is_bad = self._is_held_back | ~torch.isfinite(square_sum)
        groups = optimizer.param_groups
        optimizer.param_groups = [groups[group] | {"params": [parameter]}]
        update(optimizer, is_bad)
        optimizer.param_groups = groups
        parameter.grad = None
