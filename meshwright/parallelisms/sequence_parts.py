"""Which part of every sequence a rank has under context parallelism."""

import dataclasses

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.models.loss import Batch


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """Return a rank's two chunks, by their number among the 2 cp equal chunks of the sequence."""
    return rank, 2 * size - 1 - rank


def local_positions(seq_len: int, mesh: DeviceMesh, device: torch.device) -> Tensor:
    """Return which of the positions 0 .. S-1 this rank of the cp axis has: (S/cp,) int64.

    With causal attention, `chunks_of` are the same work for every rank, where neighboring chunks
    would give the last rank most of it. Source: Grattafiori et al. 2024, arXiv:2407.21783, section
    3.3.2.
    """
    if mesh.size() == 1:
        return torch.arange(seq_len, device=device)
    chunks = torch.arange(seq_len, device=device).chunk(2 * mesh.size())
    return torch.cat([chunks[own] for own in chunks_of(mesh.get_local_rank(), mesh.size())])


def local_part(batch: Batch, positions: Tensor) -> Batch:
    """Return tokens and labels at `positions` of every sequence; the batch, if that is all.

    `documents` stays whole: masking a query needs the document ids of all keys.
    """
    if len(positions) == batch.tokens.shape[1]:
        return batch
    tokens, labels = batch.tokens[:, positions], batch.labels[:, positions]
    own = dataclasses.replace(batch, tokens=tokens, labels=labels)
    if batch.future_tokens is None or batch.future_labels is None:
        return own
    future_tokens = batch.future_tokens[..., positions]
    future_labels = batch.future_labels[..., positions]
    return dataclasses.replace(own, future_tokens=future_tokens, future_labels=future_labels)
