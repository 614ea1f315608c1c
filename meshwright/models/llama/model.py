"""Llama 2 and 3 as plain single-device PyTorch."""

import dataclasses
import math

import torch
from torch import Tensor, nn

from meshwright.models.decoder import Decoder
from meshwright.models.layers.attention import Attention
from meshwright.models.layers.document_mask import Mask, build_mask, positions_in_document
from meshwright.models.layers.feed_forward import FeedForward
from meshwright.models.layers.projection import TiedProjection
from meshwright.models.layers.rope import rope_cache
from meshwright.models.llama import LlamaArgs


class LlamaBlock(nn.Module):
    """One pre-norm layer: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(args.dim, args.n_heads, args.n_kv_heads)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = FeedForward(args.dim, args.hidden_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(Decoder):
    """Decoder of Touvron et al. 2023 (arXiv:2307.09288) and of Llama 3 (arXiv:2407.21783).

    Args:
        args: dimensions.
        seq_len: longest sequence it will see; sizes the rotary cache.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, args: LlamaArgs, seq_len: int) -> None:
        super().__init__()
        self.args = args
        self.seq_len = seq_len
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict({str(i): LlamaBlock(args) for i in range(args.n_layers)})
        self.norm: nn.Module | None = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output: nn.Linear | TiedProjection | None = (
            TiedProjection()
            if args.tie_embeddings
            else nn.Linear(args.dim, args.vocab_size, bias=False)
        )
        for name in ("cos", "sin"):  # fp32 whatever the parameters are: bf16 has no exact positions
            cache = torch.empty(seq_len, args.head_dim // 2, dtype=torch.float32)
            self.register_buffer(name, cache, persistent=False)

    def init_buffers(self) -> None:
        """Fill the rotary cache, on the device where it is."""
        args, scaling = self.args, self.args.rope_scaling
        cos, sin = rope_cache(
            self.seq_len,
            args.head_dim,
            args.rope_theta,
            self.cos.device,
            scaling=dataclasses.astuple(scaling) if scaling else None,
        )
        self.cos.copy_(cos)
        self.sin.copy_(sin)

    def initial_std(self, name: str) -> float | None:
        """Standard deviation that the parameter `name` starts with; None: it starts at one.

        Weights 0.02; those that end on the residual stream shrink with depth, so that its variance
        does not grow with it (Radford et al. 2019, GPT-2, section 2.3). The output projection has
        D^-1/2, so that logits start with variance 1 at any width.
        """
        module = name.removesuffix(".weight").rpartition(".")[2]
        if "norm" in module:
            return None
        if module in ("wo", "w2"):
            return 0.02 / math.sqrt(2 * self.args.n_layers)
        if module == "output" or (module == "tok_embeddings" and self.args.tie_embeddings):
            return 1 / math.sqrt(self.args.dim)
        return 0.02

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        mask = None
        if documents is not None:
            mask = build_mask(documents, positions)  # once for all blocks
            positions = positions_in_document(documents, positions)
        if positions is None:
            cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        else:
            cos, sin = self.cos[positions], self.sin[positions]
        for block in self.layers.values():
            x = block(x, cos, sin, mask)
        if self.norm is not None:
            x = self.norm(x)
        if isinstance(self.output, TiedProjection):
            assert self.tok_embeddings is not None  # a pipeline does not cut it off
            return self.output(x, self.tok_embeddings.weight)
        return x if self.output is None else self.output(x)
