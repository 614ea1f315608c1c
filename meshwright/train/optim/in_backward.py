"""Updates during backward, which free each gradient as soon as it is used."""

from functools import partial

import torch
from torch import Tensor, nn

from meshwright.train.optim.gradients import local_square_sums
from meshwright.train.optim.update import update


class OptimizerInBackward:
    """Makes `optimizer` update each parameter as soon as its gradient is final, and frees that.

    Its state and learning rate stay where they are, so checkpoints are the same with or without.
    """

    square_sum: Tensor
    """() fp32: of the gradients of this step so far, as of `local_square_sums`."""
    gradients_are_final = False
    """Whether a gradient that is computed now is its parameter's last in this step. Where FSDP2
    reduces gradients, it hands over no other."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(partial(self._update, index))

    def begin(self, skip_update: Tensor) -> None:
        """Start a step, in which no parameter is to change if `skip_update`, () bool."""
        self._skip_update = skip_update
        self.square_sum = torch.zeros((), device=skip_update.device)
        self.gradients_are_final = True

    def _update(self, group: int, parameter: nn.Parameter) -> None:
        if not self.gradients_are_final:
            return
        square_sum = local_square_sums([("", parameter)], (), self.square_sum.device)[0]
        self.square_sum += square_sum
        optimizer = self._optimizer
        # gradients of other parameters and ranks aren't known yet
        is_bad = self._skip_update | ~torch.isfinite(square_sum)
        groups = optimizer.param_groups
        optimizer.param_groups = [groups[group] | {"params": [parameter]}]
        update(optimizer, is_bad)
        optimizer.param_groups = groups
        parameter.grad = None
