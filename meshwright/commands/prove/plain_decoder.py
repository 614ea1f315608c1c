"""A decoder of the shipped families in plain PyTorch and fp64, written from the config only.

`prove` compares its one-process reference with it (`reference.py`). Because the two must not share
a mistake, this file imports nothing of `meshwright.models` or of the trainer: formulas come from
the papers, and from the configuration reference where a key defines one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.config.training import Experts

Args = Mapping[str, Any]
"""Dimensions of a model, as `model.args` has them."""

Weights = Mapping[str, Tensor]

UNCOUNTED = -1

LATENT_EPS = 1e-6
"""Of the norms of latents, in DeepSeek's published code."""

FLA_NORM_EPS = 1e-5
"""Of the norm of a head's result in the code that OLMo Hybrid is published with."""

L2_EPS = 1e-6
"""Of the lengths of queries and keys of the gated delta rule, in FLA's published code."""


@dataclass(frozen=True)
class Form:
    """The differences between the families' blocks."""

    qk_norm: Literal["head", "all"] | None = None
    """RMS norm of queries and keys: of each head, or over all heads of a token."""
    norm: Literal["pre", "post", "sandwich"] = "pre"
    """Norms are of the inputs of attention and feed-forward, of their results, or of both."""
    biases: str = ""
    """Of q, k, v and o, the projections that have biases."""
    is_gemma: bool = False
    """Norms multiply by 1 + w, the gate has GELU by tanh, and embeddings are times sqrt(D)."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """From a router's logits to scores of experts."""
    n_best: int = 2
    """Scores of a group of experts that add up to the group's."""
    divides_logits: bool = False
    """By `logits_scaling`, instead of multiplying by it."""
    is_gpt_oss: bool = False
    """Heads have sinks, windows are stretched, too, and experts have biases and a clamp."""
    is_qwen3_next: bool = False
    """Norms multiply by 1 + w, attention is gated, and most layers have a recurrence instead."""
    is_olmo_hybrid: bool = False
    """Most layers have a recurrence instead, and norms before attention and feed-forward; others
    know no positions, unless they rotate."""


FORMS = {
    "llama": Form(),  # arXiv:2307.09288
    "mixtral": Form(),  # arXiv:2401.04088
    "qwen3": Form(qk_norm="head"),  # arXiv:2505.09388
    "qwen3_moe": Form(qk_norm="head"),
    "olmo2": Form(qk_norm="all", norm="post"),  # arXiv:2501.00656
    "olmo3": Form(qk_norm="all", norm="post"),
    "olmoe": Form(qk_norm="all"),  # arXiv:2409.02060
    "gemma2": Form(norm="sandwich", is_gemma=True),  # arXiv:2408.00118
    "gemma3_text": Form(qk_norm="head", norm="sandwich", is_gemma=True),  # arXiv:2503.19786
    "smollm3": Form(),
    "qwen2": Form(biases="qkv"),  # arXiv:2407.10671
    "mistral": Form(),  # arXiv:2310.06825
    "granite": Form(divides_logits=True),
    "hyperclovax": Form(norm="sandwich"),  # arXiv:2506.22403
    "deepseek_v2": Form(n_best=1),  # arXiv:2405.04434
    "deepseek_v3": Form(scores="sigmoid"),  # arXiv:2412.19437
    "qwen3_next": Form(qk_norm="head", is_qwen3_next=True),  # arXiv:2412.06464, 2505.06708
    "qwen3_5_text": Form(qk_norm="head", is_qwen3_next=True),
    "olmo_hybrid": Form(qk_norm="all", norm="post", is_olmo_hybrid=True),
    "gpt_oss": Form(biases="qkvo", is_gpt_oss=True),  # arXiv:2508.10925
}
"""By `model.name`."""


