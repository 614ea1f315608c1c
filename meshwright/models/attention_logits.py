"""The largest attention logit of each head, without the matrix of all of them."""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from meshwright.models.attention import Mask, is_seen

TILE = 512
"""Queries, and keys, whose logits exist at once."""


@torch.no_grad()
def max_logits(
    q: Tensor,
    k: Tensor,
    mask: Mask | None = None,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    positions: Tensor | None = None,
    key_positions: Tensor | None = None,
) -> Tensor:
    """(B, N, queries, H), (B, K, keys, H) -> (N,) fp32: the largest logit of each head that its
    softmax sees; K divides N, and sinks aren't counted. Products are in fp32.

    Takes what an attention's core does, so latent attention's queries and keys as well.

    Args:
        mask: of `Decoder.masks`: causal, and with the window as well; None: one document.
        scale, window, soft_cap: as `CausalAttention` takes them.
        positions: (queries,) int64, where the queries are in the sequence; None: queries and keys
            are of the same positions.
        key_positions: (keys,) int64, where the keys are; None: from the first on.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    if positions is None:
        positions = torch.arange(num_queries, device=q.device)
    if key_positions is None:
        key_positions = torch.arange(num_keys, device=q.device)
    grouped = q.float().unflatten(1, (k.shape[1], -1)) * scale  # (B, K, N/K, queries, H)
    largest = torch.full(grouped.shape[1:3], -torch.inf, device=q.device)
    for first in range(0, num_queries, TILE):
        queries = slice(first, min(first + TILE, num_queries))
        for start in range(0, num_keys, TILE):
            keys = slice(start, min(start + TILE, num_keys))
            if mask is None:
                seen = is_seen(positions[queries].unsqueeze(1), key_positions[keys], window)
            else:
                seen = _seen(mask, queries, keys)
            logits = grouped[:, :, :, queries] @ k[:, :, None, keys].float().mT
            logits.masked_fill_(~seen, -torch.inf)
            largest = torch.maximum(largest, logits.amax((0, 3, 4)))
    largest = largest.flatten()
    # it rises with the logit, so the cap of the largest is the largest of the capped
    return largest if soft_cap is None else soft_cap * torch.tanh(largest / soft_cap)


def _seen(mask: Mask, queries: slice, keys: slice) -> Tensor:
    """Return whether each query of a tile sees each key: bool, to broadcast to (B, K, N/K, queries,
    keys)."""
    if not isinstance(mask, BlockMask):
        return mask[:, :, None, queries, keys]
    device = mask.kv_num_blocks.device
    sequences = torch.arange(mask.shape[0], device=device).view(-1, 1, 1)
    rows = torch.arange(queries.start, queries.stop, device=device).view(-1, 1)
    columns = torch.arange(keys.start, keys.stop, device=device)
    # no head is told from another by our masks
    seen = mask.mask_mod(sequences, torch.zeros_like(sequences), rows, columns)
    return seen[:, None, None]
