"""A decoder of any family, as plain single-device PyTorch."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.models.args import DecoderArgs
from meshwright.models.attention import (
    Attention,
    Mask,
    build_mask,
    positions_in_document,
    rope_cache,
)
from meshwright.models.layers import Embedding, FeedForward, Linear, build_layer
from meshwright.models.loss import PADDING, SummedLoss
from meshwright.models.mixture import Mixture
from meshwright.models.table import LayerSpec, MixtureSpec, Parameter


class Block(nn.Module):
    """Attention, then feed-forward, each added to the residual stream.

    Norms are of the input of each (Xiong et al. 2020, arXiv:2002.04745), or of its output (OLMo
    Team 2024, arXiv:2501.00656, section 3.2).
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.norm, modules = spec.norm, spec.modules
        self.attention_norm = build_layer(modules["attention_norm"]["weight"], spec.norm_eps)
        self.attention = Attention(spec.attention)
        self.ffn_norm = build_layer(modules["ffn_norm"]["weight"], spec.norm_eps)
        self.feed_forward: FeedForward | Mixture = (
            Mixture(spec.feed_forward)
            if isinstance(spec.feed_forward, MixtureSpec)
            else FeedForward(spec.feed_forward)
        )

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Mask | None = None,
        chosen: Tensor | None = None,
        counted: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(B, S, D) -> (B, S, D); with experts also the other results of `Mixture`.

        Args:
            chosen, counted: as `Mixture` takes them.
        """
        if self.norm == "post":
            x = x + self.attention_norm(self.attention(x, cos, sin, mask))
            if isinstance(self.feed_forward, Mixture):
                out, *others = self.feed_forward(x, chosen, counted)
                return x + self.ffn_norm(out), *others
            return x + self.ffn_norm(self.feed_forward(x))
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        if isinstance(self.feed_forward, Mixture):
            out, *others = self.feed_forward(self.ffn_norm(x), chosen, counted)
            return x + out, *others
        return x + self.feed_forward(self.ffn_norm(x))


class Projection(Linear):
    """A projection with a weight of its own.

    `loss` knows how to multiply by the weight, so that tensor parallelism has one thing to replace.
    """

    def __init__(self, parameter: Parameter) -> None:
        vocab_size, dim = parameter.shape
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


class Routing(Protocol):
    """Sees which experts tokens go through, and may prescribe it: to replay a run."""

    def given(self, layer: int, num_sequences: int) -> Tensor | None:
        """Return the experts to take, (B, S, K) int64; None: the router's choice."""

    def note(self, layer: int, choice: Tensor, gap: Tensor | None) -> None:
        """Take note of the router's choice, (B, S, K): of a rank's part of its sequences.

        Args:
            gap: () fp32, of `Mixture`, if experts were given.
        """


class Decoder(nn.Module):
    """Embedding, blocks, norm and output projection, with the loss.

    Parallelism, initialisation and the trainer rely on its names, which its checkpoints share, and
    on `table`, the table of its parameters. A stage of a pipeline is a decoder without the modules
    of other stages: `layers` has some of the blocks, under their own names; other absent modules
    are None.

    Args:
        args: dimensions.
        seq_len: longest sequence it will see; sizes the rotary cache.

    Attributes:
        own_part: of (B, S), the part whose routers are here; sequence parallelism replaces it.
    """

    cos: Tensor
    sin: Tensor
    routing: Routing | None = None

    def __init__(self, args: DecoderArgs, seq_len: int) -> None:
        super().__init__()
        self.args, self.table, self.seq_len = args, args.table, seq_len
        self.own_part: Callable[[Tensor], Tensor] = lambda of_tokens: of_tokens
        self._mixtures = {str(number) for number in args.table.mixtures}
        spec, modules = self.table, self.table.modules
        embedding = build_layer(modules["tok_embeddings"]["weight"])
        assert isinstance(embedding, Embedding)
        self.tok_embeddings: Embedding | None = embedding
        self.layers = nn.ModuleDict({str(i): Block(layer) for i, layer in enumerate(spec.layers)})
        self.norm: nn.Module | None = build_layer(modules["norm"]["weight"], spec.norm_eps)
        self.output: Projection | TiedProjection | None = (
            TiedProjection() if spec.tie_embeddings else Projection(modules["output"]["weight"])
        )
        for name in ("cos", "sin"):  # fp32 whatever the parameters are: bf16 has no exact positions
            cache = torch.empty(seq_len, spec.rope.head_dim // 2, dtype=torch.float32)
            self.register_buffer(name, cache, persistent=False)

    def mixtures(self) -> dict[int, Mixture]:
        """Feed-forwards with experts, by the number of their layer in the model."""
        found = {int(name): block.feed_forward for name, block in self.layers.items()}
        return {number: part for number, part in found.items() if isinstance(part, Mixture)}

    def init_state(self) -> None:
        """Fill the table's state with its first values: not after a load, which gives others."""
        for name, buffer in self.named_buffers():
            if name in self.table.state:
                buffer.fill_(self.table.state[name].value)

    def init_buffers(self) -> None:
        """Fill buffers that no checkpoint holds, on the device where they are: the rotary cache,
        and sums over a step."""
        for mixture in self.mixtures().values():
            mixture.counts.zero_()
            mixture.figures.zero_()
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
            labels: (B, S) int64, as `SummedLoss` takes them. A stage without the output needs
                them for its routers, which do not count padding.
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
        counted = None
        if labels is not None and self._mixtures:
            counted = self.own_part(labels != PADDING).flatten()
        for name, block in self.layers.items():
            x = self._through(name, block, x, (cos, sin, mask), counted)
        if self.norm is not None:
            x = self.norm(x)
        if isinstance(self.output, TiedProjection):
            return self.output(x, table, labels)
        return x if self.output is None else self.output(x, labels)

    def _through(
        self,
        name: str,
        block: nn.Module,
        x: Tensor,
        others: tuple[Tensor, Tensor, Mask | None],
        counted: Tensor | None,
    ) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        if name not in self._mixtures:
            plain: Tensor = block(x, *others)
            return plain
        given, number, shape = None, int(name), (len(x), -1)
        if self.routing is not None and (own := self.routing.given(number, len(x))) is not None:
            given = own.flatten(0, 1)
        x, choice, figures, gap = block(x, *others, given, counted)
        if torch.is_grad_enabled():  # here and not in the block, which may be computed again
            self.mixtures()[number].note(choice if given is None else given, figures, counted)
        if self.routing is not None:
            self.routing.note(number, choice.unflatten(0, shape), gap)
        return x