def shapes(name: str, args: Args) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight, by its name; `name` is a key in `FORMS`."""
    dim = args["dim"]
    softmax = _latent_shapes(args) if has_latents(args) else _attention_shapes(name, args)
    biases = {f"w{which}.bias": softmax[f"w{which}"][:1] for which in FORMS[name].biases}
    if FORMS[name].is_gpt_oss:
        biases["sinks.weight"] = (args["n_heads"],)
    norms = [f"{norm}_norm" for norm in ("attention", "ffn")]
    if FORMS[name].norm == "sandwich":
        norms += [f"post_{norm}" for norm in norms]
    found: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (args["vocab_size"], dim)}
    if not args["tie_embeddings"]:
        found["output.weight"] = args["vocab_size"], dim
    for layer in range(args["n_layers"] + args["mtp_depth"]):
        part, inner = f"layers.{layer}", args["hidden_dim"]
        attention = softmax
        if is_recurrent(args, min(layer, args["n_layers"] - 1)):  # further ones are as the last
            attention = _recurrent_shapes(args)
        found |= {f"{part}.{norm}.weight": (dim,) for norm in norms}
        if layer >= args["n_layers"]:
            found |= {f"{part}.{norm}.weight": (dim,) for norm in ("enorm", "hnorm", "head_norm")}
            found[f"{part}.eh_proj.weight"] = dim, 2 * dim
        found |= {f"{part}.attention.{which}": shape for which, shape in biases.items()}
        found |= {f"{part}.attention.{which}.weight": shape for which, shape in attention.items()}
        prefix, suffix = f"{part}.feed_forward.", ".weight"
        experts: tuple[int, ...] = ()
        if "n_experts" in args and layer >= args.get("n_dense_layers", 0):
            experts, inner = (args["n_experts"],), args.get("expert_dim", inner)
            found[f"{prefix}router.weight"] = args["n_experts"], dim
            prefix, suffix = f"{prefix}experts.", ""
        if FORMS[name].is_gpt_oss:
            found[f"{part}.feed_forward.router.bias"] = experts
            of_biases: dict[str, tuple[int, ...]] = {"b1": (inner,), "b2": (dim,), "b3": (inner,)}
            found |= {f"{prefix}{b}": (*experts, *shape) for b, shape in of_biases.items()}
        found |= {f"{prefix}{w}{suffix}": (*experts, *s) for w, s in _swiglu_shapes(dim, inner)}
        if width := _shared_width(args) if experts else 0:
            shared = _swiglu_shapes(dim, width)
            found |= {f"{part}.feed_forward.shared.{w}.weight": shape for w, shape in shared}
        if experts and FORMS[name].is_qwen3_next:
            found[f"{part}.feed_forward.shared_gate.weight"] = 1, dim
    return found | {"norm.weight": (dim,)}


def _shared_width(args: Args) -> int:
    """Return the FFN hidden size of the shared expert; 0: there is none."""
    width: int = args.get("n_shared_experts", 0) * args.get("expert_dim", 0)
    return args.get("shared_expert_dim", width)


def _swiglu_shapes(dim: int, inner: int) -> list[tuple[str, tuple[int, int]]]:
    return [("w1", (inner, dim)), ("w2", (dim, inner)), ("w3", (inner, dim))]


def _attention_shapes(name: str, args: Args) -> dict[str, tuple[int, ...]]:
    dim, width, qk_norm = args["dim"], head_width(args), FORMS[name].qk_norm
    query, kv = args["n_heads"] * width, args["n_kv_heads"] * width
    found: dict[str, tuple[int, ...]] = {"wq": (query, dim), "wk": (kv, dim), "wv": (kv, dim)}
    found["wo"] = dim, query
    if FORMS[name].is_qwen3_next:
        found["wg"] = query, dim
    if qk_norm is not None:
        found |= {"q_norm": (width if qk_norm == "head" else query,)}
        found |= {"k_norm": (width if qk_norm == "head" else kv,)}
    return found


def _latent_shapes(args: Args) -> dict[str, tuple[int, ...]]:
    dim, heads, rank, q_rank = (
        args[key] for key in ("dim", "n_heads", "kv_lora_rank", "q_lora_rank")
    )
    plain, rotated, value = (
        args[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    query = heads * (plain + rotated)
    found: dict[str, tuple[int, ...]] = {"wkv_a": (rank + rotated, dim), "kv_norm": (rank,)}
    found |= {"wkv_b": (heads * (plain + value), rank), "wo": (dim, heads * value)}
    if not q_rank:
        return found | {"wq": (query, dim)}
    return found | {"wq_a": (q_rank, dim), "q_norm": (q_rank,), "wq_b": (query, q_rank)}


def widening(args: Args) -> float:
    """Return muP's ratio of the width to the base width (Yang et al. 2022, arXiv:2203.03466)."""
    base = args.get("mup_base_dim")
    return 1.0 if base is None else args["dim"] / base


