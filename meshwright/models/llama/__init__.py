"""Llama's dimensions as data. Free of torch, so that a config is checked before torch is loaded."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

LARGEST = 2**31
"""Above this a dimension is a slip of the finger."""

BLOCK_MODULES = (
    *("attention_norm", "attention", "attention.wq", "attention.wk", "attention.wv"),
    *("attention.wo", "attention.core", "ffn_norm"),
    *("feed_forward", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
)
"""Modules of a layer, in its order."""
WITHOUT_WEIGHT = ("attention", "attention.core", "feed_forward")
"""Of these, those that have no weight of their own."""


def _check_positive(args: object, *names: str) -> None:
    for name in names:
        if not 0 < getattr(args, name) < LARGEST:
            raise ValueError(f"{name} = {getattr(args, name)}: must be positive and below 2^31")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary wavelengths; see `layers/rope.py` for the formula."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}  # when read from a TOML

    factor: float = 8.0
    """How many times longer a context than in the original training."""
    low_freq_factor: float = 1.0
    """Wavelengths above original_seq_len / low_freq_factor are stretched by the whole factor."""
    high_freq_factor: float = 4.0
    """Wavelengths below original_seq_len / high_freq_factor are left alone."""
    original_seq_len: int = 8192
    """Tokens of context in the original training."""

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_seq_len")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor = {self.high_freq_factor}: must be above low_freq_factor = "
                f"{self.low_freq_factor}"
            )


@dataclass(frozen=True)
class LlamaArgs:
    """What fixes the shapes of a Llama.

    Raises:
        ValueError: if the dimensions do not fit each other.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}  # when read from a TOML

    dim: int
    """Model width D."""
    n_layers: int
    n_heads: int
    """Query heads N."""
    n_kv_heads: int
    """Key and value heads K; each serves N/K query heads."""
    hidden_dim: int
    """Inner width F of the feed-forward block."""
    vocab_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    """The output projection is the embedding."""

    @property
    def module_names(self) -> list[str]:
        """Names of the modules that compute, in the order of the model."""
        names = ["tok_embeddings"]
        for index in range(self.n_layers):
            names += [f"layers.{index}", *(f"layers.{index}.{name}" for name in BLOCK_MODULES)]
        return [*names, "norm", "output"]

    def __post_init__(self) -> None:
        _check_positive(self, "dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim")
        _check_positive(self, "vocab_size", "norm_eps", "rope_theta")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_kv_heads = {self.n_kv_heads}: must divide n_heads = {self.n_heads}"
            )
        if self.dim % (2 * self.n_heads):
            raise ValueError(
                f"dim = {self.dim}: must be a multiple of 2 * n_heads = {2 * self.n_heads}, "
                "for heads of equal and even width"
            )

    @property
    def head_dim(self) -> int:
        """Width H of one head."""
        return self.dim // self.n_heads

    def parameter_names(self) -> Iterator[str]:
        """Names of all parameters of the model, in its order."""
        yield "tok_embeddings.weight"
        for layer in range(self.n_layers):
            for module in BLOCK_MODULES:
                if module not in WITHOUT_WEIGHT:
                    yield f"layers.{layer}.{module}.weight"
        yield "norm.weight"
        if not self.tie_embeddings:
            yield "output.weight"

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters by name, in the order of the model."""
        query, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        matrices = {
            "tok_embeddings": (self.vocab_size, self.dim),
            "wq": (query, self.dim),
            "wk": (kv, self.dim),
            "wv": (kv, self.dim),
            "wo": (self.dim, query),
            "w1": (self.hidden_dim, self.dim),
            "w2": (self.dim, self.hidden_dim),
            "w3": (self.hidden_dim, self.dim),
            "output": (self.vocab_size, self.dim),
        }
        modules = {name: name.split(".")[-2] for name in self.parameter_names()}
        return {name: matrices.get(module, (self.dim,)) for name, module in modules.items()}


def _llama2(dim: int, layers: int, heads: int, kv_heads: int, hidden: int) -> LlamaArgs:
    return LlamaArgs(dim, layers, heads, kv_heads, hidden, vocab_size=32000, rope_theta=10000.0)


def _llama3(
    dim: int, layers: int, heads: int, hidden: int, stretch: float | None, tied: bool = False
) -> LlamaArgs:
    scaling = RopeScaling(factor=stretch) if stretch else None
    return LlamaArgs(
        dim, layers, heads, 8, hidden, 128256, rope_scaling=scaling, tie_embeddings=tied
    )


FLAVORS: dict[str, LlamaArgs] = {
    "debugmodel": LlamaArgs(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=4, hidden_dim=768, vocab_size=2048
    ),
    "llama2_7b": _llama2(4096, 32, 32, 32, 11008),
    "llama2_13b": _llama2(5120, 40, 40, 40, 13824),
    "llama2_70b": _llama2(8192, 80, 64, 8, 28672),
    "llama3_1b": _llama3(2048, 16, 32, 8192, stretch=32.0, tied=True),  # Llama 3.2 1B
    "llama3_3b": _llama3(3072, 28, 24, 8192, stretch=32.0, tied=True),  # Llama 3.2 3B
    "llama3_8b": _llama3(4096, 32, 32, 14336, stretch=None),  # Llama 3 8B
    "llama3.1_8b": _llama3(4096, 32, 32, 14336, stretch=8.0),
    "llama3_70b": _llama3(8192, 80, 64, 28672, stretch=None),  # Llama 3 70B
    "llama3.1_70b": _llama3(8192, 80, 64, 28672, stretch=8.0),
    "llama3.1_405b": _llama3(16384, 126, 128, 53248, stretch=8.0),
}
