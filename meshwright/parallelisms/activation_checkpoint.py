"""Activation checkpointing: what backward computes again instead of keeping in memory."""

import functools
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Mode = Literal["none", "full", "selective"]

SAVED_OPS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""Dear to compute for the memory that their outputs take; norms and pointwise steps are cheap."""


def apply_ac(blocks: nn.ModuleDict, mode: Mode, selective_ac_option: str) -> None:
    """Wrap the forward of `blocks` in place; names of modules and parameters stay as they are.

    Args:
        selective_ac_option: with mode "selective", "op" or the n of "every n-th block".
    """
    for index, block in enumerate(blocks.values()):
        if mode == "full":
            _recompute(block)
        elif mode == "selective" and selective_ac_option == "op":
            _recompute(
                block,
                context_fn=functools.partial(create_selective_checkpoint_contexts, _save_dear_ops),
            )
        elif mode == "selective" and index % int(selective_ac_option) == 0:
            _recompute(block)


def _recompute(block: nn.Module, **options: Any) -> None:
    forward = block.forward

    # a function of ours, not a partial: torch.compile starts at the first frame that is not torch's
    def recomputed(*inputs: Tensor) -> Tensor:
        return checkpoint(
            forward,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,  # the blocks draw no random numbers
            **options,
        )

    block.forward = recomputed


def _save_dear_ops(
    context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE
