"""Context parallelism: each rank has a part of every sequence, and sees the keys of all."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from meshwright.batch import Batch
from meshwright.config.job_config import Parallelism, Training
from meshwright.models.decoder import Decoder
from meshwright.models.layers.document_mask import Mask, masked_attention
from meshwright.parallelisms.gathered_attention import gather, gathered_attention
from meshwright.parallelisms.ring_attention import is_available, ring_attention, torch_ring


def local_positions(seq_len: int, mesh: DeviceMesh, device: torch.device) -> Tensor:
    """Return which of the positions 0 .. S-1 this rank of the cp axis has: (S/cp,) int64.

    The sequence is cut into 2 cp chunks; rank r has chunks r and 2 cp - 1 - r. With causal
    attention that is the same work for every rank, where neighbouring chunks would give the last
    rank most of it. Source: Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2.
    """
    if mesh.size() == 1:
        return torch.arange(seq_len, device=device)
    chunks = torch.arange(seq_len, device=device).chunk(2 * mesh.size())
    rank = mesh.get_local_rank()
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def local_part(batch: Batch, positions: Tensor) -> Batch:
    """Return the tokens and labels at `positions` of every sequence.

    `documents` stays whole: masking a query needs the document ids of all keys.
    """
    return Batch(batch.tokens[:, positions], batch.labels[:, positions], batch.documents)


def apply_cp(model: Decoder, mesh: DeviceMesh, training: Training, parallelism: Parallelism) -> str:
    """Make the attention of every block in `model` span the cp axis `mesh`, in place.

    Queries stay; keys and values are gathered or sent on from rank to rank, as
    `parallelism.context_parallel_attention` says. Collective in forward and backward.

    Returns:
        A line for the log.
    """
    dtype = getattr(torch, training.mixed_precision_param)
    has_kernel = is_available(mesh.device_type, dtype, model.table.head_dim)
    uses_ring = parallelism.context_parallel_attention == "ring"
    ring = mesh.get_group().group_name if uses_ring else None
    if uses_ring:
        torch_ring()  # if torch has moved it, that shows here
    # one for all blocks, so that they share a graph
    shared = functools.partial(attend, mesh=mesh, ring=ring, has_kernel=has_kernel)
    for block in model.layers.values():
        core = block.get_submodule("attention.core")
        core.forward = shared
    way = "go from rank to rank" if uses_ring else "are gathered"
    return f"context parallelism: sequences cut in {mesh.size()}; keys and values {way}"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    *,
    scale: float,
    mesh: DeviceMesh,
    ring: str | None,
    has_kernel: bool = True,
) -> Tensor:
    """(B, N, S/cp, H), (B, K, S/cp, H), (B, K, S/cp, W) -> (B, N, S/cp, W).

    It keeps the contract of `CausalAttention`.

    Args:
        mask: of this rank's queries and all keys; None: only causal.
        ring: name of the group of `mesh` if keys and values are to go around, where they can.
        has_kernel: `ring_attention.is_available` for these heads in 16 bits.
    """
    # on GPUs flash attention takes no fp32, which `fp32_modules` may have made of this layer
    is_flash = has_kernel and not (q.is_cuda and q.dtype == torch.float32)
    width = v.shape[-1]
    if q.shape[-1] != width:  # zeros change neither scores nor other columns
        widest = max(q.shape[-1], width)
        q, k, v = (F.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
    if ring is not None and mask is None and is_flash:
        return ring_attention(q, k, v, ring, scale)[0][..., :width]
    rank, size = mesh.get_local_rank(), mesh.size()
    chunks = (rank, 2 * size - 1 - rank)
    if mask is None:
        attended = gathered_attention(q, k, v, chunks, mesh=mesh, scale=scale, is_flash=is_flash)
        return attended[..., :width]
    k, v = gather(torch.stack([k, v]), mesh).unbind(0)  # (B, K, S, H)
    if isinstance(mask, BlockMask):  # skips later keys by itself
        return masked_attention(q, k, v, mask, scale=scale)[..., :width]
    length = q.shape[2] // 2
    outputs = []
    for part, chunk in enumerate(chunks):
        rows = slice(part * length, (part + 1) * length)
        seen = slice(0, (chunk + 1) * length)  # no key that comes later
        keys, values = k[:, :, seen], v[:, :, seen]
        part_mask = mask[:, :, rows, seen]
        outputs.append(masked_attention(q[:, :, rows], keys, values, part_mask, scale=scale))
    return torch.cat(outputs, dim=2)[..., :width]
