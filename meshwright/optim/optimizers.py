"""Optimizers over sharded fp32 parameters."""

from collections.abc import Iterable

import torch
from torch import nn

from meshwright.config.job_config import Optimizer

OPTIMIZERS: dict[str, type[torch.optim.Adam]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
}


def build_optimizer(parameters: Iterable[nn.Parameter], config: Optimizer) -> torch.optim.Optimizer:
    """The optimizer that `config` names; to be built after the parameters are sharded.

    Fused: one kernel for all parameters, and one that can be told on the device, by `found_inf`,
    to leave them as they are (see `step.py`).
    """
    return OPTIMIZERS[config.name](
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
