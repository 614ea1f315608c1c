"""Changes the first values of a small model, and the chunks in which it computes, so that mistakes
show and rounding doesn't grow."""

import math
from unittest import mock

import torch

from meshwright.commands.prove.shrink import HEAD_DIM
from meshwright.models import delta_rule
from meshwright.models.decoder import Decoder
from meshwright.models.table import DecoderSpec
from meshwright.parallelisms.local_model import LocalModel
from meshwright.train.trainer import Trainer

STRETCH = (8.0, 16.0)
"""Of queries and keys at the first and at the last position."""

STRETCH_NORMALISED = (1.0, 2.0)
"""The same, of queries and keys that the model normalises."""

EMBEDDING_SCALE, BRANCH_SCALE = 32.0, 0.125
"""Of the embedding and of the norms' weights where blocks have their norms at the end. Powers of
two, so exact."""

EMBEDDING_SCALE_OF_EXPERTS = 8.0
"""Of the embedding where experts add large results to the residual stream."""

SINK_SCALE = 64.0
"""Of sinks."""

in_short_chunks = mock.patch.object(delta_rule, "CHUNK", 5)
"""Linear attention then has several chunks in the short sequences here, and in a rank's part of
them, the last of which isn't full."""


def prepare_weights(trainer: Trainer) -> None:
    """Prepare the initial values of a job that hasn't taken a step."""
    for stage in trainer.model.stages:
        show_attention(stage)
        calm_post_norms(stage)
        calm_experts(stage)
        show_sinks(stage)
        show_layers_without_positions(stage)
    if trainer.average is not None:
        trainer.average.begin()
    unbalance(trainer.model)


def show_attention(stage: Decoder) -> None:
    """Stretch the rotary cache of `stage`, more towards its end, in place.

    Initial queries and keys are so small that attention is nearly a mean of its inputs: which
    token is where would hardly show. And rotary attention sees nothing but distances: if documents
    didn't start at position 0, each query would still see its own keys at the right ones. Here
    scores are of order 1, and depend on places. Queries and keys that are normalised make such
    scores by themselves: stretched as far, attention would be chaotic, and rounding would grow.
    """
    stretch = stretch_of(stage.table)
    for name in stage.rope_caches:
        cache = stage.get_buffer(name)  # (2, S, H/2)
        by_position = torch.linspace(*stretch, cache.shape[1])  # on the CPU, whatever the device
        cache *= by_position.to(cache.device).unsqueeze(1)


def stretch_of(table: DecoderSpec) -> tuple[float, float]:
    """Return by how much queries and keys of a model are stretched at the first and at the last
    position."""
    attentions = table.attentions.values()
    if any(attention.qk_norm for attention in attentions):
        return STRETCH_NORMALISED
    # scores grow with the width of the model, of which there are 4 for each head on CPUs
    heads = max((attention.n_heads for attention in attentions), default=0)
    narrower = min(1.0, math.sqrt(heads * HEAD_DIM / table.dim))
    return STRETCH[0] * narrower, STRETCH[1] * narrower


def unbalance(model: LocalModel) -> None:
    """Give routers loads as if of a step before, uneven: at even ones losses have no gradient."""
    for stage in model.stages:
        for mixture in stage.mixtures().values():
            mixture.load.copy_(torch.arange(1, len(mixture.load) + 1))


@torch.no_grad()
def calm_post_norms(stage: Decoder) -> None:
    """If the blocks of `stage` have their norms at the end, scale embedding and norms, in place.

    Such a block adds a vector of size 1, however small its attention's output, to a residual stream
    that starts at 0.02: so each rounding would grow from block to block. At these scales blocks add
    to the stream about as much as the blocks of other families do.
    """
    table, ends = stage.table, dict[str, int]()
    for number, layer in enumerate(table.layers):
        prefix = {"pre": None, "post": "", "sandwich": "post_"}[layer.norm]
        if prefix is not None:
            names = (f"layers.{number}.{prefix}{part}_norm.weight" for part in ("attention", "ffn"))
            ends |= {name: int(table.parameters[name].is_offset) for name in names}
    if ends and stage.tok_embeddings is not None and table.embedding_scale == 1:
        stage.tok_embeddings.weight.mul_(EMBEDDING_SCALE)
    for name, parameter in stage.named_parameters():
        if name in ends:
            parameter.add_(ends[name]).mul_(BRANCH_SCALE).sub_(ends[name])


@torch.no_grad()
def calm_experts(stage: Decoder) -> None:
    """If experts of `stage` multiply their gate by 1 + up, scale the embedding, in place.

    Up is small at first, and so are the results of other experts. Those of these are nearly as
    large as the residual stream that begins at 0.02: so each rounding would grow, as above.
    """
    mixtures = stage.table.mixtures.values()
    is_large = any(mixture.activation == "clamped_swiglu" for mixture in mixtures)
    if is_large and stage.tok_embeddings is not None:
        stage.tok_embeddings.weight.mul_(EMBEDDING_SCALE_OF_EXPERTS)


@torch.no_grad()
def show_sinks(stage: Decoder) -> None:
    """Scale sinks, in place: at first all are near zero, and heads would hardly differ."""
    for name, parameter in stage.named_parameters():
        if name.endswith(".sinks.weight"):
            parameter.mul_(SINK_SCALE)


@torch.no_grad()
def show_layers_without_positions(stage: Decoder) -> None:
    """Scale the queries of layers that don't rotate them as `show_attention` scales those of the
    others, and their keys, in place."""
    for layer, spec in stage.table.attentions.items():
        is_scaled = spec.rope is not None or spec.qk_norm is not None
        if str(layer) in stage.layers and "wq.weight" in spec.parameters and not is_scaled:
            block = stage.layers[str(layer)]
            block.get_parameter("attention.wq.weight").mul_(stretch_of(stage.table)[0] ** 2)
