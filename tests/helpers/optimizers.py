"""Parameter groups in a config, and the same in plain PyTorch."""

from typing import Any

import torch
from torch import nn

from meshwright.config.optimizer import ParameterGroup

GROUPS = [
    ParameterGroup(parameters=["*norm.weight"], lr_scale=0.5),
    ParameterGroup(parameters=["tok_embeddings.*"], weight_decay=0.0),
    ParameterGroup(parameters=["layers.0.*"], lr_scale=0.25),  # but its norms, which are above
]


def plain_groups(
    model: nn.Module, decay: float, norm_decay: float = 0.0
) -> list[tuple[dict[str, Any], float]]:
    """Groups as a user of torch would write them, each with its factor on the learning rate."""
    norms, embedding, first, others = [], [], [], []
    for name, parameter in model.named_parameters():
        if "norm" in name:
            norms.append(parameter)
        elif name.startswith("tok_embeddings"):
            embedding.append(parameter)
        elif name.startswith("layers.0."):
            first.append(parameter)
        else:
            others.append(parameter)
    return [
        ({"params": norms, "weight_decay": norm_decay}, 0.5),
        ({"params": embedding, "weight_decay": 0.0}, 1.0),
        ({"params": first, "weight_decay": decay}, 0.25),
        ({"params": others, "weight_decay": decay}, 1.0),
    ]


def set_gradients(model: nn.Module, seed: int) -> None:
    """Give every parameter a gradient of normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
