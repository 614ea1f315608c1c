"""A decoder as data: its modules, and each of their parameters, declared once.

Names, shapes, counts, FLOPs, costs of pipeline stages, initial values, layouts and rules of
divisibility follow from here. Free of torch, so that a config is checked before torch is loaded.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from meshwright.models.parameter import Parameter, State, block_of
from meshwright.models.rope_scaling import Stretching

Module = str | Callable[..., Any]
"""A class of `torch.nn.Module`, or a function that returns one, from its part of the table; or
"package.module:name" of that, so that the table stays free of torch."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions of the first elements of a head."""

    head_dim: int
    """How many elements are rotated: all H, or fewer."""
    theta: float
    scaling: Stretching | None = None
    """None: wavelengths aren't stretched."""


class MixerSpec(ABC):
    """The part of a layer that passes on information from token to token."""

    module: ClassVar[Module]
    has_own_core: ClassVar[bool] = False
    dim: int
    rope: RopeSpec | None
    """None: the layer rotates nothing."""
    window: int | None
    """Tokens that a token sees, with itself; None: all before."""

    @property
    @abstractmethod
    def parameters(self) -> dict[str, Parameter]:
        """By name in the module."""

    @property
    def bare_modules(self) -> tuple[str, ...]:
        """Names of its modules that have no parameters, in their order."""
        return ("core",)

    @abstractmethod
    def num_flops(self, seq_len: int) -> int:
        """Return the floating point operations of its forward for a sequence, but for the products
        with its parameters."""


@dataclass(frozen=True)
class AttentionSpec(MixerSpec):
    """Attention of N query heads over K key and value heads of width H.

    A subclass may have other parameters, and a different module. Its `forward` takes and gives what
    `Attention.forward` does.
    """

    module: ClassVar[Module] = "meshwright.models.attention:Attention"
    has_own_core: ClassVar[bool] = False
    """Its module named `core` isn't `CausalAttention`, so no kernel takes its place. It takes q
    (B, N, queries, H), k and v (B, K, keys, H) and a mask, (B, 1, queries, keys) bool, of the keys
    that each query sees, and whatever else its attention gives it by name. Keys may be more than
    queries: with context parallelism, and when text is generated."""

    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    qk_norm: Literal["head", "all"] | None
    """RMS norm of queries and keys: of each head, or over all heads of a token."""
    norm_eps: float
    std: float
    out_std: float
    """Of the initial values of `wo`."""
    rope: RopeSpec | None
    """None: the layer knows no positions."""
    window: int | None = None
    """Tokens that a token sees, with itself; None: all before."""
    scale: float | None = None
    """Of products of queries with keys; None: 1 / sqrt(H)."""
    soft_cap: float | None = None
    """c: scores s become c tanh(s / c). None: they stay."""
    has_norm_offset: bool = False
    """QK-norm multiplies by 1 + w."""
    biases: tuple[str, ...] = ()
    """The projections that have biases, which start at zero: of "wq", "wk", "wv" and "wo"."""
    sink_std: float | None = None
    """Of the initial values of sinks, a logit of each head that has no value; None: none."""
    is_gated: bool = False
    """The heads' results are times sigmoid(wg x)."""

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.head_dim

    @property
    def needs_mask(self) -> bool:
        """Return whether the kernels of GPUs for plain causal attention don't do it."""
        return any(one is not None for one in (self.window, self.soft_cap, self.sink_std))

    @property
    def logit_rows(self) -> dict[str, tuple[tuple[int, float], ...]]:
        """Return what to multiply so that all logits of a head are times a factor, by the name of
        the parameter: of the rows of each head, or of each key head, how many rows are times which
        power of that factor.

        Query heads that share a key head have to have the same factor.
        """
        names = [f"{layer}.weight" for layer in ("wq", "wk")]
        names += [f"{layer}.bias" for layer in ("wq", "wk") if layer in self.biases]
        return dict.fromkeys(names, ((self.head_dim, 0.5),))

    def num_pairs(self, seq_len: int) -> int:
        """Return the pairs of a query and a key in a sequence, twice those that a causal mask
        leaves: S^2 without a window, and 2 W S - W^2 with a window W, which is the same at W = S.
        """
        window = min(self.window or seq_len, seq_len)
        return window * (2 * seq_len - window)

    def num_flops(self, seq_len: int) -> int:
        """Of the products of queries with keys and of weights with values, for `num_pairs`."""
        return 2 * self.n_heads * (self.head_dim + self.value_dim) * self.num_pairs(seq_len)

    @property
    def parameters(self) -> dict[str, Parameter]:
        """By name in the module."""
        query, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        heads, kv_heads = ("n_heads", self.n_heads), ("n_kv_heads", self.n_kv_heads)

        def of_heads(parts: tuple[str, int]) -> Parameter:
            shape = parts[1] * self.head_dim, self.dim
            return Parameter(shape, "colwise", self.std, parts=parts, heads=parts[1])

        matrices = {
            "wq": of_heads(heads),
            "wk": of_heads(kv_heads),
            "wv": of_heads(kv_heads),
        }
        if self.is_gated:
            matrices["wg"] = of_heads(heads)
        matrices |= {
            "wo": Parameter((self.dim, query), "rowwise", self.out_std, parts=heads),
        }
        found = dict[str, Parameter]()
        for name, matrix in matrices.items():
            found[f"{name}.weight"] = matrix
            if name in self.biases:
                bias = Parameter(matrix.shape[:1], matrix.layout, 0.0, 0, matrix.parts)
                found[f"{name}.bias"] = bias
        match self.qk_norm:
            case "head":
                offset = self.has_norm_offset
                norm = Parameter((self.head_dim,), "on_heads", None, 0, is_offset=offset)
                found |= {"q_norm.weight": norm, "k_norm.weight": norm}
            case "all":
                found["q_norm.weight"] = Parameter((query,), "over_heads", None, 0, heads)
                found["k_norm.weight"] = Parameter((kv,), "over_heads", None, 0, kv_heads)
        if self.sink_std is not None:
            found["sinks.weight"] = Parameter((self.n_heads,), "heads", self.sink_std, 0, heads)
        return found


