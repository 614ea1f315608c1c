"""A decoder of any family, as plain single-device PyTorch."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.models.args import DecoderArgs
from meshwright.models.attention import (
    Mask,
    block_mask,
    dense_mask,
    makes_blocks,
    positions_in_document,
    rope_cache,
)
from meshwright.models.layers import Embedding, build_layer, build_part
from meshwright.models.loss import PADDING, SummedLoss
from meshwright.models.mixture import Mixture
from meshwright.models.parameter import Parameter
from meshwright.models.table import AttentionSpec, LayerSpec, PredictorSpec, RopeSpec


class Block(nn.Module):
    """Attention, then feed-forward, each added to the residual stream.

    Norms are of the input of each (Xiong et al. 2020, arXiv:2002.04745), of its output (OLMo Team
    2024, arXiv:2501.00656, section 3.2), or of both (Gemma Team 2024, arXiv:2408.00118, section 2).
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.norm, self.residual_scale = spec.norm, spec.residual_scale
        self.attention_norm: nn.Module = build_part(spec.norm_spec)
        self.attention: nn.Module = build_part(spec.attention)
        if spec.norm == "sandwich":
            self.post_attention_norm: nn.Module = build_part(spec.norm_spec)
        self.ffn_norm: nn.Module = build_part(spec.norm_spec)
        self.feed_forward: nn.Module = build_part(spec.feed_forward)
        if spec.norm == "sandwich":
            self.post_ffn_norm: nn.Module = build_part(spec.norm_spec)

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: Mask | None = None,
        *routing: Tensor | None,
    ) -> Tensor | tuple[Tensor | None, ...]:
        """(B, S, D) -> (B, S, D); with experts also the other results of `Mixture`.

        Args:
            mask: of softmax attention; linear attention takes the documents, (B, S) int.
            routing: further arguments of `Mixture`.
        """
        is_post = self.norm == "post"
        out = self.attention(x if is_post else self.attention_norm(x), cos, sin, mask)
        if self.norm != "pre":
            out = self.attention_norm(out) if is_post else self.post_attention_norm(out)
        x = self._add(x, out)
        out = self.feed_forward(x if is_post else self.ffn_norm(x), *routing)
        out, *others = out if isinstance(out, tuple) else (out,)
        if self.norm != "pre":
            out = self.ffn_norm(out) if is_post else self.post_ffn_norm(out)
        x = self._add(x, out)
        return (x, *others) if others else x

    def _add(self, x: Tensor, out: Tensor) -> Tensor:
        return x + (out if self.residual_scale == 1 else out * self.residual_scale)


class Predictor(Block):
    """A block that predicts a token further away than the model does (MTP).

    `forward` takes the vectors of tokens that follow, and then the inputs of a `Block`.
    """

    def __init__(self, spec: PredictorSpec) -> None:
        super().__init__(spec)
        self.enorm, self.hnorm = build_part(spec.norm_spec), build_part(spec.norm_spec)
        self.eh_proj = build_layer(spec.modules["eh_proj"]["weight"])
        self.head_norm: nn.Module = build_part(spec.norm_spec)

    def forward(  # type: ignore[override]  # it joins two inputs
        self, x: Tensor, following: Tensor, *others: Tensor | Mask | None
    ) -> Tensor | tuple[Tensor | None, ...]:
        """(B, S, D) twice -> (B, S, D), normalized; with experts also the results of `Mixture`.

        Args:
            x: the normalized result of the model, or of the predictor before.
            following: embedding of the token that is as many places further as the predictor's
                number, counted from 1.
        """
        joined = torch.cat([self.enorm(following), self.hnorm(x)], -1)
        x = self.eh_proj(joined.flatten(0, 1)).unflatten(0, joined.shape[:2])
        out = super().forward(x, *others)  # type: ignore[arg-type]
        if isinstance(out, Tensor):
            normed: Tensor = self.head_norm(out)
            return normed
        return self.head_norm(out[0]), *out[1:]


def build_block(spec: LayerSpec) -> Block:
    return Predictor(spec) if isinstance(spec, PredictorSpec) else Block(spec)


