"""Context parallelism: each rank has a part of every sequence, and sees the keys of all."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from meshwright.config.training import Training
from meshwright.models.attention import Mask, is_seen, masked_attention, repeat_heads
from meshwright.models.decoder import Decoder
from meshwright.models.latent import LatentSpec
from meshwright.models.sinks import gradient_of_sinks, with_sinks
from meshwright.models.table import AttentionSpec
from meshwright.parallelisms.delta_context import recur
from meshwright.parallelisms.fused_attention import KERNELS, WIDTHS, Part, choose_kernel
from meshwright.parallelisms.meshes import all_gather, reduce_scatter
from meshwright.parallelisms.sequence_parts import chunks_of
from meshwright.parallelisms.window_context import Halo, add_halo, halo_of

SEQUENCE = 2
"""Of (B, N, S, H), the dimension that is sharded."""

Chunks = tuple[int, int]
"""A rank's two chunks, by their number among the 2 cp equal chunks of the sequence."""


def apply_cp(
    model: Decoder, mesh: DeviceMesh, training: Training, *, tp: int = 1, is_compared: bool
) -> str:
    """Make the attention of every block in `model` span the cp axis `mesh`, in place.

    Collective in forward and backward. Return a line for the log.

    Args:
        tp: ranks that share the heads.
        is_compared: whether bits of gradients are compared between ranks, by the sentry.

    Raises:
        ConfigError: if this GPU hasn't the kernel of `training.attention_kernel`.
    """
    chunk = model.seq_len // (2 * mesh.size())
    kernel, line = choose_kernel(
        model.table, mesh.device_type, chunk, training, tp=tp, is_compared=is_compared
    )
    # one for all blocks, so that they share a graph
    shared = functools.partial(attend, mesh=mesh, kernel=kernel)
    recurrent = functools.partial(recur, mesh=mesh)
    in_order = functools.partial(gather_in_order, mesh=mesh)
    model.key_positions = functools.partial(key_positions, mesh=mesh)
    for name, block in model.layers.items():
        core, spec = block.get_submodule("attention.core"), model.table.layers[int(name)].attention
        if spec.has_own_core:
            kind: Any = type(core)
            core.__class__ = _with_gathered_keys(kind, mesh)
        else:
            core.forward = shared if isinstance(spec, AttentionSpec) else recurrent
        if "seen" in spec.bare_modules:
            block.get_submodule("attention.seen").forward = in_order
    latents = any(isinstance(layer.attention, LatentSpec) for layer in model.table.layers)
    what = "latents" if latents else "keys and values"
    if len(model.table.attentions) < len(model.table.layers):
        what += ", and maps of linear attention's states,"
    windows = {spec.window for spec in model.table.attentions.values() if not spec.has_own_core}
    said = f"context parallelism: sequences sharded over {mesh.size()} ranks; {what} are gathered"
    if any(halo_of(window, model.seq_len, mesh) for window in windows):
        said += ", and in layers with a window those before a chunk that it sees"
    return f"{said}; {line}" if line else said


@functools.cache  # one class for all layers, so that they share a graph
def _with_gathered_keys(kind: Any, mesh: DeviceMesh) -> Any:
    """Return a class as `kind`, a core of the user's, whose code gets the keys and values of all
    ranks, in the order of positions. The mask that it is given is of all keys."""

    def forward(
        self: nn.Module, q: Tensor, k: Tensor, v: Tensor, *others: Any, **named: Any
    ) -> Any:
        if k.shape[SEQUENCE] == q.shape[SEQUENCE]:  # else `seen` has gathered them
            both = _in_order(all_gather(torch.cat([k, v], -1).unsqueeze(0), mesh))
            k, v = both.split((k.shape[-1], v.shape[-1]), -1)
        return kind.forward(self, q, k, v, *others, **named)

    return type(kind.__name__, (kind,), {"forward": forward})


def gather_in_order(own: Tensor, mesh: DeviceMesh) -> Tensor:
    """(..., S/cp, W) -> (..., S, W), in the order of positions; backward adds up over ranks.

    Of latent attention the latents are gathered, since keys and values are wider by far: V3's 128
    heads have 40,960 numbers of a token, and a latent 576."""
    return _in_order(all_gather(own.unsqueeze(0), mesh))


def key_positions(
    window: int | None, seq_len: int, device: torch.device, *, mesh: DeviceMesh
) -> Tensor | None:
    """Return where the keys are that `attend` gets for this rank's queries: (keys,) int64; None:
    they are of all positions."""
    halo = halo_of(window, seq_len, mesh)
    return None if halo is None else halo.positions(device)


