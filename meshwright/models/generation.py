"""Text from a model: one sequence, its keys and values kept, on one device."""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.models.attention import CausalAttention, Mask, masked_attention
from meshwright.models.decoder import Decoder
from meshwright.models.delta import DeltaSpec
from meshwright.models.delta_net import convolve, split_heads
from meshwright.models.delta_rule import gated_delta_rule

WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels of attention but cuDNN's, which plans anew for each length of the keys: every token."""

Choose = Callable[[Tensor], int]
"""(V,) fp32 logits of the next token -> a token."""


class NoCoreError(ValueError):
    """A layer of the user's mixes tokens without keys and values."""


class NotFiniteError(ValueError):
    """Logits are infinite, or not numbers: there is no next token."""


class CachedAttention(nn.Module):
    """Attention of new positions to themselves and to those before, whose keys and values it keeps:
    with a window only the last ones, in a ring.

    It replaces `CausalAttention`, and keeps its contract.
    """

    def __init__(self, max_len: int) -> None:
        super().__init__()
        self._max_len, self._len, self._attend = max_len, 0, CausalAttention()
        self._keys = self._values = torch.empty(0)  # made when it is known how wide they are

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None = None,
        sinks: Tensor | None = None,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """As `CausalAttention`: all positions at first, then one by one."""
        assert mask is None
        assert self._len == 0 or q.shape[2] == 1  # else it would take an offset causal mask
        if self._len == 0:
            batch, heads, _, width = k.shape
            most = min(window or self._max_len, self._max_len)
            self._keys, self._values = k.new_empty(2, batch, heads, most, width)
        is_first, size = self._len == 0, self._keys.shape[2]
        first, self._len = self._len, self._len + k.shape[2]
        kept = torch.arange(max(first, self._len - size), self._len, device=k.device)
        self._keys[:, :, kept % size] = k[:, :, kept - first]
        self._values[:, :, kept % size] = v[:, :, kept - first]
        if is_first:
            options = {"scale": scale, "window": window, "soft_cap": soft_cap}
            return self._attend(q, k, v, None, sinks, **options)
        # keys are rotated already, so their order doesn't matter
        keys, values = self._keys[:, :, : self._len], self._values[:, :, : self._len]
        return masked_attention(q, keys, values, None, sinks, scale=scale, soft_cap=soft_cap)


class CachedLatents(nn.Module):
    """Keeps the latents and rotated keys of positions, and returns them from the first one on.

    It replaces the `seen` of `LatentAttention`.
    """

    def __init__(self, max_len: int) -> None:
        super().__init__()
        self._max_len, self._len, self._kept = max_len, 0, torch.empty(0)

    def forward(self, new: Tensor) -> Tensor:
        """(B, new positions, W) -> (B, all positions, W)."""
        first, self._len = self._len, self._len + new.shape[1]
        if first == 0:
            self._kept = new.new_empty(len(new), self._max_len, new.shape[2])
        self._kept[:, first : self._len] = new
        return self._kept[:, : self._len]


class CachedOwnAttention(nn.Module):
    """A core of the user's, which gets the keys and values of all positions up to the last.

    It replaces the `core` of attention whose spec has `has_own_core`.
    """

    def __init__(self, core: nn.Module, max_len: int) -> None:
        super().__init__()
        self._core = core
        self._keys, self._values = CachedLatents(max_len), CachedLatents(max_len)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **named: Any) -> Tensor:
        """(B, N, new, H), (B, K, new, H) twice, (B, 1, new, positions) -> (B, N, new, H)."""
        k, v = (
            kept(new.transpose(1, 2).flatten(2)).unflatten(2, (new.shape[1], -1)).transpose(1, 2)
            for kept, new in ((self._keys, k), (self._values, v))
        )
        out: Tensor = self._core(q, k, v, mask[..., : k.shape[2]], **named)
        return out


