"""Attention inside documents, where a sequence is made of several."""

from contextlib import suppress
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Mask = Tensor | BlockMask
"""Which keys each query sees: (B, 1, queries, keys) bool, or the same in blocks."""


def positions_in_document(documents: Tensor, positions: Tensor | None = None) -> Tensor:
    """Return how far each token is from the first of its document.

    Args:
        documents: (B, S) int, rising along a sequence.
        positions: (S/cp,) or (B, S/cp) int64 in the sequence, of the tokens that are asked about;
            None: of all.

    Returns:
        (B, S/cp) int64.
    """
    place = torch.arange(documents.shape[1], device=documents.device)
    is_first = documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0
    start = (place * is_first).cummax(dim=1).values  # a place without a start counts 0
    return _at(place - start, positions)


def build_mask(documents: Tensor, positions: Tensor | None = None) -> Mask:
    """Build a causal mask inside documents, in the form that suits the device of `documents`.

    Args:
        documents: (B, S) int of the keys.
        positions: (S/cp,) or (B, S/cp) int64 in the sequence, of the queries; None: all.
    """
    if documents.is_cuda:
        return block_mask(documents, positions)
    return dense_mask(documents, positions)


def dense_mask(documents: Tensor, positions: Tensor | None = None) -> Tensor:
    """(B, 1, S/cp, S) bool, arguments as `build_mask`'s. Its memory grows with S^2."""
    place = torch.arange(documents.shape[1], device=documents.device)
    own = _at(documents, positions).unsqueeze(2)  # (B, S/cp, 1)
    rows = (place if positions is None else positions).unsqueeze(-1)  # (S/cp, 1) or (B, S/cp, 1)
    return ((own == documents.unsqueeze(1)) & (rows >= place)).unsqueeze(1)


def block_mask(documents: Tensor, positions: Tensor | None = None) -> BlockMask:
    """Blocks of queries by keys that are seen in full, in part or not at all, as `build_mask`'s."""
    batch, seq_len = documents.shape
    place = torch.arange(seq_len, device=documents.device).expand(batch, -1)
    own, rows = _at(documents, positions), _at(place, positions)  # (B, S/cp) each

    def is_seen(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (own[b, query] == documents[b, key]) & (rows[b, query] >= key)

    create = _compiled(create_block_mask) if documents.is_cuda else create_block_mask
    device = documents.device
    return create(is_seen, batch, None, own.shape[1], seq_len, device=device)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float | None = None
) -> Tensor:
    """(B, N, queries, H), (B, K, keys, H), (B, K, keys, W) -> (B, N, queries, W); K divides N.

    Args:
        scale: of products of queries with keys; None: H^-1/2.
    """
    is_grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        # within a compiled block it is compiled with that
        is_eager = q.is_cuda and not torch.compiler.is_compiling()
        attend = _compiled(flex_attention) if is_eager else flex_attention
        return attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=is_grouped)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=is_grouped
    )


def _at(values: Tensor, positions: Tensor | None) -> Tensor:
    """(B, S) at (S/cp,) or (B, S/cp) -> (B, S/cp)."""
    if positions is None:
        return values
    return values.gather(1, positions.expand(len(values), -1))


@cache  # not at import, which would take a second
def _compiled(function: Any) -> Any:
    """Compile a function of flex attention: uncompiled, it makes a whole (S, S) matrix first."""
    # Of two graphs that fit, dynamo would take the one that it used last. A block that is
    # recomputed in backward might then take another than it took in forward, and fail (pytorch
    # issue 166926, open in 2.13). Private: if it goes, see whether the issue is closed.
    with suppress(ImportError):
        from torch._C._dynamo import eval_frame

        getattr(eval_frame, "_set_lru_cache", lambda _: None)(False)
    # Visible as one operator, "higher_order.inductor_compiled_code", so that recomputation by op
    # can keep its output. A torch without the option computes it again.
    try:
        return torch.compile(function, options={"wrap_inductor_compiled_regions": True})
    except RuntimeError:  # "Unexpected optimization option"
        return torch.compile(function)
