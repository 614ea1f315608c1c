"""What each token's logits depend on: three properties of the model, measured on one process.

Comparing meshes can't show a window that is off by one everywhere, or documents that leak into
each other on every mesh. These checks need no second implementation, so they hold for a model of
your own as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import nan
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.commands.prove.cases import reference_case
from meshwright.commands.prove.checked import NAMED
from meshwright.commands.prove.job import look_on, own_device
from meshwright.commands.prove.ranks import RankError, RankPool
from meshwright.commands.prove.weights import (
    calm_post_norms,
    in_short_chunks,
    show_attention,
    show_layers_without_positions,
)
from meshwright.config.changes import changed
from meshwright.config.job_config import JobConfig
from meshwright.models.decoder import Decoder, Routing
from meshwright.models.router import BalanceLosses
from meshwright.models.table import LayerSpec
from meshwright.parallelisms.initialize import initialize
from meshwright.parallelisms.meshes import build_meshes
from meshwright.system.errors import in_ranges
from meshwright.train.build import build_model
from meshwright.train.resolve import resolve

LOGITS_BOUND = 1e-5
"""Relative error of logits that are computed in another batch, or at another place of it."""

DOCUMENT_LENGTHS = (1, 5, 9, 2)
"""Tokens of the documents that are packed into a sequence; the last document fills it."""


@dataclass(frozen=True)
class Property:
    """A property of the model on one process, and whether it holds."""

    name: str
    error: float
    """Of `reach` the number of queries that see other keys; else a relative error of logits."""
    bound: float
    detail: str
    """What was compared."""
    failures: Sequence[str] = ()
    """One line each, without the property's name."""

    @property
    def verdict(self) -> str:
        """Equal or FAILED."""
        return "FAILED" if self.failures else "equal"


def check_properties(small: JobConfig, backend: str = "gloo") -> list[Property]:
    """Measure `causal`, `reach` and `isolation` in a separate process, in less than a second.

    Args:
        small: from `shrink`.
        backend: of the process, as `RankPool` takes it.
    """
    with closing(RankPool(1, backend=backend)) as pool:
        try:
            properties: list[Property] = pool.run(measure_properties, small)[0]
        except RankError as error:
            properties = [Property("causal, reach, isolation", nan, 0, "", [f"stopped: {error}"])]
    return properties


@in_short_chunks
def measure_properties(small: JobConfig) -> list[Property]:
    """Measure on this process only, in fp32 and with the attention that the small job has."""
    config = reference_case(small).config
    args = config.model.args | {"mtp_depth": 0}  # what predictors see has no logits
    config = changed(config, {"model": {"args": args}})
    device = own_device()
    resolved = resolve(config, look_on(device, config, 1))
    training = resolved.config.training
    model = build_model(resolved, build_meshes(resolved.dims, device.type), device)
    decoder = model.stages[0]
    initialize(decoder, training.seed)
    show_attention(decoder)
    calm_post_norms(decoder)
    show_layers_without_positions(decoder)
    for mixture in decoder.mixtures().values():
        # they would add their own gradients, between all tokens
        mixture.losses = BalanceLosses()
    generator = torch.Generator().manual_seed(training.seed)
    size = (2, training.seq_len)
    tokens = torch.randint(resolved.model_args.vocab_size, size, generator=generator).to(device)
    documents = None
    if training.mask_documents:
        lengths = document_lengths(training.seq_len)
        documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        documents = documents.to(device)
    return [
        check_causal(decoder, tokens[0], documents),
        check_reach(decoder, tokens[0], documents),
        check_isolation(decoder, tokens, documents),
    ]


def document_lengths(seq_len: int) -> list[int]:
    """Return the lengths of documents that fill a sequence of at least 18 tokens."""
    return [*DOCUMENT_LENGTHS, seq_len - sum(DOCUMENT_LENGTHS)]


class _Choices(Routing):
    """Records the experts that each layer chooses, or prescribes recorded ones.

    The choice of the highest scores isn't continuous, so rounding could turn it.

    Args:
        prescribed: (B, S, K) int64 by number of the layer; none for layers that choose.
    """

    def __init__(self, prescribed: Mapping[int, Tensor] = MappingProxyType({})) -> None:
        self._prescribed = prescribed
        self.chosen: dict[int, Tensor] = {}

    def given(self, layer: int, num_sequences: int) -> Tensor | None:
        return self._prescribed.get(layer)

    def note(self, layer: int, choice: Tensor, gap: Tensor | None) -> None:
        self.chosen[layer] = choice