def keys_seen(k: Tensor, window: int | None, mesh: DeviceMesh) -> tuple[Tensor, Tensor | None]:
    """(B, K, S/cp, H) -> (B, K, keys, H), those that this rank's queries may see, and their
    `key_positions`. Collective."""
    halo = halo_of(window, k.shape[SEQUENCE] * mesh.size(), mesh)
    if halo is None:
        return gather_in_order(k, mesh), None
    (k,) = add_halo([k], halo, mesh)
    return k, halo.positions(k.device)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    mesh: DeviceMesh,
    kernel: str | None = "cpu",
) -> Tensor:
    """(B, N, S/cp, H), (B, K, S/cp, H) twice -> (B, N, S/cp, H); or keys and values are of all
    positions already.

    It keeps the contract of `CausalAttention`. Collective over `mesh`, in forward and backward.

    Args:
        mask: of this rank's queries, and the keys at `key_positions`; None: only causal.
        kernel: of `choose_kernel`, for these heads.
    """
    chunks = chunks_of(mesh.get_local_rank(), mesh.size())
    halo = halo_of(window, q.shape[SEQUENCE] * mesh.size(), mesh)
    is_whole = k.shape[SEQUENCE] > q.shape[SEQUENCE]
    is_causal = mask is None and halo is None and soft_cap is None
    if is_causal and kernel is not None and q.dtype in KERNELS[kernel].dtypes:
        width = q.shape[-1]
        if q.is_cuda and width % WIDTHS:  # zeros change neither scores nor other columns
            q, k, v = (F.pad(x, (0, -width % WIDTHS)) for x in (q, k, v))
        apply: Callable[..., Tensor] = _AttentionInChunks.apply
        over = None if is_whole else mesh
        return apply(q, k, v, sinks, chunks, over, scale, kernel)[..., :width]
    if halo is not None:
        assert not is_whole  # latent attention has no windows
        k, v = add_halo([k, v], halo, mesh)  # (B, K, keys, H)
    elif not is_whole:
        k, v = _gather(torch.stack([k, v]), mesh).unbind(0)  # (B, K, S, H)
    if isinstance(mask, BlockMask):  # skips later keys by itself
        return masked_attention(q, k, v, mask, sinks, scale=scale, soft_cap=soft_cap)
    return masked_in_chunks(q, k, v, mask, chunks, scale, halo, soft_cap, sinks)


def masked_in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    chunks: Chunks,
    scale: float,
    halo: Halo | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend by a kernel that takes masks: of each chunk of `q` to no key that comes later, and to
    none before the window of its first query.

    Args:
        k, v: of all positions, or with `halo` of those that it has.
        mask: (B, 1, S/cp, keys) bool, with the window as well; None: one document.
    """
    if mask is None and q.is_cuda:  # in fp32, whose kernel has no grouped heads
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    length, device = q.shape[SEQUENCE] // 2, q.device
    places, window = torch.arange(k.shape[SEQUENCE], device=device), None
    if halo is not None:
        places, window = halo.positions(device), halo.window
    outputs = []
    for part, chunk in enumerate(chunks):
        rows = slice(part * length, (part + 1) * length)
        seen = [slice((chunk + 1) * length)] if halo is None else halo.seen(chunk)
        if mask is None:
            own = torch.arange(chunk * length, (chunk + 1) * length, device=device)
            part_mask = is_seen(own.unsqueeze(1), _joined(places, seen, 0), window)
        else:
            part_mask = _joined(mask[:, :, rows], seen, 3)
        keys, values = _joined(k, seen, SEQUENCE), _joined(v, seen, SEQUENCE)
        out = masked_attention(
            q[:, :, rows], keys, values, part_mask, sinks, scale=scale, soft_cap=soft_cap
        )
        outputs.append(out)
    return torch.cat(outputs, SEQUENCE)


def _joined(x: Tensor, parts: list[slice], dim: int) -> Tensor:
    """Return some parts of a dimension, one after the other; without a copy if it is one part."""
    before = (slice(None),) * dim
    found = [x[(*before, part)] for part in parts]
    return found[0] if len(found) == 1 else torch.cat(found, dim)


class _AttentionInChunks(torch.autograd.Function):
    """Causal attention of a rank's chunks to the keys and values of all positions. With a mesh it
    keeps a rank's own keys and values only, and gathers twice.

    The fused kernels return the logarithms but no gradient of them, hence our backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        chunks: Chunks,
        mesh: DeviceMesh | None,
        scale: float,
        kernel: str,
    ) -> Tensor:
        """(B, N, S/cp, H), twice (B, K, S/cp or without a mesh S, H), (N,) -> (B, N, S/cp, H)."""
        keys, values = (k, v) if mesh is None else _gather(torch.stack([k, v]), mesh).unbind(0)
        output, sums = attend_in_chunks(q, keys, values, chunks, scale, kernel, sinks)
        ctx.save_for_backward(q, k, v, sinks, output, *sums)
        ctx.options = chunks, mesh, scale, kernel
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, output, *sums = ctx.saved_tensors
        chunks, mesh, scale, kernel = ctx.options
        if mesh is not None:
            # The compiler would move a gather without a gradient to forward, and keep its result.
            # So a few numbers of the gradient are gathered too.
            ahead = grad[0, 0, 0]
            mine = torch.cat([torch.stack([k, v]).flatten(), ahead]).unsqueeze(0)
            parts = all_gather(mine, mesh)[:, : -len(ahead)]
            k, v = _in_order(parts.unflatten(1, (2, *k.shape))).unbind(0)
        of_q, of_k, of_v = gradients_in_chunks(grad, q, k, v, output, sums, chunks, scale, kernel)
        if mesh is not None:
            of_k, of_v = _scatter(torch.stack([of_k, of_v]), mesh).unbind(0)
        of_sinks = None
        if sinks is not None:  # of this rank's queries: sums over ranks are FSDP's
            of_sinks = gradient_of_sinks(grad, output, torch.cat(sums, SEQUENCE), sinks)
        return of_q, of_k, of_v, of_sinks, None, None, None, None


