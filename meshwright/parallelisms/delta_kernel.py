"""Linear attention on GPUs by the kernel of fla (flash-linear-attention), where it is installed."""

import importlib
import re
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from meshwright.config.job_config import JobConfig
from meshwright.models.decoder import Decoder
from meshwright.models.delta import DeltaSpec
from meshwright.models.delta_net import convolve_all, split_heads
from meshwright.models.delta_rule import CHUNK
from meshwright.models.table import DecoderSpec

Rule = Callable[..., tuple[Tensor, Tensor | None]]

WIDEST = 256
"""Of a head's queries and keys (fla 0.6, `chunk_gated_delta_rule_fwd_h`)."""

OLDEST = (0, 5)
"""The version of fla from which several heads of values may share one of queries and keys."""


def apply_delta_kernel(model: Decoder, device_type: str, config: JobConfig) -> str:
    """Give the linear attention of every block of `model` the kernel, in place, if it can take it.
    Return a line for the log; "" on CPUs, and for models without such layers."""
    reason = why_chunks(model.table, device_type, config)
    if reason is None:
        return ""
    if reason:
        return f"linear attention: in chunks by PyTorch, since {reason}"
    for name, layer in model.layers.items():
        if isinstance(model.table.layers[int(name)].attention, DeltaSpec):
            core = layer.get_submodule("attention.core")
            core.forward = recur  # one for all blocks, so that they share a graph
    return f"linear attention: {version()}"


def why_chunks(table: DecoderSpec, device_type: str | None, config: JobConfig) -> str | None:
    """Return why linear attention runs in PyTorch's chunks; "" if it takes the kernel; None on
    CPUs, and for models without such layers."""
    specs = [layer.attention for layer in table.layers]
    widths = [spec.key_dim for spec in specs if isinstance(spec, DeltaSpec)]
    if device_type != "cuda" or not widths:
        return None
    return why_not(config, max(widths))


def version() -> str:
    """Return the version of fla."""
    return f"fla {getattr(importlib.import_module('fla'), '__version__', '0.0')}"


def why_not(config: JobConfig, key_dim: int) -> str:
    """Return why a job doesn't take the kernel; "" if it does.

    The kernel adds up without atomics, but in tiles that each process chooses by timing them: bits
    of equal runs, and of equal ranks, may differ. It has context parallelism for ranks with one
    chunk each, not with two as here, and gives no map of a chunk.
    """
    training = config.training
    if config.parallelism.context_parallel_degree > 1:
        return "fla's kernel gives no map of a rank's two chunks to context parallelism"
    if training.deterministic:
        return "training.deterministic is on, and fla chooses its tiles by timing them"
    if config.sentry.interval > 0:
        return "sentry.interval compares bits, and fla chooses its tiles by timing them"
    if training.mixed_precision_param != "bfloat16":
        return f"fla's kernel would round {training.mixed_precision_param}"
    if key_dim > WIDEST:
        return f"fla's kernel has keys of at most {WIDEST} numbers, not {key_dim}"
    return why_missing()


def why_missing() -> str:
    """Return why this process cannot have fla's kernel; "" if it can."""
    try:
        _rule_of_fla()
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed (pip install fla-core)"
    # of a triton that doesn't fit, too
    except (ImportError, RuntimeError, ValueError, AttributeError, OSError) as error:
        return f"fla cannot be imported: {error}"
    if tuple(map(int, re.findall(r"\d+", version())[:2])) < OLDEST:  # of "0.6rc1" as well
        return f"{version()} is older than {'.'.join(map(str, OLDEST))}"
    return ""


def _rule_of_fla() -> Rule:
    return cast(Rule, importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule)


def recur(
    rows: Tensor,
    taps: Tensor,
    decay: Tensor,
    strength: Tensor,
    documents: Tensor | None,
    *,
    value_dim: int,
    key_dim: int,
) -> Tensor:
    """(B, S, W) -> (B, S, H, V) fp32, as `DeltaCore`; the kernel computes in the type of `rows`."""
    mixed = convolve_all(rows, taps, documents).to(rows.dtype)
    heads = (x.contiguous() for x in split_heads(mixed, decay.shape[-1], key_dim, value_dim))
    out: Tensor = delta_rule(*heads, decay, strength, documents)
    return out.float()


def _compute(inputs: tuple[Tensor, ...], documents: Tensor | None) -> Tensor:
    """Call fla's public function, which normalizes queries and keys, and scales by K^-0.5.

    With documents all tokens are one row, and their starts are known on the host first: a wait.
    """
    rule, v = _rule_of_fla(), inputs[2]
    starts = None
    if documents is not None:
        is_first = torch.ones_like(documents, dtype=torch.bool)  # of a sequence, or of a document
        is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
        places = is_first.flatten().nonzero().flatten()
        starts = torch.cat([places, places.new_tensor([documents.numel()])])
        inputs = tuple(x.flatten(0, 1).unsqueeze(0) for x in inputs)
    q, k, values, decay, strength = inputs
    out, _ = rule(
        q, k, values, g=decay, beta=strength, use_qk_l2norm_in_kernel=True, cu_seqlens=starts
    )
    return out.reshape(v.shape)


# operators: the compiler must not look into the kernel, and blocks are compiled as one graph
@torch.library.custom_op("meshwright::fla_delta_rule", mutates_args=())
def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor, documents: Tensor | None
) -> Tensor:
    """Return what tokens read, (B, S, H, V) in the type of `v`. Arguments as of
    `split_in_chunks`."""
    with torch.no_grad():
        return _compute((q, k, v, decay, strength), documents)


@delta_rule.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor, documents: Tensor | None
) -> Tensor:
    return v.new_empty(v.shape)


Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("meshwright::fla_delta_rule_backward", mutates_args=())
def delta_rule_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    strength: Tensor,
    documents: Tensor | None,
) -> Gradients:
    """Return the gradients of the first five inputs. It computes forward again: fla's public
    function keeps what backward needs in torch's graph alone, and other names change with its
    versions."""
    # torch excludes autograd inside of an operator. The guard is private: without it the first
    # backward raises AttributeError. Autocast stays excluded: it would round fp32
    key, include = torch._C.DispatchKey.AutogradFunctionality, torch._C._SetExcludeDispatchKeyGuard
    with include(key, False), torch.enable_grad():
        leaves = tuple(x.detach().requires_grad_() for x in (q, k, v, decay, strength))
        found = torch.autograd.grad(_compute(leaves, documents), leaves, grad)
    return cast(Gradients, tuple(x.contiguous() for x in found))


@delta_rule_backward.register_fake
def _(grad: Tensor, *inputs: Tensor) -> Gradients:
    return cast(Gradients, tuple(x.new_empty(x.shape) for x in inputs[:5]))


def _save(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*delta_rule_backward(grad.contiguous(), *ctx.saved_tensors), None)


delta_rule.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.meshwright.fla_delta_rule)
def _flops(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *_: Any, **__: Any) -> int:
    """In chunks: scores of keys with keys and queries, the system, and three uses of the state."""
    tokens, key_dim, value_dim = v[0] * v[1] * v[2], k[-1], v[-1]
    return 2 * tokens * (CHUNK * (3 * key_dim + 2 * value_dim) + 3 * key_dim * value_dim)


@register_flop_formula(torch.ops.meshwright.fla_delta_rule_backward)
def _flops_backward(grad: tuple[int, ...], *inputs: Any, **__: Any) -> int:
    return 3 * _flops(*inputs[:3])
