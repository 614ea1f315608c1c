"""A decoder of any family, as plain single-device PyTorch."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from meshwright.models.args import DecoderArgs
from meshwright.models.attention import (
    Attention,
    Mask,
    build_mask,
    makes_blocks,
    positions_in_document,
    rope_cache,
)
from meshwright.models.layers import Embedding, FeedForward, build_layer
from meshwright.models.loss import PADDING, SummedLoss
from meshwright.models.mixture import Mixture
from meshwright.models.table import LayerSpec, MixtureSpec, Parameter, RopeSpec


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
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None, *routing: Tensor | None
    ) -> Tensor | tuple[Tensor | None, ...]:
        """(B, S, D) -> (B, S, D); with experts also the other results of `Mixture`.

        Args:
            routing: further arguments of `Mixture`.
        """
        is_post = self.norm == "post"
        if is_post:
            x = x + self.attention_norm(self.attention(x, cos, sin, mask))
        else:
            x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        out = self.feed_forward(x if is_post else self.ffn_norm(x), *routing)
        out, *others = out if isinstance(out, tuple) else (out,)
        x = x + (self.ffn_norm(out) if is_post else out)
        return (x, *others) if others else x


class Projection(nn.Module):
    """The projection to logits, by a weight of its own or by the embedding's.

    Source of the latter: Press and Wolf 2016, arXiv:1608.05859. It then holds no second name of the
    weight, because sharing does not survive the move from meta, which gives every module tensors of
    its own. `loss` knows how to multiply by the weight, so that tensor parallelism has one thing to
    replace.

    Args:
        parameters: the table's.
    """

    weight: Tensor

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.empty(parameter.shape)))
        self.loss = SummedLoss()

    def forward(
        self, x: Tensor, labels: Tensor | None = None, table: Tensor | None = None
    ) -> Tensor:
        """(B, S, D) -> (B, S, V) logits, or with (B, S) labels their summed loss.

        Args:
            table: (V, D), the embedding's, where there is no weight.
        """
        weight = self.weight if table is None else table
        return self.loss.logits(x, weight) if labels is None else self.loss(x, weight, labels)


class Routing:
    """Sees which experts tokens go through, and may prescribe it: to replay a run. This one leaves
    it to the router."""

    def given(self, layer: int, num_sequences: int) -> Tensor | None:
        """Return the experts to take, (B, S, K) int64; None: the router's choice."""
        return None

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

    routing = Routing()
    makes_window_masks = True
    """Whether layers with a window get it as blocks of a mask, where attention takes such; cores
    that keep keys and values don't."""

    def __init__(self, args: DecoderArgs, seq_len: int) -> None:
        super().__init__()
        self.args, self.table, self.seq_len = args, args.table, seq_len
        self.own_part: Callable[[Tensor], Tensor] = lambda of_tokens: of_tokens
        spec, modules = self.table, self.table.modules
        embedding = build_layer(modules["tok_embeddings"]["weight"])
        assert isinstance(embedding, Embedding)
        self.tok_embeddings: Embedding | None = embedding
        self.layers = nn.ModuleDict({str(i): Block(layer) for i, layer in enumerate(spec.layers)})
        self.norm: nn.Module | None = build_layer(modules["norm"]["weight"], spec.norm_eps)
        self.output: Projection | None = Projection(modules["output"])
        for name, rope in self.rope_caches.items():
            # fp32 whatever the parameters are: bf16 has no exact positions
            cache = torch.empty(2, seq_len, rope.head_dim // 2, dtype=torch.float32)
            self.register_buffer(name, cache, persistent=False)

    @property
    def rope_caches(self) -> dict[str, RopeSpec]:
        """The rotation of each buffer of cosines and sines, (2, S, H/2), by the buffer's name."""
        return {f"rope_{number}": rope for number, rope in enumerate(self.table.ropes)}

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
        for name, rope in self.rope_caches.items():
            cache = self.get_buffer(name)
            cache.copy_(rope_cache(self.seq_len, rope, cache.device))

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
        if self.output is not None and self.table.tie_embeddings:
            assert self.tok_embeddings is not None  # a pipeline does not cut it off
            table = self.tok_embeddings.cast_table()  # once, so that both uses have one gradient
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens, table=table)
        masks = self._masks(x, documents, positions)
        if documents is not None:
            positions = positions_in_document(documents, positions)
        places = slice(tokens.shape[1]) if positions is None else positions
        rotations = {
            rope: [half[places] for half in self.get_buffer(name).unbind(0)]
            for name, rope in self.rope_caches.items()
        }
        counted = None
        if labels is not None and self.table.mixtures:
            counted = self.own_part(labels != PADDING).flatten()
        for name, block in self.layers.items():
            mixture, spec = block.feed_forward, self.table.layers[int(name)].attention
            cos, sin = rotations[spec.rope]
            mask = masks.get(spec.window)
            if not isinstance(mixture, Mixture):
                x = block(x, cos, sin, mask)
                continue
            given = self.routing.given(int(name), len(x))
            x, choice, figures, gap = block(x, cos, sin, mask, given, counted)
            if torch.is_grad_enabled():  # here and not in the block, which may be computed again
                mixture.note(choice if given is None else given, figures, counted)
            self.routing.note(int(name), choice, gap)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.output is None else self.output(x, labels, table)

    def _masks(
        self, x: Tensor, documents: Tensor | None, positions: Tensor | None
    ) -> dict[int | None, Mask]:
        """Return the masks of this stage's layers by their window, each made once for all layers.

        Without documents, cores need no mask for a window, but on GPUs: flex attention takes it as
        blocks, and those are made outside of compiled layers.
        """
        windows = dict.fromkeys(
            self.table.layers[int(name)].attention.window for name in self.layers
        )
        if documents is None:
            if not (self.makes_window_masks and makes_blocks(x.device)):
                return {}
            windows.pop(None, None)
            # a rank with a part of the sequence gives positions, and `seq_len` is the whole
            num_keys = x.shape[1] if positions is None else self.seq_len
            documents = torch.zeros(len(x), num_keys, dtype=torch.int32, device=x.device)
        return {window: build_mask(documents, positions, window) for window in windows}
