"""A decoder of any family, as plain single-device PyTorch."""

import torch
from torch import Tensor, nn

from meshwright.models.args import DecoderArgs
from meshwright.models.attention import Attention, rope_cache
from meshwright.models.document_mask import Mask, build_mask, positions_in_document
from meshwright.models.layers import Embedding, FeedForward, Linear, RMSNorm
from meshwright.models.loss import SummedLoss
from meshwright.models.table import BlockSpec


class Block(nn.Module):
    """Attention, then feed-forward, each added to the residual stream.

    Norms are of the input of each (Xiong et al. 2020, arXiv:2002.04745), or of its output (OLMo
    Team 2024, arXiv:2501.00656, section 3.2).
    """

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.norm = spec.norm
        self.attention_norm = RMSNorm(spec.attention.dim, eps=spec.norm_eps)
        self.attention = Attention(spec.attention)
        self.ffn_norm = RMSNorm(spec.attention.dim, eps=spec.norm_eps)
        self.feed_forward = FeedForward(spec.feed_forward)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        if self.norm == "post":
            x = x + self.attention_norm(self.attention(x, cos, sin, mask))
            return x + self.ffn_norm(self.feed_forward(x))
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Projection(Linear):
    """A projection with a weight of its own.

    `loss` knows how to multiply by the weight, so that tensor parallelism has one thing to replace.
    """

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size)
        self.loss = SummedLoss()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """(B, S, D) -> (B, S, V) logits, or with (B, S) labels their summed loss."""
        return _project(self.loss, x, self.weight, labels)


class TiedProjection(nn.Module):
    """A projection by a weight that belongs to another module, the embedding.

    Source: Press and Wolf 2016, arXiv:1608.05859. It holds no second name of the weight, because
    sharing does not survive the move from meta, which gives every module tensors of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loss = SummedLoss()

    def forward(self, x: Tensor, weight: Tensor, labels: Tensor | None = None) -> Tensor:
        """As `Projection`'s, with (V, D) weight."""
        return _project(self.loss, x, weight, labels)


def _project(loss: SummedLoss, x: Tensor, weight: Tensor, labels: Tensor | None) -> Tensor:
    return loss.logits(x, weight) if labels is None else loss(x, weight, labels)


class Decoder(nn.Module):
    """Embedding, blocks, norm and output projection, with the loss.

    Parallelism, initialisation and the trainer rely on its names, which its checkpoints share, and
    on `table`, the table of its parameters. A stage of a pipeline is a decoder without the modules
    of other stages: `layers` has some of the blocks, under their own names; other absent modules
    are None.

    Args:
        args: dimensions.
        seq_len: longest sequence it will see; sizes the rotary cache.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, args: DecoderArgs, seq_len: int) -> None:
        super().__init__()
        self.args, self.table, self.seq_len = args, args.table, seq_len
        spec = self.table
        self.tok_embeddings: Embedding | None = Embedding(spec.vocab_size, spec.dim)
        self.layers = nn.ModuleDict({str(i): Block(block) for i, block in enumerate(spec.blocks)})
        self.norm: nn.Module | None = RMSNorm(spec.dim, eps=spec.norm_eps)
        self.output: Projection | TiedProjection | None = (
            TiedProjection() if spec.tie_embeddings else Projection(spec.dim, spec.vocab_size)
        )
        for name in ("cos", "sin"):  # fp32 whatever the parameters are: bf16 has no exact positions
            cache = torch.empty(seq_len, spec.rope.head_dim // 2, dtype=torch.float32)
            self.register_buffer(name, cache, persistent=False)

    def init_buffers(self) -> None:
        """Fill the rotary cache, on the device where it is."""
        rope = self.table.rope
        cos, sin = rope_cache(
            self.seq_len, rope.head_dim, rope.theta, self.cos.device, scaling=rope.scaling
        )
        self.cos.copy_(cos)
        self.sin.copy_(sin)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """(B, S) int64 -> () fp32, the loss added up over `labels`; without them (B, S, V) logits.

        A stage without the embedding takes (B, S, D) instead; one without the output gives it.

        Args:
            labels: (B, S) int64, as `SummedLoss` takes them; of no use to a stage without the
                output.
            positions: (S,) or (B, S) int64 of the tokens in their sequence, else 0 .. S-1.
            documents: (B, S) int: which document of its sequence each position belongs to, rising
                from 0. Attention then stops between them, and the positions that it rotates by
                begin at 0 in each. Of whole sequences, also where `tokens` are parts of them.
        """
        table = None
        if isinstance(self.output, TiedProjection):
            assert self.tok_embeddings is not None  # a pipeline does not cut it off
            table = self.tok_embeddings.cast_table()  # once, so that both uses have one gradient
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens, table=table)
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
            return self.output(x, table, labels)
        return x if self.output is None else self.output(x, labels)