@torch.no_grad()
def _logits(
    decoder: Decoder, tokens: Tensor, documents: Tensor | None, choices: _Choices
) -> Tensor:
    """(B, S) int64 and (S,) int -> (B, S, V) in fp64."""
    decoder.routing = choices
    of_rows = None if documents is None else documents.expand(len(tokens), -1)
    logits = decoder(tokens, documents=of_rows).double()
    decoder.routing = Routing()
    return logits


def check_causal(decoder: Decoder, tokens: Tensor, documents: Tensor | None) -> Property:
    """Change every token after position t, for each t: logits up to t stay as they are.

    Args:
        tokens: (S,) int64.
        documents: (S,) int: which document each token belongs to; None: they aren't masked.
    """
    seq_len, vocab_size = len(tokens), decoder.table.vocab_size
    # row t keeps the tokens up to t, so the last row has them all
    is_kept = torch.ones(seq_len, seq_len, dtype=torch.bool, device=tokens.device).tril()
    rows = torch.where(is_kept, tokens, (tokens + 1) % vocab_size)
    original = _Choices()
    _logits(decoder, tokens.expand(seq_len, -1), documents, original)
    logits = _logits(decoder, rows, documents, _Choices(original.chosen))
    errors = _relative_errors(logits, logits[-1])
    errors[~is_kept] = 0.0
    failures = []
    for last_kept, position in (~(errors <= LOGITS_BOUND)).nonzero()[:1].tolist():
        error = errors[last_kept, position].item()
        failures.append(
            f"the logits at position {position} change with tokens after {last_kept}, "
            f"relative error {error:.1e}"
        )
    detail = "no logit changes with later tokens"
    return Property("causal", errors.max().item(), LOGITS_BOUND, detail, failures)


def check_isolation(decoder: Decoder, tokens: Tensor, documents: Tensor | None) -> Property:
    """Compare the logits of a batch with those of each of its sequences by itself; and if
    `documents` are masked, with those of each document by itself.

    Args:
        tokens: (B, S) int64.
        documents: as `check_causal`'s.
    """
    batch = _Choices()
    logits = _logits(decoder, tokens, documents, batch)
    parts = [(0, tokens.shape[1], "")]
    if documents is not None:
        ends = accumulate(torch.bincount(documents).tolist(), initial=0)
        parts = [(*bounds, f"document {n} of ") for n, bounds in enumerate(pairwise(ends))]
    worst, failures = 0.0, list[str]()
    for row in range(len(tokens)):
        for begin, end, name in parts:
            at = (slice(row, row + 1), slice(begin, end))
            chosen = {layer: choice[at] for layer, choice in batch.chosen.items()}
            alone = _logits(decoder, tokens[at], None, _Choices(chosen))
            error = _relative_errors(logits[at], alone).max().item()
            worst = error if not error <= worst else worst
            if not error <= LOGITS_BOUND:
                failures.append(
                    f"the logits of {name}sequence {row} are not those that it has by itself, "
                    f"relative error {error:.1e}"
                )
    what = "sequences of a batch" if documents is None else "documents of packed sequences"
    detail = f"logits of {what} equal each one's by itself"
    return Property("isolation", worst, LOGITS_BOUND, detail, _first(failures))


def _relative_errors(logits: Tensor, wanted: Tensor) -> Tensor:
    """(..., S, V) twice -> (..., S): norms of differences over norms, at each position."""
    return (logits - wanted).norm(dim=-1) / wanted.norm(dim=-1)


def window_of(layer: LayerSpec) -> int | None:
    """Return how many keys a query of a layer sees, itself included; None: all before it."""
    return layer.attention.window


def visible_keys(seq_len: int, window: int | None, documents: Tensor | None) -> Tensor:
    """(queries, keys) bool: which keys each query should see."""
    position = torch.arange(seq_len)
    distance = position.unsqueeze(1) - position
    is_visible = distance >= 0
    if window is not None:
        is_visible &= distance < window
    if documents is not None:
        is_visible &= documents.unsqueeze(1) == documents
    return is_visible


