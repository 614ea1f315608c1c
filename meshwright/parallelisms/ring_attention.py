"""Ring attention: keys and values travel around the cp axis, and no rank ever holds all of them.

Source: Liu et al. 2023, arXiv:2310.01889; of chunks that are dealt out evenly: Brandon et al. 2023,
arXiv:2311.09431.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.utils.flop_counter import register_flop_formula

from meshwright.models.attention import repeat_heads

SEQUENCE = 2
"""Of (B, N, S, H), the dimension that is cut."""


aten = torch.ops.aten


Kernel = Callable[..., tuple[Tensor, ...]]


def is_available(device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether this process has a kernel for it: on GPUs flash attention, which not all
    have."""
    if device_type != "cuda":
        return True
    like_q = torch.empty(1, 1, 128, head_dim, dtype=dtype, device=device_type, requires_grad=True)
    params = torch.backends.cuda.SDPAParams(like_q, like_q, like_q, None, 0.0, True, False)
    # other widths it takes only padded, as torch's public attention does before it calls it
    return head_dim % 8 == 0 and torch.backends.cuda.can_use_flash_attention(params)


def kernels(q: Tensor) -> tuple[Kernel, Kernel]:
    """Flash attention on the device of `q`, and its gradients, as torch's ring calls them: the
    first gives outputs and the logarithms of the sums of exponential scores."""
    if q.is_cuda:
        return aten._scaled_dot_product_flash_attention, _flash_attention_backward
    return aten._scaled_dot_product_flash_attention_for_cpu, _flash_attention_for_cpu_backward


# Their operators by positions: the compiler takes an argument called `out` for a place to write to.
def _flash_attention_backward(
    *,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    tensors = grad_out, query, key, value, out, logsumexp
    lengths = None, None, query.shape[SEQUENCE], key.shape[SEQUENCE]
    # for dropout; without it nothing looks (flash_api.cpp, mha_bwd)
    unused = torch.zeros(2, dtype=torch.int64, device=query.device)
    return aten._scaled_dot_product_flash_attention_backward(
        *tensors, *lengths, 0.0, is_causal, unused, unused, scale=scale
    )


def _flash_attention_for_cpu_backward(
    *,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    tensors = grad_out, query, key, value, out, logsumexp
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors, 0.0, is_causal, scale=scale
    )


def efficient_kernels() -> tuple[Kernel, Kernel]:
    """As `kernels`, on a GPU, of memory-efficient attention: also in fp32, and before Ampere."""
    return _efficient_attention, _efficient_attention_backward


LSE_ALIGNMENT = 32
"""Memory-efficient attention pads its logarithms to a multiple of this, and wants them so."""


def _efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])  # it has no grouped heads
    out, logsumexp, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, is_causal, scale=scale
    )
    return out, logsumexp[..., : q.shape[SEQUENCE]]


def _efficient_attention_backward(
    *,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    n_heads, n_kv_heads = query.shape[1], key.shape[1]
    padding = -logsumexp.shape[-1] % LSE_ALIGNMENT
    unused = torch.zeros((), dtype=torch.int64, device=query.device)  # for dropout
    grad_q, grad_k, grad_v, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_out.contiguous(),  # of a sum all strides are 0
        query,
        repeat_heads(key, n_heads),
        repeat_heads(value, n_heads),
        None,
        out,
        F.pad(logsumexp, (0, padding), value=torch.inf),  # exp(score - inf) is 0
        unused,
        unused,
        0.0,
        [True, True, True, False],
        is_causal,
        scale=scale,
    )
    grad_k, grad_v = (x.unflatten(1, (n_kv_heads, -1)).sum(2) for x in (grad_k, grad_v))
    return grad_q, grad_k, grad_v


# An operator, so that the compiler leaves its insides alone, and so that activation checkpointing
# by op can keep its output: to compute it again would send keys and values around once more.
@torch.library.custom_op("meshwright::ring_attention", mutates_args=())
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group_name: str, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Causal attention of this rank's queries to the keys of all ranks of a group. Collective.

    Args:
        q: (B, N, S/cp, H), at `local_positions`.
        k: (B, K, S/cp, H), at the same; K divides N.
        v: as `k`.
        group_name: of the cp axis.
        scale: of products of queries with keys; None: H^-1/2.

    Returns:
        (B, N, S/cp, H), and the logarithm of the sum of the exponential scores, (B, N, S/cp) fp32.
    """
    out, logsumexp, *_ = torch_ring()._templated_ring_attention(
        _group(group_name), SEQUENCE, kernels(q)[0], q, k, v, is_causal=True, scale=scale
    )
    return out.contiguous(), logsumexp.contiguous()


@ring_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, group_name: str, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("meshwright::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    group_name: str,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `q`, `k` and `v`, in their shapes; arguments as
    `ring_attention`'s."""
    gradients = torch_ring()._templated_ring_attention_backward(
        _group(group_name),
        SEQUENCE,
        kernels(q)[1],
        grad,
        "grad_out",
        q,
        k,
        v,
        out,
        logsumexp,
        is_causal=True,
        scale=scale,
    )
    grad_q, grad_k, grad_v = gradients[:3]
    return grad_q.contiguous(), grad_k.clone(), grad_v.clone()  # those two share memory


@ring_attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    group_name: str,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(
    ctx: Any,
    inputs: tuple[Tensor, Tensor, Tensor, str, float | None],
    output: tuple[Tensor, Tensor],
) -> None:
    q, k, v, ctx.group_name, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(
    ctx: Any, grad: Tensor, _: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, None, None]:
    q, k, v, out, logsumexp = ctx.saved_tensors
    gradients = ring_attention_backward(grad, q, k, v, out, logsumexp, ctx.group_name, ctx.scale)
    return *gradients, None, None


# Without these the compiler takes the operators for free, and computes them again to save memory.
@register_flop_formula(torch.ops.meshwright.ring_attention)
def _flops(
    q: torch.Size, k: torch.Size, v: torch.Size, group_name: str, *_: object, **__: object
) -> int:
    """Shapes -> FLOPs, as torch counts attention: without regard to masks."""
    return 2 * 2 * q.numel() * k[SEQUENCE] * _group(group_name).size()  # two products


@register_flop_formula(torch.ops.meshwright.ring_attention_backward)
def _backward_flops(
    grad: torch.Size,
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    out: torch.Size,
    logsumexp: torch.Size,
    group_name: str,
    *_: object,
    **__: object,
) -> int:
    return 5 * 2 * q.numel() * k[SEQUENCE] * _group(group_name).size()  # five products


ring_attention.register_autograd(_backward, setup_context=_save)


def torch_ring() -> Any:
    """torch's ring without its public face, context_parallel(), which makes DTensors of q, k and v,
    for whose dispatch the kernel of CPUs has no rule (2.13).

    It has chunks where `local_positions` has them. Should it move, `context_parallel_attention =
    "gather"` does not need it.
    """
    # here, since few jobs need it
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention


def _group(name: str) -> ProcessGroup:
    """Return the group of this name, and set torch's options for its ring: others may have changed
    them. One part after the other goes around, of chunks that are dealt out evenly."""
    ring = torch_ring()
    ring._cp_options.rotate_method = ring._RotateMethod.ALL_TO_ALL
    ring._cp_options.enable_load_balance = True
    ring._cp_options.convert_to_f32 = True
    return _resolve_process_group(GroupName(name))