def attend_in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: Chunks,
    scale: float,
    kernel: str,
    sinks: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return causal attention, (B, N, S/cp, H), and the logarithms of each chunk, with sinks.

    Args:
        q: (B, N, S/cp, H), the two chunks one after the other.
        k, v: (B, K, S, H), in the order of positions; K divides N.
    """
    fused = KERNELS[kernel].forward
    outputs, sums = [], []
    for queries, seen in zip(q.chunk(2, SEQUENCE), _keys(q, chunks), strict=True):
        parts: list[Part] = []
        for keys, is_causal in seen:
            parts.append(fused(queries, k[:, :, keys], v[:, :, keys], is_causal, scale))
        out, logsumexp = functools.reduce(_merge, parts)
        if sinks is not None:
            out, logsumexp = with_sinks(out, logsumexp, sinks)
        outputs.append(out)
        sums.append(logsumexp.contiguous())
    return torch.cat(outputs, SEQUENCE), sums


def gradients_in_chunks(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    sums: list[Tensor],
    chunks: Chunks,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `q`, `k` and `v`, from that of `attend_in_chunks`'s output."""
    fused_backward = KERNELS[kernel].backward
    # of no element are there more than two parts, so that 16-bit sums as well, are rounded once
    grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q, k, v))
    by_chunk = [x.chunk(2, SEQUENCE) for x in (grad_q, grad, q, output)]
    for into, grad_out, queries, out, logsumexp, seen in zip(
        *by_chunk, sums, _keys(q, chunks), strict=True
    ):
        for keys, is_causal in seen:
            # the logarithms are of all keys: so the parts' gradients add up
            tensors = grad_out, queries, k[:, :, keys], v[:, :, keys], out, logsumexp
            of_q, of_k, of_v, *_ = fused_backward(tensors, is_causal, scale)
            into += of_q
            grad_k[:, :, keys] += of_k
            grad_v[:, :, keys] += of_v
    return grad_q, grad_k, grad_v


def _keys(q: Tensor, chunks: Chunks) -> list[list[tuple[slice, bool]]]:
    """For each chunk of `q`, the keys that it sees, and whether causally: its own, and before."""
    length = q.shape[SEQUENCE] // 2
    return [
        [(slice(chunk * length, (chunk + 1) * length), True)]
        + ([(slice(0, chunk * length), False)] if chunk else [])
        for chunk in chunks
    ]


def _merge(a: Part, b: Part) -> Part:
    """Attention to the keys of both, and its logarithms, from that to the keys of each."""
    (out_a, sum_a), (out_b, sum_b) = a, b
    weight = torch.sigmoid(sum_b - sum_a).unsqueeze(-1)
    out = torch.lerp(out_a.float(), out_b.float(), weight).to(out_a.dtype)
    return out, torch.logaddexp(sum_a, sum_b)


def _gather(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """(2, B, K, S/cp, H) -> (2, B, K, S, H), in the order of positions."""
    return _in_order(all_gather(x, mesh).unflatten(0, (mesh.size(), 2)))


def _in_order(parts: Tensor) -> Tensor:
    """(cp, 2, B, K, S/cp, H) -> (2, B, K, S, H)."""
    early, late = parts.chunk(2, dim=-2)  # chunks 0 .. cp-1, and 2 cp - 1 .. cp
    return torch.cat([*early.unbind(0), *late.flip(0).unbind(0)], dim=-2)


def _scatter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """(2, B, K, S, H) -> (2, B, K, S/cp, H): the sum over ranks, at this rank's positions."""
    chunks = x.chunk(2 * mesh.size(), dim=-2)
    parts = [torch.cat([chunks[rank], chunks[-1 - rank]], -2) for rank in range(mesh.size())]
    return reduce_scatter(torch.cat(parts), mesh)