@dataclass(frozen=True)
class FeedForwardSpec:
    """Gated feed-forward of FFN hidden size F, without biases.

    A subclass may have other parameters, and a different module, from (B, S, D) to (B, S, D).
    """

    module: ClassVar[Module] = "meshwright.models.layers:FeedForward"

    dim: int
    hidden_dim: int
    std: float
    out_std: float
    """Of the initial values of `w2`."""
    activation: Literal["silu", "gelu"] = "silu"
    """Of the gate. gelu: its approximation by tanh."""
    width_key: str = "hidden_dim"
    """Key in `model.args` that its FFN hidden size comes from, or a product of some."""

    @property
    def parameters(self) -> dict[str, Parameter]:
        """By name in the module."""
        inner, outer = (self.hidden_dim, self.dim), (self.dim, self.hidden_dim)
        parts = (self.width_key, self.hidden_dim)
        return {
            "w1.weight": Parameter(inner, "colwise", self.std, parts=parts),
            "w2.weight": Parameter(outer, "rowwise", self.out_std, parts=parts),
            "w3.weight": Parameter(inner, "colwise", self.std, parts=parts),
        }


@dataclass(frozen=True)
class MixtureSpec:
    """E gated MLPs of FFN hidden size F, of which each token goes through K."""

    module: ClassVar[Module] = "meshwright.models.mixture:Mixture"

    dim: int
    hidden_dim: int
    n_experts: int
    n_active: int
    """K."""
    normalizes: bool
    """The weights of a token's experts are divided by their sum, plus `normalizer_eps`."""
    std: float
    out_std: float
    """Of the initial values of `w2`."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """From the router's logits to scores, of which the highest choose, and weigh the results."""
    normalizer_eps: float = 0.0
    scale: float = 1.0
    """Factor on the weights."""
    n_groups: int = 1
    """Groups of experts of equal size."""
    n_active_groups: int = 1
    """Groups that a token's experts are in."""
    n_best: int = 2
    """Highest scores of a group that add up to the group's."""
    shared: FeedForwardSpec | None = None
    """A feed-forward that every token goes through too."""
    is_shared_gated: bool = False
    """Its result is times sigmoid(w x), with one vector w."""
    activation: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    """Between the projections of an expert; `mixture.clamped_swiglu` is the second."""
    bias_std: float | None = None
    """Of the initial values of biases of the router, and of all projections of the experts; None:
    there are no biases."""

    def __post_init__(self) -> None:
        size, rest = divmod(self.n_experts, self.n_groups)
        if rest or not self.n_active <= size * self.n_active_groups <= self.n_experts:
            raise ValueError(
                f"n_groups = {self.n_groups}: groups of n_experts = {self.n_experts} must be of "
                f"equal size, and n_active_groups = {self.n_active_groups} of them have at least "
                f"n_active = {self.n_active}"
            )

    @property
    def experts(self) -> dict[str, Parameter]:
        """Stacked parameters of the experts."""
        inner = (self.n_experts, self.hidden_dim, self.dim)
        outer = (self.n_experts, self.dim, self.hidden_dim)
        share = self.n_active / self.n_experts
        found = {
            "w1": Parameter(inner, "experts", self.std, share),
            "w2": Parameter(outer, "experts", self.out_std, share),
            "w3": Parameter(inner, "experts", self.std, share),
        }
        if self.bias_std is not None:
            shapes = {"b1": inner[:2], "b2": outer[:2], "b3": inner[:2]}
            found |= {n: Parameter(s, "experts", self.bias_std, 0) for n, s in shapes.items()}
        return found

    @property
    def parameters(self) -> dict[str, Parameter]:
        """By name in the module."""
        found = {"router.weight": Parameter((self.n_experts, self.dim), "on_tokens", self.std)}
        if self.bias_std is not None:
            found["router.bias"] = Parameter((self.n_experts,), "on_tokens", self.bias_std, 0)
        found |= {f"experts.{name}": parameter for name, parameter in self.experts.items()}
        shared = self.shared.parameters if self.shared else {}
        found |= {f"shared.{name}": parameter for name, parameter in shared.items()}
        if self.is_shared_gated:
            found["shared_gate.weight"] = Parameter((1, self.dim), "on_tokens", self.std)
        return found

    @property
    def state(self) -> dict[str, State]:
        """By name in the module; `Mixture` has their meaning."""
        return {
            "bias": State((self.n_experts,), "float32", 0),
            "load": State((self.n_experts,), "int64", 1),
        }


