"""The gated delta rule as its recurrence, token by token, from matrix products."""

import torch
from torch import Tensor


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    strength: Tensor,
    documents: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results of `gated_delta_rule`, in the type of `q`."""
    shared = v.shape[2] // q.shape[2]
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(shared, 2).unsqueeze(-2) for x in (q / q.shape[-1] ** 0.5, k))
    if state is None:  # differentiable, so that each of its products has two in backward
        shape = len(v), v.shape[2], q.shape[-1], v.shape[-1]
        state = torch.zeros(shape, dtype=q.dtype, requires_grad=True)
    outputs = []
    # the gradient of each x[:, token] would be as large as that of x
    tokens = (x.unbind(1) for x in (q, k, v.unsqueeze(-2), decay, strength[..., None, None]))
    for token, (query, key, value, rate, share) in enumerate(zip(*tokens, strict=True)):
        kept = rate.exp()
        if documents is not None and token:
            kept = kept * (documents[:, token] == documents[:, token - 1]).unsqueeze(1)
        state = state * kept[..., None, None]
        state = state + key.mT @ ((value - key @ state) * share)
        outputs.append((query @ state).squeeze(-2))
    return torch.stack(outputs, 1), state