def is_recurrent(args: Args, layer: int) -> bool:
    """Return whether a layer has the gated delta rule, arXiv:2412.06464, instead of attention."""
    return "linear_num_key_heads" in args and not is_nth(args, layer, "full_every")


def is_nth(args: Args, layer: int, key: str) -> bool:
    """Return whether a layer is one of every so many; those of MTP are as the last one."""
    return min(layer + 1, args["n_layers"]) % args[key] == 0


def _recurrent_shapes(args: Args) -> dict[str, tuple[int, ...]]:
    dim, heads, taps = (
        args[key] for key in ("dim", "linear_num_value_heads", "linear_conv_kernel_dim")
    )
    keys = args["linear_num_key_heads"] * args["linear_key_head_dim"]
    values = heads * args["linear_value_head_dim"]
    of_each = {"q": keys, "k": keys, "v": values}
    inputs = of_each | {"z": values, "b": heads, "a": heads}
    return {
        **{f"in_{letter}": (rows, dim) for letter, rows in inputs.items()},
        **{f"conv_{letter}": (rows, taps) for letter, rows in of_each.items()},
        "a_log": (heads,),
        "dt_bias": (heads,),
        "norm": (args["linear_value_head_dim"],),
        "out": (dim, values),
    }


def has_latents(args: Args) -> bool:
    """Return whether attention is DeepSeek's, arXiv:2405.04434, section 2.1."""
    return "kv_lora_rank" in args


def head_width(args: Args) -> int:
    """Return the width of a head of attention without latents."""
    width: int = args["head_dim"] or args["dim"] // args["n_heads"]
    return width


def rotated_width(args: Args) -> int:
    """Return how many elements of a head are rotated, the first ones: all H, but with latents."""
    width = args.get("qk_rope_head_dim") or head_width(args)
    return int(width * args.get("partial_rotary_factor", 1.0))


def window_of(args: Args, layer: int) -> int | None:
    """Return how many tokens a token sees in a layer, with itself; None: all before."""
    if "full_every" in args and is_nth(args, layer, "full_every"):
        return None
    return args.get("window")


def _scaling(name: str, args: Args, layer: int) -> Mapping[str, Any] | None:
    """Return `rope_scaling`, which only layers without a window have, but in gpt-oss."""
    is_stretched = FORMS[name].is_gpt_oss or window_of(args, layer) is None
    return args.get("rope_scaling") if is_stretched else None


