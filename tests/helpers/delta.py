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
    for token in range(v.shape[1]):
        kept = decay[:, token].exp()
        if documents is not None and token:
            kept = kept * (documents[:, token] == documents[:, token - 1]).unsqueeze(1)
        state = state * kept[..., None, None]
        error = v[:, token].unsqueeze(-2) - k[:, token] @ state
        state = state + k[:, token].mT @ (error * strength[:, token, :, None, None])
        outputs.append((q[:, token] @ state).squeeze(-2))
    return torch.stack(outputs, 1), state