@dataclass(frozen=True)
class NormSpec:
    """RMS norm of the residual stream, of width D.

    A subclass may have other parameters, and a different module, from (B, S, D) to (B, S, D). With
    sequence parallelism it sees a part of S.
    """

    module: ClassVar[Module] = "meshwright.models.layers:build_norm"

    dim: int
    eps: float
    has_offset: bool = False
    """It multiplies by 1 + w."""
    alternates: bool = False
    """Its weights start with 1, -1, 1, ... instead of one."""

    @property
    def parameters(self) -> dict[str, Parameter]:
        """By name in the module."""
        shape, alternates, offset = (self.dim,), self.alternates, self.has_offset
        weight = Parameter(shape, "on_sequence", None, 0, alternates=alternates, is_offset=offset)
        return {"weight": weight}


@dataclass(frozen=True)
class LayerSpec:
    """A layer: attention and feed-forward, each with a norm, each added to the residual stream."""

    attention: MixerSpec
    """Softmax attention (`AttentionSpec`), or linear attention (`delta.DeltaSpec`)."""
    feed_forward: FeedForwardSpec | MixtureSpec
    norm: Literal["pre", "post", "sandwich"]
    """Norms precede attention and feed-forward, or follow them, or both."""
    norm_eps: float
    has_norm_offset: bool = False
    """Norms multiply by 1 + w."""
    residual_scale: float = 1.0
    """Of the results of attention and feed-forward, where they are added."""
    norms: type[NormSpec] = NormSpec

    @property
    def norm_spec(self) -> NormSpec:
        """Each of its norms."""
        return self.norms(self.attention.dim, self.norm_eps, self.has_norm_offset)

    @property
    def modules(self) -> dict[str, dict[str, Parameter]]:
        """Parameters by name in the module, by the module's name in the block, in its order."""
        norm = self.norm_spec.parameters
        has_two = self.norm == "sandwich"
        return {
            "attention_norm": norm,
            "attention": self.attention.parameters,
            **{f"attention.{name}": {} for name in self.attention.bare_modules},
            **({"post_attention_norm": norm} if has_two else {}),
            "ffn_norm": norm,
            "feed_forward": self.feed_forward.parameters,
            **({"post_ffn_norm": norm} if has_two else {}),
        }