def frequencies(name: str, args: Args, layer: int) -> Tensor:
    """Return the angle between neighboring positions of each pair in a head, (H/2,) fp64.

    Source: Su et al. 2021, arXiv:2104.09864. For `rope_scaling`: Grattafiori et al. 2024,
    arXiv:2407.21783; Peng et al. 2023, arXiv:2309.00071, whose authors' code bounds the pairs; Chen
    et al. 2023, arXiv:2306.15595.
    """
    width, theta = rotated_width(args), args["rope_theta"]
    if window_of(args, layer) is not None:
        theta = args.get("local_theta", theta)
    found: Tensor = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    scaling = _scaling(name, args, layer)
    if scaling is None:
        return found
    stretched, length = found / scaling["factor"], scaling.get("original_seq_len", 0)
    if "low_freq_factor" in scaling:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        wavelength = 2 * math.pi / found
        kept = (length / wavelength - low) / (high - low)
        mixed = kept * found + (1 - kept) * stretched
        is_long, is_short = wavelength > length / low, wavelength < length / high
        return torch.where(is_long, stretched, torch.where(is_short, found, mixed))
    if "beta_fast" in scaling:
        first, last = (  # of the pair: theta^(-2 pair / H) length = 2 pi turns
            math.log(length / (2 * math.pi * scaling[turns]), theta) * width / 2
            for turns in ("beta_fast", "beta_slow")
        )
        if scaling["truncate"]:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        last += 0.001 * (first == last)
        share = (torch.arange(width // 2, dtype=torch.float64) - first) / (last - first)
        return found.lerp(stretched, share.clamp(0, 1))
    return stretched


def amplitude(name: str, args: Args, layer: int) -> float:
    """Return the factor on rotated queries and keys, which YaRN has (section 3.4)."""
    scaling = _scaling(name, args, layer) or {}
    if "attention_factor" not in scaling:
        return 1.0
    given: float | None = scaling["attention_factor"]
    if given is not None:
        return given
    if scaling["mscale"] and scaling["mscale_all_dim"]:
        return _growth(scaling, scaling["mscale"]) / _growth(scaling, scaling["mscale_all_dim"])
    return _growth(scaling, 1.0)


def _growth(scaling: Mapping[str, Any], mscale: float) -> float:
    """Return YaRN's factor with a weight on its logarithm, as DeepSeek's code has it."""
    return 0.1 * mscale * math.log(max(scaling["factor"], 1)) + 1


def angles(name: str, args: Args, positions: Tensor, layer: int) -> Tensor:
    """Return the angle of each position, (..., S) -> (..., S, H/2) fp64."""
    return positions.unsqueeze(-1) * frequencies(name, args, layer)


@dataclass(frozen=True)
class PlainBatch:
    """A global batch, (B, S) each."""

    tokens: Tensor
    labels: Tensor
    """The next token; `UNCOUNTED` where it isn't to be learned."""
    is_token: Tensor
    """Bool; false: padding."""
    documents: Tensor
    """Number of the document in the sequence; all 0 unless they are masked."""
    loss_weights: Tensor | None = None
    """(B,) fp64, of the losses of each sequence; None: all are 1."""
    further: Sequence["PlainBatch"] = ()
    """At depth i, counted from 1, the same of the tokens that are i places further, in the place of
    their predecessors."""


@dataclass
class Router:
    """A layer's router: its state before a step, and the results of `Plain.losses`."""

    load: Tensor
    """(E,) tokens of each expert in the step before."""
    bias: Tensor
    """(E,) added to scores for the choice only."""
    chosen: Tensor
    """(B, S, K) experts to take."""
    counts: Tensor = field(init=False)
    """(E,) tokens of each expert in this step, without padding."""
    gap: float = field(init=False)
    """By how much, at most, the scores of `chosen` are below the highest ones."""
    losses: Sequence[Tensor] = field(init=False)
    """Its balance loss by `load`, the one by loads of each sequence, and its z-loss: sums over
    tokens, without their weights."""


class Plain:
    """A decoder with its losses, as a function of its weights.

    Args:
        name: key in `FORMS`.
        stretch: (S,) factors on rotated queries and keys, by position.
    """

    def __init__(self, name: str, args: Args, stretch: Tensor) -> None:
        self._name, self._form, self._args = name, FORMS[name], args
        self._stretch = stretch.double()
        self.largest_logits: list[Tensor] = []
        """(N,) of each head that attends, by layer, of the last call of `losses`."""

    def losses(
        self, weights: Weights, batch: PlainBatch, routers: Mapping[int, Router], options: Experts
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return the mean loss of the labels that count, the same of each depth of further tokens,
        and the sum of the routers' own losses.

        Source of the further tokens: DeepSeek-AI 2024, arXiv:2412.19437, equations 21 to 24; as in
        the published weights, the embedding comes first, and each depth has its own last norm.

        Args:
            weights: fp64, by name.
            routers: by number of the layer; each gets its results.
        """
        args, documents = self._args, batch.documents
        sees = (documents.unsqueeze(2) == documents.unsqueeze(1)).tril()  # (B, queries, keys)
        positions = sees.sum(-1) - 1  # in the document
        distance = positions.unsqueeze(2) - positions.unsqueeze(1)

        def pass_through(x: Tensor, part: Weights, number: int, is_token: Tensor) -> Tensor:
            layer = min(number, args["n_layers"] - 1)  # further ones are as the last
            turned, window = angles(self._name, args, positions, layer), window_of(args, layer)
            length = self._stretch[positions].unsqueeze(-1) * amplitude(self._name, args, layer)
            rotation: Tensor | None = torch.polar(length.expand_as(turned), turned)
            if "no_rope_every" in args and is_nth(args, layer, "no_rope_every"):
                rotation = None
            near = sees if window is None else sees & (distance < window)
            if is_recurrent(args, layer):
                near, rotation = sees, None
            if self._form.is_olmo_hybrid and not args["rotates"]:
                rotation = None
            return self._block(x, part, rotation, near, routers.get(number), is_token)

        self.largest_logits.clear()
        x, further = self._embedded(weights, batch.tokens), list[Tensor]()
        for layer in range(args["n_layers"]):
            x = pass_through(x, _part(weights, layer), layer, batch.is_token)
        x = self._norm(x, weights["norm.weight"])
        loss = self._loss(x, weights, batch)
        for number, ahead in enumerate(batch.further, args["n_layers"]):
            part = _part(weights, number)
            vectors = self._norm(self._embedded(weights, ahead.tokens), part["enorm.weight"])
            x = torch.cat([vectors, self._norm(x, part["hnorm.weight"])], -1)
            x = pass_through(x @ part["eh_proj.weight"].T, part, number, ahead.is_token)
            x = self._norm(x, part["head_norm.weight"])
            further.append(self._loss(x, weights, ahead))
        scales = options.balance_loss, options.sequence_balance_loss, options.router_z_loss
        own = torch.zeros((), dtype=torch.float64)
        for router in routers.values():
            own = own + sum(a * b for a, b in zip(scales, router.losses, strict=True))
        return loss, further, own / batch.tokens.numel()

    def _embedded(self, weights: Weights, tokens: Tensor) -> Tensor:
        args = self._args
        x = weights["tok_embeddings.weight"][tokens] * args.get("embedding_multiplier", 1.0)
        return x * math.sqrt(args["dim"]) if self._form.is_gemma else x

    def _loss(self, x: Tensor, weights: Weights, batch: PlainBatch) -> Tensor:
        args = self._args
        is_tied, factor = args["tie_embeddings"], args.get("logits_scaling", 1.0)
        logits = x @ weights["tok_embeddings.weight" if is_tied else "output.weight"].T
        logits = logits / factor if self._form.divides_logits else logits * factor
        logits = _capped(logits / widening(args), args.get("output_cap"))
        losses = F.cross_entropy(logits.mT, batch.labels, ignore_index=UNCOUNTED, reduction="none")
        factors = (batch.labels != UNCOUNTED).double()
        if batch.loss_weights is not None:
            factors = factors * batch.loss_weights.unsqueeze(1)
        return (losses * factors).sum() / factors.sum()

    def _block(
        self,
        x: Tensor,
        weights: Weights,
        rotation: Tensor | None,
        sees: Tensor,
        router: Router | None,
        is_token: Tensor,
    ) -> Tensor:
        def feed_forward(y: Tensor) -> Tensor:
            if router is not None:
                return self._mix(y, weights, router, is_token)
            w1, w2, w3 = (weights[f"feed_forward.w{number}.weight"] for number in (1, 2, 3))
            return _geglu(y, w1, w2, w3) if self._form.is_gemma else _swiglu(y, w1, w2, w3)

        def attend(y: Tensor) -> Tensor:
            return self._attend(y, weights, rotation, sees)

        norm = self._form.norm
        if self._form.is_olmo_hybrid and "attention.a_log.weight" in weights:
            norm = "pre"
        before = {"pre": "{}_norm", "sandwich": "{}_norm", "post": ""}[norm]
        after = {"pre": "", "sandwich": "post_{}_norm", "post": "{}_norm"}[norm]
        for name, part in (("attention", attend), ("ffn", feed_forward)):
            y = x
            if before:
                y = self._norm(y, weights[f"{before.format(name)}.weight"])
            y = part(y)
            if after:
                y = self._norm(y, weights[f"{after.format(name)}.weight"])
            x = x + y * self._args.get("residual_multiplier", 1.0)
        return x

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        is_offset = self._form.is_gemma or self._form.is_qwen3_next
        return self._scaled(x, weight + 1 if is_offset else weight)

    def _scaled(self, x: Tensor, factor: Tensor, eps: float | None = None) -> Tensor:
        eps = self._args["norm_eps"] if eps is None else eps
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * factor

    def _attend(self, x: Tensor, weights: Weights, rotation: Tensor | None, sees: Tensor) -> Tensor:
        if "attention.a_log.weight" in weights:
            return self._recur(x, weights, sees)
        if has_latents(self._args):
            assert rotation is not None
            return self._attend_by_latents(x, weights, rotation, sees)

        def heads(which: str) -> Tensor:  # (B, heads, S, H)
            y, norm = x @ weights[f"attention.w{which}.weight"].T, f"attention.{which}_norm.weight"
            if which in self._form.biases:
                y = y + weights[f"attention.w{which}.bias"]
            if norm in weights and self._form.qk_norm == "all":
                y = self._norm(y, weights[norm])
            count = self._args["n_heads" if which == "q" else "n_kv_heads"]
            y = y.unflatten(-1, (count, -1))
            if norm in weights and self._form.qk_norm == "head":
                y = self._norm(y, weights[norm])
            if which != "v" and rotation is not None:
                y = _turned(y, rotation)
            return y.transpose(1, 2)

        q, k, v = map(heads, "qkv")
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        power = -0.5 if self._args.get("mup_base_dim") is None else -1.0
        scale = self._args.get("query_scale", q.shape[-1]) ** power
        scores = q @ k.mT * self._args.get("attention_multiplier", scale)
        scores = _capped(scores, self._args.get("attention_cap"))
        scores = scores.masked_fill(~sees.unsqueeze(1), -math.inf)
        self.largest_logits.append(scores.detach().amax((0, 2, 3)))
        if self._form.is_gpt_oss:  # a key more, whose score is the sink, and whose value is zero
            sinks = weights["attention.sinks.weight"].view(-1, 1, 1).expand_as(scores[..., :1])
            scores, v = torch.cat([scores, sinks], -1), F.pad(v, (0, 0, 0, 1))
        mixed = scores.softmax(-1) @ v
        mixed = mixed.transpose(1, 2).flatten(-2)
        if self._form.is_qwen3_next:
            mixed = mixed * (x @ weights["attention.wg.weight"].T).sigmoid()
        out = mixed @ weights["attention.wo.weight"].T
        return out + weights["attention.wo.bias"] if "o" in self._form.biases else out

    def _recur(self, x: Tensor, weights: Weights, sees: Tensor) -> Tensor:
        """Yang et al. 2024, arXiv:2412.06464, equation 10, token by token; a state of zeros at the
        first token of each document."""
        args = self._args
        heads = args["linear_num_value_heads"]

        def of_input(letter: str) -> Tensor:
            return x @ weights[f"attention.in_{letter}.weight"].T

        def convolved(letter: str, count: int) -> Tensor:
            rows, taps = of_input(letter), weights[f"attention.conv_{letter}.weight"]
            out = torch.zeros_like(rows)
            for back in range(taps.shape[1]):  # tokens of the same document only
                own = sees.diagonal(-back, 1, 2).unsqueeze(-1)
                part = rows[:, : rows.shape[1] - back] * own * taps[:, -1 - back]
                out = out + F.pad(part, (0, 0, back, 0))
            y = F.silu(out).unflatten(-1, (count, -1))
            if letter != "v":
                y = y / (y.square().sum(-1, keepdim=True) + L2_EPS).sqrt()
            return y.repeat_interleave(heads // count, 2)  # (B, S, heads, K or V)

        q, k = (convolved(letter, args["linear_num_key_heads"]) for letter in "qk")
        v, strength = convolved("v", heads), of_input("b").sigmoid()
        if args.get("linear_allow_neg_eigval"):
            strength = strength * 2
        step = F.softplus(of_input("a") + weights["attention.dt_bias.weight"])
        kept = (-weights["attention.a_log.weight"].exp() * step).exp()
        continues = F.pad(sees.diagonal(-1, 1, 2), (1, 0))  # the document of the token before
        kept, outputs = kept * continues.unsqueeze(-1), list[Tensor]()
        state = x.new_zeros(len(x), heads, q.shape[-1], v.shape[-1])
        for token in range(x.shape[1]):
            key = k[:, token]
            state = state * kept[:, token, :, None, None]
            error = v[:, token] - torch.einsum("bhkv,bhk->bhv", state, key)
            error = error * strength[:, token].unsqueeze(-1)
            state = state + torch.einsum("bhk,bhv->bhkv", key, error)
            outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, token]))
        out = torch.stack(outputs, 1) / math.sqrt(q.shape[-1])
        eps = FLA_NORM_EPS if self._form.is_olmo_hybrid else None
        out = self._scaled(out, weights["attention.norm.weight"], eps)
        gate = F.silu(of_input("z").unflatten(-1, (heads, -1)))
        return (out * gate).flatten(-2) @ weights["attention.out.weight"].T

    def _attend_by_latents(
        self, x: Tensor, weights: Weights, rotation: Tensor, sees: Tensor
    ) -> Tensor:
        """DeepSeek-AI 2024, arXiv:2405.04434, equations 37 to 47."""
        args, plain = self._args, self._args["qk_nope_head_dim"]

        def product(y: Tensor, name: str) -> Tensor:
            return y @ weights[f"attention.{name}.weight"].T

        def normed(y: Tensor, name: str) -> Tensor:
            return y / (y.square().mean(-1, keepdim=True) + LATENT_EPS).sqrt() * weights[name]

        if args["q_lora_rank"]:
            q = product(normed(product(x, "wq_a"), "attention.q_norm.weight"), "wq_b")
        else:
            q = product(x, "wq")
        q = q.unflatten(-1, (args["n_heads"], -1))
        q = torch.cat([q[..., :plain], _turned(q[..., plain:], rotation)], -1)
        latent, key = product(x, "wkv_a").tensor_split([args["kv_lora_rank"]], -1)
        key = _turned(key.unsqueeze(2), rotation)  # the same for all heads
        kv = product(normed(latent, "attention.kv_norm.weight"), "wkv_b")
        k, v = kv.unflatten(-1, (args["n_heads"], -1)).tensor_split([plain], -1)
        k = torch.cat([k, key.expand(*k.shape[:-1], -1)], -1)

        scaling = args["rope_scaling"]
        scale = q.shape[-1] ** -0.5
        if scaling and scaling["mscale_all_dim"]:
            scale *= _growth(scaling, scaling["mscale_all_dim"]) ** 2
        scores = torch.einsum("bqnh,bknh->bnqk", q, k) * scale
        scores = scores.masked_fill(~sees.unsqueeze(1), -math.inf)
        self.largest_logits.append(scores.detach().amax((0, 2, 3)))
        return product(torch.einsum("bnqk,bknv->bqnv", scores.softmax(-1), v).flatten(-2), "wo")

    def _chosen(self, biased: Tensor, count: int) -> Tensor:
        """(B, S, E) -> (B, S, K): the highest scores, in the best groups if there are some."""
        groups = self._args.get("n_groups", 1)
        each = biased.unflatten(-1, (groups, -1))
        of_groups = each.topk(min(self._form.n_best, each.shape[-1])).values.sum(-1)
        best = of_groups.topk(self._args.get("n_active_groups", 1)).indices
        is_out = torch.ones_like(of_groups, dtype=torch.bool).scatter(-1, best, False)
        return each.masked_fill(is_out.unsqueeze(-1), -math.inf).flatten(-2).topk(count).indices

    def _mix(self, x: Tensor, weights: Weights, router: Router, is_token: Tensor) -> Tensor:
        """Experts by `router.chosen` (Shazeer et al. 2017, arXiv:1701.06538), and the router's
        results."""
        logits = x @ weights["feed_forward.router.weight"].T  # (B, S, E)
        if self._form.is_gpt_oss:
            logits = logits + weights["feed_forward.router.bias"]
        is_softmax, chosen = self._form.scores == "softmax", router.chosen
        scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
        biased = scores.detach() + router.bias
        best = biased.gather(-1, self._chosen(biased, chosen.shape[-1])).sum(-1)
        router.gap = (best - biased.gather(-1, chosen).sum(-1)).abs().max().item()
        taken = torch.zeros_like(scores).scatter(-1, chosen, 1.0) * is_token.unsqueeze(-1)
        of_sequence = taken.sum(1, keepdim=True)
        router.counts = of_sequence.sum((0, 1)).detach()
        shares = scores / scores.sum(-1, keepdim=True)
        evenness = [(shares * _over_mean(load)).sum(-1) for load in (router.load, of_sequence)]
        each = [*evenness, logits.logsumexp(-1).square()]
        router.losses = [(loss * is_token).sum() for loss in each]

        share = scores.gather(-1, chosen)
        if self._args["normalize_experts"]:
            share = share / share.sum(-1, keepdim=True)
        share = share * self._args.get("routed_scaling_factor", 1.0)
        gates = torch.zeros_like(scores).scatter(-1, chosen, share).unbind(-1)
        compute, letters = (_clamped, "wb") if self._form.is_gpt_oss else (_swiglu, "w")
        names = [f"feed_forward.experts.{letter}{n}" for letter in letters for n in (1, 2, 3)]
        experts = zip(*(weights[name] for name in names), strict=True)
        # each computes every token, and the gates of all but its own are 0
        outputs = [
            gate.unsqueeze(-1) * compute(x, *own) for gate, own in zip(gates, experts, strict=True)
        ]
        mixed = torch.stack(outputs).sum(0)
        if not _shared_width(self._args):
            return mixed
        matrices = (weights[f"feed_forward.shared.w{number}.weight"] for number in (1, 2, 3))
        shared = _swiglu(x, *matrices)
        if self._form.is_qwen3_next:
            shared = shared * (x @ weights["feed_forward.shared_gate.weight"].T).sigmoid()
        return mixed + shared


def _part(weights: Weights, layer: int) -> Weights:
    """Return the weights of a layer, by their names in it."""
    prefix = f"layers.{layer}."
    return {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}


def _turned(x: Tensor, rotation: Tensor) -> Tensor:
    """(B, S, heads, H): numbers 2i and 2i + 1 of a head, of the first, are a point to turn."""
    x, others = x.tensor_split([2 * rotation.shape[-1]], -1)
    points = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.cat([torch.view_as_real(points * rotation.unsqueeze(2)).flatten(-2), others], -1)


def _over_mean(load: Tensor) -> Tensor:
    return load / load.mean(-1, keepdim=True).clamp(min=1e-9)


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * (x / cap).tanh()


def _geglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """The same paper, with the GELU of Hendrycks and Gimpel 2016, arXiv:1606.08415, by tanh."""
    y = x @ w1.T
    gate = y / 2 * (1 + (math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)).tanh())
    return (gate * (x @ w3.T)) @ w2.T


def _swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """Shazeer 2020, arXiv:2002.05202."""
    return (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T


def _clamped(
    x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, b1: Tensor, b2: Tensor, b3: Tensor
) -> Tensor:
    """arXiv:2508.10925, section 2.3, and its published code."""
    gate, up = (x @ w1.T + b1).clamp(max=7), (x @ w3.T + b3).clamp(-7, 7)
    return (gate / (1 + (-1.702 * gate).exp()) * (up + 1)) @ w2.T + b2
