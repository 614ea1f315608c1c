"""Maximal update parametrization (muP): hyperparameters of a narrow model for a wide one. Free of
torch.

Source: Yang et al. 2022, arXiv:2203.03466, table 8 (Adam), and section B.1 for attention; weight
decay as Dey et al. 2025, arXiv:2505.01618, table 1. With m = width / base width:

    matrices of layers: initial std / sqrt(m), learning rate / m, weight decay x m
    output projection: initial std 0.02, so that logits start near 0; logits / m
    attention: scores are scaled by 1 / H, not by 1 / sqrt(H)
    embedding, norms and biases: as at the base width
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from meshwright.models.args import STD, DecoderArgs, ExpertArgs
from meshwright.models.checks import check_positive
from meshwright.models.table import AttentionSpec, DecoderSpec, FeedForwardSpec, LayerSpec


@dataclass(frozen=True)
class MupArgs(DecoderArgs):
    """The dimensions of a dense decoder that may have muP."""

    mup_base_dim: int | None = None
    """Model width for which the learning rate was chosen: the model and its optimizer are scaled
    from there to `dim` by muP. None: they aren't."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mup_base_dim is None:
            return
        check_positive(self, "mup_base_dim")
        if isinstance(self, ExpertArgs):
            raise ValueError(
                f"mup_base_dim = {self.mup_base_dim}: muP has no rule for experts: leave it out"
            )

    @property
    def width_ratio(self) -> float:
        """The factor m from the base width to this one."""
        return self.dim / (self.mup_base_dim or self.dim)

    def decoder(self, **options: Any) -> DecoderSpec:
        """Return the model, scaled from the base width."""
        spec = super().decoder(**options)
        if self.mup_base_dim is None:
            return spec
        ratio = self.width_ratio
        return replace(
            spec,
            layers=tuple(_scaled(layer, ratio) for layer in spec.layers),
            output_std=STD,
            output_scale=spec.output_scale / ratio,
            matrix_lr_scale=1 / ratio,
        )

    @property
    def folded_factors(self) -> dict[str, float]:
        if self.mup_base_dim is None:
            return {}
        factors = {"output.weight": 1 / self.width_ratio}
        for number, attention in self.table.attentions.items():
            # others scale scores by 1 / sqrt(H): queries take the rest of 1 / H
            rest = 1 / math.sqrt(attention.head_dim)
            module = f"layers.{number}.attention."
            own = {name: rest for name in attention.parameters if name.startswith("wq.")}
            if attention.qk_norm is not None:
                own = {"q_norm.weight": rest}
            factors |= {f"{module}{name}": factor for name, factor in own.items()}
        return factors


def _scaled(layer: LayerSpec, ratio: float) -> LayerSpec:
    """Return a layer whose matrices start smaller, and whose scores are scaled by 1 / H."""
    attention, feed_forward = layer.attention, layer.feed_forward
    assert isinstance(attention, AttentionSpec)
    assert isinstance(feed_forward, FeedForwardSpec)
    root = math.sqrt(ratio)
    return replace(
        layer,
        attention=replace(
            attention,
            std=attention.std / root,
            out_std=attention.out_std / root,
            scale=1 / attention.head_dim,
        ),
        feed_forward=replace(
            feed_forward, std=feed_forward.std / root, out_std=feed_forward.out_std / root
        ),
    )