def check_reach(decoder: Decoder, tokens: Tensor, documents: Tensor | None) -> Property:
    """Compare which tokens have a gradient to each query with the ones that it should see: in each
    layer, and in the decoder, through all its layers.

    A key that is masked has a gradient of exactly zero, and one that is seen has another.

    Args:
        tokens, documents: as `check_causal`'s.
    """
    seq_len, layers = len(tokens), decoder.table.layers
    windows = [window_of(layer) for layer in layers]
    measured = _seen_by_layer(decoder, tokens, documents)
    of_tokens = None if documents is None else documents.cpu()
    wanted = [visible_keys(seq_len, window, of_tokens) for window in windows]
    # a token of the first layer reaches a logit through any chain of layers
    total = None if None in windows else 1 + sum(window - 1 for window in windows if window)
    measured.append(_seen_by_decoder(decoder, tokens, documents))
    wanted.append(visible_keys(seq_len, total, of_tokens))
    names = [*(f"layer {number}" for number in range(len(layers))), "the decoder"]
    num_wrong, failures = 0, list[str]()
    for name, seen, should_see in zip(names, measured, wanted, strict=True):
        if wrong := (seen != should_see).any(1).nonzero().flatten().tolist():
            num_wrong += len(wrong)
            query = wrong[-1]
            text = f"query {query} sees {_keys(seen[query])} instead of {_keys(should_see[query])}"
            failures.append(f"{name}: {text}; {len(wrong)} of {seq_len} queries are wrong")
    detail = f"keys with a gradient to a query: {_describe(windows)}"
    return Property("reach", num_wrong, 0, detail, _first(failures))


def _keys(is_seen: Tensor) -> str:
    return f"keys {in_ranges(is_seen.nonzero().flatten().tolist())}" if is_seen.any() else "no key"


def _describe(windows: Sequence[int | None]) -> str:
    """Say which keys a query of each layer sees: "the last 7 in layers 0-2"."""
    parts = []
    for window in dict.fromkeys(windows):
        numbers = [number for number, of_layer in enumerate(windows) if of_layer == window]
        keys = "all up to itself" if window is None else f"the last {window}"
        parts.append(f"{keys} in {'layer' if len(numbers) == 1 else 'layers'} {in_ranges(numbers)}")
    return ", ".join(parts)


def _first(failures: Sequence[str]) -> list[str]:
    more = [f"and {len(failures) - NAMED} more"] if len(failures) > NAMED else []
    return [*failures[:NAMED], *more]


def _seen_by_layer(decoder: Decoder, tokens: Tensor, documents: Tensor | None) -> list[Tensor]:
    """Return (queries, keys) bool for each layer: which of its inputs have a gradient."""
    inputs, outputs = list[Tensor](), list[Tensor]()

    def begin_here(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        inputs.append(args[0].detach().requires_grad_())
        return inputs[-1], *args[1:]

    def keep(_: nn.Module, __: object, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    blocks = decoder.layers.values()
    with _hooked(
        *(block.register_forward_pre_hook(begin_here) for block in blocks),
        *(block.register_forward_hook(keep) for block in blocks),
    ):
        _forward_for_each_query(decoder, tokens, documents)
    return [_has_gradient(*pair) for pair in zip(outputs, inputs, strict=True)]


def _seen_by_decoder(decoder: Decoder, tokens: Tensor, documents: Tensor | None) -> Tensor:
    """Return (queries, keys) bool: which embeddings have a gradient to the logits of a query."""
    embeddings = list[Tensor]()

    def begin_here(_: nn.Module, __: object, output: Tensor) -> Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1]

    assert decoder.tok_embeddings is not None
    with _hooked(decoder.tok_embeddings.register_forward_hook(begin_here)):
        logits = _forward_for_each_query(decoder, tokens, documents)
    return _has_gradient(logits, embeddings[0])


@contextmanager
def _hooked(*handles: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _forward_for_each_query(decoder: Decoder, tokens: Tensor, documents: Tensor | None) -> Tensor:
    """Return (S, S, V) logits of a batch that has the same sequence once for each query."""
    rows = tokens.expand(len(tokens), -1)
    of_rows = None if documents is None else documents.expand(len(tokens), -1)
    logits: Tensor = decoder(rows, documents=of_rows)
    return logits


def _has_gradient(outputs: Tensor, inputs: Tensor) -> Tensor:
    """(S, S, D) twice -> (S, S) bool: whether output t of sequence t depends on its input s.

    One backward serves all queries, since sequence t has the gradient of query t only.
    """
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(outputs.shape[-1], generator=generator).to(outputs.device)
    own = outputs.diagonal(dim1=0, dim2=1).transpose(0, 1)  # (S, D)
    (gradient,) = torch.autograd.grad((own * weights).sum(), inputs)
    return (gradient != 0).any(-1).cpu()