class Projection(nn.Module):
    """The projection to logits, by its own weight or by the embedding's.

    Source of the latter: Press and Wolf 2016, arXiv:1608.05859. It then holds no second name of the
    weight, because sharing doesn't survive the move from meta, which gives every module tensors of
    its own. `loss` knows how to multiply by the weight, so that tensor parallelism has one thing to
    replace.

    Args:
        parameters: the table's.
        scale: of the logits.
        cap: of the logits, as `SummedLoss` takes it.
    """

    weight: Tensor

    def __init__(
        self, parameters: Mapping[str, Parameter], scale: float = 1.0, cap: float | None = None
    ) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.empty(parameter.shape)))
        self.scale, self.loss = scale, SummedLoss(cap=cap)

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        table: Tensor | None = None,
        loss_weights: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(B, S, D) -> (B, S, V) logits, or with (B, S) labels their summed loss.

        Args:
            table: (V, D), the embedding's, where there is no weight.
            loss_weights: (B,), as `SummedLoss` takes them.
            scales: as `SummedLoss.with_future` takes them; the results are then its results.
        """
        weight = self.weight if table is None else table
        x = x if self.scale == 1 else x * self.scale  # of fewer numbers than the logits
        if labels is None:
            return self.loss.logits(x, weight)
        if scales is None:
            return self.loss(x, weight, labels, loss_weights)
        return self.loss.with_future(x, weight, labels, scales)


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
        key_positions: of a window, S and a device, (keys,) int64 where the keys are that cores with
            the window get, in their order, or None for all; context parallelism replaces it.
        mtp_losses: (k,) fp32, of a model that predicts further tokens: the losses of each depth in
            this step so far, on this rank.
    """

    mtp_losses: Tensor
    routing = Routing()
    has_copy = False
    """Whether this is a pipeline's last stage, whose embedding only projects to logits, or looks
    up the tokens that predictors take."""
    makes_masks = True
    """Whether layers with a window or a soft cap get blocks of a mask, where attention takes such;
    cores that keep keys and values don't."""

    def __init__(self, args: DecoderArgs, seq_len: int) -> None:
        super().__init__()
        self.args, self.table, self.seq_len = args, args.table, seq_len
        self.own_part: Callable[[Tensor], Tensor] = lambda of_tokens: of_tokens
        self.key_positions: Callable[..., Tensor | None] = lambda *_: None
        spec, modules = self.table, self.table.modules
        embedding = build_layer(modules["tok_embeddings"]["weight"])
        assert isinstance(embedding, Embedding)
        self.tok_embeddings: Embedding | None = embedding
        self.layers = nn.ModuleDict(
            {str(i): build_block(layer) for i, layer in enumerate(spec.layers)}
        )
        self.norm: nn.Module | None = build_part(spec.norm_spec)
        self.output: Projection | None = Projection(
            modules["output"], spec.output_scale, spec.output_cap
        )
        for name, rope in self.rope_caches.items():
            # fp32 whatever the parameters are: bf16 has no exact positions
            cache = torch.empty(2, seq_len, rope.head_dim // 2, dtype=torch.float32)
            self.register_buffer(name, cache, persistent=False)
        if spec.mtp_depth:
            self.register_buffer("mtp_losses", torch.zeros(spec.mtp_depth), persistent=False)

    @property
    def rope_caches(self) -> dict[str, RopeSpec]:
        """The rotation of each buffer of cosines and sines, (2, S, H/2), by the buffer's name."""
        return {f"rope_{number}": rope for number, rope in enumerate(self.table.ropes)}

    def mixtures(self) -> dict[int, Mixture]:
        """MLPs with experts, by the number of their layer in the model."""
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
        if self.table.mtp_depth:
            self.mtp_losses.zero_()
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
        loss_weights: Tensor | None = None,
        future_tokens: Tensor | None = None,
        future_labels: Tensor | None = None,
        future_scales: Tensor | None = None,
    ) -> Tensor:
        """(B, S) int64 -> () fp32, the loss added up over `labels`; without them (B, S, V) logits.

        A stage without the embedding takes (B, S, D) instead; one without the output gives it.
        Where gradients are recorded, the loss also has the gradients of the losses of
        `future_labels`, each depth's times its scale, and `mtp_losses` gets these losses.

        Args:
            labels: (B, S) int64, as `SummedLoss` takes them. A stage without the output needs
                them for its routers, which don't count padding.
            positions: (S,) or (B, S) int64 of the tokens in their sequence, else 0 .. S-1.
            documents: (B, S) int: which document of its sequence each position belongs to, rising
                from 0. Attention then stops between them, and the positions that it rotates by
                start at 0 in each. Of whole sequences, also where `tokens` are parts of them.
            loss_weights: (B,) fp32, as `SummedLoss` takes them.
            future_tokens, future_labels, future_scales: as in `Batch`.
        """
        is_predicting = self.output is not None and torch.is_grad_enabled()
        future = None if future_tokens is None or not is_predicting else future_tokens
        table = None
        if self.output is not None and self.table.tie_embeddings:
            assert self.tok_embeddings is not None  # a pipeline's last stage has a copy
            table = self.tok_embeddings.cast_table()  # once, so that both uses have one gradient
        x, following = self._embed(tokens, future, table)
        masks = self.masks(x, documents, positions)
        if documents is not None:
            positions = positions_in_document(documents, positions)
        places = slice(tokens.shape[1]) if positions is None else positions
        rotations = {
            rope: [half[places] for half in self.get_buffer(name).unbind(0)]
            for name, rope in self.rope_caches.items()
        }

        def pass_through(name: str, counted: Tensor | None, *inputs: Tensor) -> Tensor:
            spec = self.table.layers[int(name)].attention
            cos, sin = (None, None) if spec.rope is None else rotations[spec.rope]
            is_softmax = isinstance(spec, AttentionSpec)
            mask = masks.get((spec.window, spec.has_own_core)) if is_softmax else documents
            return self._pass_through(name, counted, *inputs, cos, sin, mask)

        counted = self._counted(labels)
        for name in self.layers:
            if name not in self.table.predictors:
                x = pass_through(name, counted, x)
        if self.norm is not None:
            x = self.norm(x)
        if self.output is None:
            return x
        if future is None:
            return self.output(x, labels, table, loss_weights)
        assert labels is not None
        assert future_labels is not None
        states, every_label = [x], [labels, *future_labels.unbind(1)]
        for depth, name in enumerate(self.table.predictors):
            counted = self._counted(every_label[depth + 1])
            states.append(pass_through(name, counted, states[-1], following[depth]))
        # one call: FSDP2 gathers a module's weights for its forward, and frees them after it
        loss, of_depths = self.output(
            torch.cat(states), torch.cat(every_label), table, scales=future_scales
        )
        self.mtp_losses += of_depths
        return loss

    def _counted(self, labels: Tensor | None) -> Tensor | None:
        """(B, S) -> (B S,) bool: the tokens here that routers count; None: all, or no router."""
        if labels is None or not self.table.mixtures:
            return None
        return self.own_part(labels != PADDING).flatten()

    def _embed(
        self, tokens: Tensor, future: Tensor | None, table: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the input of the stage's first layer, (B, S, D), and the input of each predictor.
        All tokens are looked up at once, so that FSDP2 gathers the embedding once."""
        if self.tok_embeddings is None:
            return tokens, []
        wanted = [] if self.has_copy else [tokens]
        wanted += [] if future is None else future.unbind(1)
        if not wanted:
            return tokens, []
        ids = wanted[0] if len(wanted) == 1 else torch.cat(wanted)
        vectors = self.tok_embeddings(ids, table=table)
        if self.table.embedding_scale != 1:
            # rounded to the type of activations, as transformers does
            options = {"dtype": vectors.dtype, "device": vectors.device}
            vectors = vectors * torch.full((), self.table.embedding_scale, **options)
        if len(wanted) == 1 and not self.has_copy:
            return vectors, []
        each = [*vectors.chunk(len(wanted))]
        return (tokens, each) if self.has_copy else (each[0], each[1:])

    def _pass_through(self, name: str, counted: Tensor | None, *inputs: Any) -> Tensor:
        """Return a layer's result, and take note of what its router did."""
        block = self.layers[name]
        if not isinstance(block.feed_forward, Mixture):
            return block(*inputs)
        given = self.routing.given(int(name), len(inputs[0]))
        x, choice, figures, gap = block(*inputs, given, counted)
        if torch.is_grad_enabled():  # here and not in the block, which may be computed again
            block.feed_forward.note(choice if given is None else given, figures, counted)
        self.routing.note(int(name), choice, gap)
        return x

    def masks(
        self, x: Tensor, documents: Tensor | None, positions: Tensor | None
    ) -> dict[tuple[int | None, bool], Mask]:
        """Return the masks of this stage's layers, by their window and whether a core of the user's
        takes it, each made once for all layers.

        Without documents, our cores need no mask for a window or a soft cap, but on GPUs: flex
        attention takes blocks, and those are made outside of compiled layers.
        """
        attentions = self.table.attentions
        specs = [spec for layer, spec in attentions.items() if str(layer) in self.layers]
        if documents is None:
            has_blocks = self.makes_masks and makes_blocks(x.device)
            specs = [
                spec for spec in specs if spec.has_own_core or (has_blocks and spec.needs_mask)
            ]
            if not specs:
                return {}
            # a rank with a part of the sequence gives positions, and `seq_len` is the whole
            num_keys = x.shape[1] if positions is None else self.seq_len
            documents = torch.zeros(len(x), num_keys, dtype=torch.int32, device=x.device)
        masks: dict[tuple[int | None, bool], Mask] = {}
        for spec in specs:
            window, is_own = kind = spec.window, spec.has_own_core
            if kind in masks:
                continue
            # a core of the user's gets the keys of all positions
            keys = None if is_own else self.key_positions(window, documents.shape[1], x.device)
            make_mask = block_mask if makes_blocks(x.device) and not is_own else dense_mask
            masks[kind] = make_mask(documents, positions, window, keys)
        return masks