class CachedDelta(nn.Module):
    """Keeps the state of linear attention, and the rows that its convolution sees again.

    It replaces `DeltaCore`, and keeps its contract.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rows, self._state = torch.empty(0), torch.empty(0)

    def forward(
        self,
        rows: Tensor,
        taps: Tensor,
        decay: Tensor,
        strength: Tensor,
        documents: Tensor | None,
        *,
        value_dim: int,
        key_dim: int,
    ) -> Tensor:
        """As `DeltaCore`, after the positions of the calls before."""
        assert documents is None
        behind, is_first = taps.shape[1] - 1, not self._state.numel()
        before = rows.new_zeros(len(rows), behind, rows.shape[-1]) if is_first else self._rows
        rows = torch.cat([before, rows], 1)
        self._rows = rows[:, rows.shape[1] - behind :]
        heads = split_heads(convolve(rows, taps, None), decay.shape[-1], key_dim, value_dim)
        state = None if is_first else self._state
        out, self._state = gated_delta_rule(*heads, decay, strength, state=state)
        return out


class LastAttention(nn.Module):
    """Attention of all positions, or of the last one to all. It replaces `CausalAttention`, and
    keeps its contract."""

    def __init__(self) -> None:
        super().__init__()
        self._attend = CausalAttention()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None = None,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """(B, N, 1 or S, H), (B, K, S, H) twice -> (B, N, 1 or S, H)."""
        assert mask is None
        assert window is None
        if q.shape[2] == k.shape[2]:
            return self._attend(q, k, v, scale=scale, soft_cap=soft_cap)
        return masked_attention(q, k, v, None, scale=scale, soft_cap=soft_cap)


@contextmanager
def _cached(model: Decoder, max_len: int) -> Iterator[None]:
    """Within, `model` continues where its last call ended."""
    before = list[tuple[nn.Module, str, nn.Module]]()
    for number, block in model.layers.items():
        attention, spec = (
            block.get_submodule("attention"),
            model.table.layers[int(number)].attention,
        )
        if "core" not in spec.bare_modules:
            raise NoCoreError(f"layers.{number} has no `core` that could keep earlier tokens")
        caches: dict[str, nn.Module] = {"core": CachedAttention(max_len)}
        if "seen" in spec.bare_modules:
            caches = {"seen": CachedLatents(max_len), "core": LastAttention()}
        if isinstance(spec, DeltaSpec):
            caches = {"core": CachedDelta()}
        if spec.has_own_core:
            caches["core"] = CachedOwnAttention(attention.get_submodule("core"), max_len)
        for name, cache in caches.items():
            before.append((attention, name, getattr(attention, name)))
            setattr(attention, name, cache)
    model.makes_masks = False
    try:
        yield
    finally:
        model.makes_masks = True
        for attention, name, module in before:
            setattr(attention, name, module)


@contextmanager
def _eager() -> Iterator[None]:
    """Within, blocks run as if they weren't compiled: each number of tokens would be compiled, and
    the ninth would be an error."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes 0.8 s
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    choose: Choose,
    stop: Collection[int] = (),
) -> Iterator[int]:
    """Yield the tokens that follow `prompt`, one by one, up to and with the first of `stop`.

    Memory for keys and values: 2 * layers * K * H * (prompt + new tokens) elements; layers with a
    window have at most that many tokens. Of latent attention the latents are kept, layers *
    (kv_lora_rank + qk_rope_head_dim) * tokens elements, and keys and values computed anew. Linear
    attention keeps its state, layers * H * K * V elements in fp32, however many tokens there are.

    Args:
        model: whole, on one device, made for sequences as long as prompt and new tokens together.
        prompt: at least one token.

    Raises:
        NotFiniteError: if the model gives no probabilities.
    """

    def logits_of(tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        with sdpa_kernel(WITHOUT_PLANS), _eager():  # not around `yield`, where callers compute
            return model(tokens, positions=positions)

    device = next(model.parameters()).device
    tokens = torch.tensor([prompt], device=device)
    with _cached(model, len(prompt) + max_new_tokens):
        if len(prompt) > 1:  # without logits, which would be (S, V) for nothing
            output, model.output = model.output, None
            try:
                logits_of(tokens[:, :-1])
            finally:  # Ctrl-C in a notebook, too
                model.output = output
        for position in range(len(prompt) - 1, len(prompt) - 1 + max_new_tokens):
            here = torch.tensor([position], device=device)
            logits = logits_of(tokens[:, -1:], here)  # (1, 1, V)
            if not logits.isfinite().all():
                raise NotFiniteError(f"logits after {position + 1} tokens are not finite")
            token = choose(logits[0, -1].float())
            yield token
            if token in stop:
                return
            tokens = torch.tensor([[token]], device=device)


def greedy(logits: Tensor) -> int:
    """Return the most likely token."""
    return int(logits.argmax())


def sampler(temperature: float, top_p: float, seed: int) -> Choose:
    """Draws from softmax(logits / temperature), among the most likely tokens that together have a
    probability of `top_p` or more.

    Source: Holtzman et al. 2020, arXiv:1904.09751, section 3.1 (nucleus sampling). It draws on the
    CPU, so that a seed means the same tokens on any device that gives the same logits.
    """
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> int:
        # the largest becomes 0, so that a temperature near 0 makes no infinity of it; in float64,
        # which has no temperature above 0 that is 0
        wide = logits.cpu().double()
        scaled = ((wide - wide.max()) / temperature).float()
        chance, order = scaled.softmax(-1).sort(descending=True)
        before = chance.cumsum(-1) - chance  # of all likelier tokens; so the first always stays
        chance[before >= top_p] = 0.0
        return int(order[torch.multinomial(chance, 1, generator=generator)])

    return choose