@dataclass(frozen=True)
class PredictorSpec(LayerSpec):
    """A layer of multi-token prediction (MTP): it follows the model's last layer or the MTP layer
    before it, and predicts a token one place further.

    Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.2. Names are DeepSeek's.
    """

    joined_std: float = 0.02
    """Of the initial values of `eh_proj`."""
    own_modules: ClassVar = ("enorm", "hnorm", "eh_proj", "head_norm")
    """Those that other layers haven't."""

    @property
    def modules(self) -> dict[str, dict[str, Parameter]]:
        dim, norm = self.attention.dim, self.norm_spec.parameters
        joined = {"weight": Parameter((dim, 2 * dim), "on_tokens", self.joined_std)}
        own = zip(self.own_modules, (norm, norm, joined, norm), strict=True)
        return super().modules | dict(own)


@dataclass(frozen=True)
class DecoderSpec:
    """A whole model."""

    dim: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    """Layers of MTP, if the model has some, are the last."""
    norm_eps: float
    tie_embeddings: bool
    std: float
    output_std: float
    """Of the initial values of the output projection, and of an embedding that is that too."""
    has_norm_offset: bool = False
    """The last norm multiplies by 1 + w."""
    embedding_scale: float = 1.0
    """Of the embedding's vectors, in the type of activations."""
    output_scale: float = 1.0
    """Of the logits."""
    output_cap: float | None = None
    """c: logits z become c tanh(z / c). None: they stay."""
    matrix_lr_scale: float = 1.0
    """`Parameter.lr_scale` of the matrices of layers."""
    norms: type[NormSpec] = NormSpec

    @property
    def norm_spec(self) -> NormSpec:
        """The last norm.

        A tied model's starts with weights of both signs. If blocks add little to a
        token's vector e, the norm scales e to length sqrt(D), and with weights of one its product
        with its own row of the table is sqrt(D) |e|: every token predicts itself. With as many
        weights of -1 that product is a sum of D terms of both signs, as of any other row, so the
        first loss is that of its own output.
        """
        return self.norms(self.dim, self.norm_eps, self.has_norm_offset, self.tie_embeddings)

    @cached_property
    def modules(self) -> Mapping[str, Mapping[str, Parameter]]:
        """Parameters by name in the module, by the module's name, in the order of the model."""
        matrix, uses = (self.vocab_size, self.dim), 1.0 + self.mtp_depth
        embedding = Parameter(matrix, "embedding", self.std, 0)
        output = {"weight": Parameter(matrix, "output", self.output_std, uses)}
        if self.tie_embeddings:  # looked up in, and multiplied by
            embedding, output = Parameter(matrix, "embedding", self.output_std, uses), {}
        found = {"tok_embeddings": {"weight": embedding}}
        for index, layer in enumerate(self.layers):
            found[f"layers.{index}"] = {}
            found |= {f"layers.{index}.{name}": own for name, own in layer.modules.items()}
        return found | {"norm": self.norm_spec.parameters, "output": output}

    @cached_property
    def mtp_depth(self) -> int:
        """Layers that predict further tokens."""
        return sum(isinstance(layer, PredictorSpec) for layer in self.layers)

    @cached_property
    def predictors(self) -> list[str]:
        """Numbers of these layers, in their order, as names in `layers`."""
        last = len(self.layers)
        return [str(index) for index in range(last - self.mtp_depth, last)]

    @property
    def copies_embedding(self) -> bool:
        """Return whether the last stage of a pipeline has a copy of the embedding."""
        return self.tie_embeddings or self.mtp_depth > 0

    @property
    def uses_copy_again(self) -> bool:
        """Return whether that copy has several places in the graph of the last stage."""
        return self.mtp_depth + self.tie_embeddings > 1

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """Every parameter by its name, in the order of the model."""
        found = {
            f"{module}.{name}": parameter
            for module, own in self.modules.items()
            for name, parameter in own.items()
        }
        if self.matrix_lr_scale != 1:
            for name, parameter in found.items():
                if parameter.role == "matrix":
                    found[name] = replace(parameter, lr_scale=self.matrix_lr_scale)
        return found

    @cached_property
    def state(self) -> Mapping[str, State]:
        """Every tensor that is no parameter, but part of a checkpoint, by its name."""
        return {
            f"layers.{index}.feed_forward.{name}": state
            for index, mixture in self.mixtures.items()
            for name, state in mixture.state.items()
        }

    @cached_property
    def mixtures(self) -> Mapping[int, MixtureSpec]:
        """MLPs with experts, by the number of their layer."""
        found = {index: layer.feed_forward for index, layer in enumerate(self.layers)}
        return {index: spec for index, spec in found.items() if isinstance(spec, MixtureSpec)}

    @cached_property
    def module_names(self) -> list[str]:
        """Names of the modules that compute, in the order of the model."""
        names = list[str]()
        for module, own in self.modules.items():
            names.append(module)
            inner = (name.split(".")[:-1] for name in own)
            paths = (".".join(path[:depth]) for path in inner for depth in range(1, len(path) + 1))
            names += dict.fromkeys(f"{module}.{path}" for path in paths)
        return names

    def linear_layers(self, tp: int = 1) -> dict[str, tuple[int, int]]:
        """(out, in) of the weights of linear layers in blocks, by name of the layer; of one of `tp`
        tensor-parallel ranks. With several, those whose input the block has gathered aren't among
        them: they multiply plain tensors, which converted layers don't."""
        found: dict[str, tuple[int, int]] = {}
        for name, parameter in self.parameters.items():
            layouts = {"colwise", "rowwise"} | ({"colwise_gathered"} if tp == 1 else set())
            if parameter.layout in layouts and parameter.role == "matrix":
                rows, columns = parameter.shape
                is_rowwise = parameter.layout == "rowwise"
                part = (rows, columns // tp) if is_rowwise else (rows // tp, columns)
                found[name.removesuffix(".weight")] = part
        return found

    @cached_property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different rotations of its layers."""
        ropes = dict.fromkeys(layer.attention.rope for layer in self.layers)
        return tuple(rope for rope in ropes if rope is not None)

    @cached_property
    def attentions(self) -> Mapping[int, AttentionSpec]:
        """Softmax attention, by the number of its layer."""
        found = {index: layer.attention for index, layer in enumerate(self.layers)}
        return {index: spec for index, spec in found.items() if isinstance(spec, AttentionSpec)}

    @property
    def plain_attention(self) -> AttentionSpec | None:
        """Return the first softmax attention that is only causal, unless documents mask it."""
        specs = self.attentions.values()
        return next((spec for spec in specs if not (spec.needs_mask or spec.has_own_core)), None)

    @property
    def needs_masks(self) -> bool:
        """Return whether some layers have windows or soft caps."""
        return any(attention.needs_mask for attention in self.attentions.values())

    @property
    def head_dim(self) -> int:
        """Width of softmax attention's heads: of the widest, if blocks differ."""
        return max(attention.head_dim for attention in self.attentions.values())

    @property
    def num_params(self) -> int:
        """All parameters; tied embeddings count once."""
        return sum(parameter.numel for parameter in self.parameters.values())

    @property
    def num_active_params(self) -> int:
        """Parameters that a token meets: all, but of the experts its own only."""
        idle = (
            parameter.numel // spec.n_experts * (spec.n_experts - spec.n_active)
            for spec in self.mixtures.values()
            for parameter in spec.experts.values()
        )
        return self.num_params - sum(idle)

    @cached_property
    def by_block(self) -> Mapping[str, Mapping[str, Parameter]]:
        """Every parameter by its name, by its `block_of`."""
        found: dict[str, dict[str, Parameter]] = {"tok_embeddings": {}, "norm": {}, "output": {}}
        for name, parameter in self.parameters.items():
            found.setdefault(block_of(name), {})[name] = parameter
        return found

    def of_blocks(self, blocks: Iterable[str]) -> list[Parameter]:
        return [parameter for block in blocks for parameter in self.by_block[block].values()]

    def stage_costs(self, seq_len: int) -> Mapping[str, int]:
        """Return the share of each layer, of "tok_embeddings" and of "output" in the time and
        memory of a pipeline's stage, counted in parameters in matrices.

        Where layers differ in attention, as with a window in some of them, the FLOPs beyond those
        of the cheapest layer count as the parameters that take as many.
        """
        costs = {
            block: sum(p.numel for p in own.values() if p.role not in ("norm", "bias"))
            for block, own in self.by_block.items()
        }
        of_layers = [self._kernel_flops(layer.attention, seq_len) for layer in self.layers]
        for index, of_layer in enumerate(of_layers):
            beyond = (of_layer - min(of_layers)) // (2 * seq_len)  # 2 per parameter and token
            costs[f"layers.{index}"] += beyond
        return costs

    @staticmethod
    def _kernel_flops(mixer: MixerSpec, seq_len: int) -> int:
        """Return the FLOPs of a layer's forward for a sequence, but for products with parameters:
        of attention those of the pairs that a causal mask leaves."""
        flops = mixer.num_flops(seq_len)
        return flops // 2 if isinstance(mixer, AttentionSpec) else flops

    def flops_per_token(self, seq_len: int, *, is_causal: bool = False) -> int:
        """Floating point operations of forward and backward, per token of a sequence of `seq_len`.

        Matrix products only, a multiply-add as two: 6 per parameter in one (2 forward, 4 backward),
        and attention's two products of queries with keys and weights with values: of all pairs, or
        with `is_causal` of the half that kernels compute. All pairs are the convention of PaLM
        (Chowdhery et al. 2022, arXiv:2204.02311, appendix B) and of torchtitan; layers with a
        window have those of `AttentionSpec.num_pairs`, and linear attention has its
        recurrence's. Recomputation by activation checkpointing doesn't count.
        """
        multiplied = sum(p.numel * p.token_share for p in self.parameters.values())
        pairs = sum(attention.num_flops(seq_len) for attention in self.attentions.values())
        linear = sum(layer.attention.num_flops(seq_len) for layer in self.layers) - pairs
        parts = 2 if is_causal else 1
        of_sequence = 3 * (parts * linear + pairs)
        return round(6 * multiplied) + of_sequence // (max(seq_len, 1) * parts)

    @cached_property
    def parts(self) -> Mapping[str, int]:
        """Number of parts, by key of `model.args`, that tensor parallelism must divide."""
        return dict(p.parts for p in self.parameters.values() if p.parts is not None)
