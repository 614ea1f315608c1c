"""The trainer's own parts, put together as it does, for a few steps."""

import hashlib
import zlib
from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshwright.checkpoint.state import RNG, TrainingTensors
from meshwright.config.training import Source, Training
from meshwright.datasets.encoding import NO_LOSS, Encoder, Tokens
from meshwright.datasets.files import Entry
from meshwright.datasets.rows import IndexedDocuments
from meshwright.datasets.samples import CachedSource, packed_in_memory
from meshwright.datasets.stream import Cursor, OpenSource, StreamedSource
from meshwright.datasets.token_cache.cache import BLOCK_DOCUMENTS, TokenCache
from meshwright.datasets.tokenizers.kinds import ByteTokenizer
from meshwright.metrics.reporter import Reporter
from meshwright.metrics.sinks import Record
from meshwright.models.decoder import Decoder
from meshwright.models.loss import PADDING
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.replay import Choices
from meshwright.train.bad_steps import BadStepDetector
from meshwright.train.build import build_loader, work_of
from meshwright.train.optim.optimizers import LR_SCALE
from meshwright.train.resolve import ResolvedJob
from meshwright.train.trainer import build_trainer

STRETCH = (8.0, 16.0)
"""Of queries and keys at the first and at the last position."""

STRETCH_NORMALISED = (1.0, 2.0)
"""The same, of queries and keys that the model normalises."""

EMBEDDING_SCALE, BRANCH_SCALE = 32.0, 0.125
"""Of the embedding and of the norms' weights where blocks have their norms at the end. Powers of
two, so exact."""


class Records:
    """A sink that keeps the last record."""

    last: Record

    def write(self, record: Record) -> None:
        self.last = record

    def close(self) -> None:
        """Do nothing."""


class Job:
    """One rank's part of a small job. Its weights are arbitrary until somebody sets them.

    Args:
        source: in the place of the config's.
        cursor: where it begins to read.
        tokens_seen: before it.

    Attributes:
        is_token: of each position of this rank's last step, (sequences, S) bool: no padding.
    """

    def __init__(
        self,
        plan: ResolvedJob,
        meshes: Meshes,
        source: OpenSource,
        cursor: Cursor | None = None,
        tokens_seen: int = 0,
    ) -> None:
        device = torch.device("cpu")
        self._plan, self._meshes = plan, meshes
        self._trainer = build_trainer(plan, meshes, device)
        self.model, self.optimizer = self._trainer.model, self._trainer.optimizer
        self.average = self._trainer.average
        self.cursor = cursor or Cursor()
        self._loader = build_loader(plan, [source], meshes, device, self.cursor)
        self._detector = BadStepDetector(device)
        self._records, self._seconds = Records(), 0.0
        self.reporter = Reporter(
            work_of(plan, device),
            device,
            self._trainer.phases,
            [self._records],
            tokens_seen,
            clock=lambda: self._seconds,
        )

    def step(self, step: int, samples: dict[tuple[int, int], str]) -> Record:
        """Take one optimizer step, and return its record, as if it had taken a second. Collective.

        Args:
            samples: gets the hashes of this rank's, by step and index in the global batch.
        """
        data, dims = next(self._loader), self._plan.dims
        self.cursor = data.cursor
        self.is_token = torch.cat([batch.labels for batch in data.batches]) != PADDING
        for number, batch in enumerate(data.batches):
            first = (number * dims.dp + self._meshes.dp.get_local_rank()) * len(batch.tokens)
            parts = [p for p in (batch.tokens, batch.labels, batch.documents) if p is not None]
            for index, sample in enumerate(zip(*parts, strict=True), first):
                samples[step, index] = _hash(*sample)
        # the first step shows gradients as they are
        trainer = self._trainer if step > 1 else replace(self._trainer, max_norm=float("inf"))
        result = trainer.step(step, data.batches, self._detector)
        self._seconds += 1
        self.reporter.count(step, 0.0)
        group = self.optimizer.param_groups[0]
        figures = trainer.figures_of(step, result) | data.figures
        figures["optim/lr_taken"] = group["lr"] / group[LR_SCALE]
        self.reporter.report(step, figures)
        return self._records.last

    @property
    def tensors(self) -> TrainingTensors:
        """Everything that a checkpoint holds as tensors."""
        return self._trainer.tensors

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's and the optimizer's `tensors`."""
        state = self.tensors.state_dict()
        return {name: tensor for name, tensor in state.items() if not name.startswith(RNG)}

    def close(self) -> None:
        """Stop reading ahead."""
        self._loader.close()


def show_attention(stage: Decoder) -> None:
    """Stretch the rotary cache of `stage`, more towards its end, in place.

    Initial queries and keys are so small that attention is nearly a mean of its inputs: which
    token is where would hardly show. And rotary attention sees nothing but distances: if documents
    did not begin at position 0, each query would still see its own keys at the right ones. Here
    scores are of order 1, and depend on places. Queries and keys that are normalised make such
    scores by themselves: stretched as far, attention would be chaotic, and rounding would grow.
    """
    is_normalised = any(layer.attention.qk_norm for layer in stage.table.layers)
    stretch = STRETCH_NORMALISED if is_normalised else STRETCH
    for name in stage.rope_caches:
        cache = stage.get_buffer(name)  # (2, S, H/2)
        cache *= torch.linspace(*stretch, cache.shape[1]).unsqueeze(1)


def unbalance(model: LocalModel) -> None:
    """Give routers loads as if of a step before, uneven: at even ones losses have no gradient."""
    for stage in model.stages:
        for mixture in stage.mixtures().values():
            mixture.load.copy_(torch.arange(1, len(mixture.load) + 1))


class Books:
    """Loads and biases as the choices of a step make them, counted here once more: a reference that
    counts validation, recomputation, padding or a part of the tokens would be wrong as the mesh is.

    Args:
        rate: `experts.bias_update_rate`.
    """

    def __init__(self, rate: float) -> None:
        self._rate, self._biases = rate, dict[str, Tensor]()

    def wrong_counts(self, model: LocalModel, choices: Choices, is_token: Tensor) -> list[str]:
        """Return the names of loads and biases that are others, to the bit.

        Args:
            choices: of the step that was taken last.
            is_token: (sequences, S) bool, of all ranks.
        """
        found = []
        mixtures = [pair for stage in model.stages for pair in stage.mixtures().items()]
        for number, mixture in mixtures:
            chosen, name = choices[number][is_token].flatten(), f"layers.{number}.feed_forward"
            counts = torch.bincount(chosen, minlength=len(mixture.load))
            bias = self._biases.setdefault(name, torch.zeros(len(counts)))
            if mixture.router.weight.requires_grad:  # a frozen router keeps its choice
                bias += self._rate * (len(chosen) - counts * len(counts)).sign()
            found += [f"{name}.load"] * (not torch.equal(mixture.load, counts))
            found += [f"{name}.bias"] * (not torch.equal(mixture.bias, bias))
        return found


@torch.no_grad()
def calm_post_norms(stage: Decoder) -> None:
    """If the blocks of `stage` have their norms at the end, scale embedding and norms, in place.

    Such a block adds a vector of size 1, however small its attention's output, to a residual stream
    that begins at 0.02: so each rounding would grow from block to block. At these scales blocks add
    to the stream about as much as the blocks of other families do.
    """
    if all(layer.norm == "pre" for layer in stage.table.layers):
        return
    if stage.tok_embeddings is not None:
        stage.tok_embeddings.weight.mul_(EMBEDDING_SCALE)
    for name, parameter in stage.named_parameters():
        if name.endswith((".attention_norm.weight", ".ffn_norm.weight")):
            parameter.mul_(BRANCH_SCALE)


def _hash(*parts: Tensor) -> str:
    data = torch.cat(parts).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


SAVED_STEP = 4
"""After which the small job is saved, and resumed."""

NUM_DOCUMENTS = 1500
"""More than one block of a cache."""

SHORTEST, LONGEST = 3, 20
"""Tokens of a document."""

SHORTEST_PACKED = 14
"""Where documents are packed: then a third of the samples have padding."""

MISSING = (0.0, 0.0, 0.5, 1.0)
"""Share of a document's tokens that are no labels; each document draws one of these."""


@lru_cache(maxsize=8)  # a rank has one case after another, and most have the same data
def documents(vocab_size: int, seed: int, shortest: int = SHORTEST) -> list[Tokens]:
    """uint32 ids from the whole vocabulary, some with `NO_LOSS`.

    The next id is mostly the last one plus a number that the document keeps: attention within a
    document has something to learn, and from other documents it would learn something else.
    """
    random = np.random.default_rng(seed)
    found = []
    for _ in range(NUM_DOCUMENTS):
        length = random.integers(shortest, LONGEST + 1)
        ids = random.integers(vocab_size) + random.integers(1, 8) * np.arange(length)
        ids = np.where(random.random(length) < 0.2, random.integers(vocab_size, size=length), ids)
        is_missing = random.random(length) < random.choice(MISSING)
        found.append((ids % vocab_size + NO_LOSS * is_missing).astype(np.uint32))
    return found


class MemoryCache(TokenCache):
    """A token cache that lies in memory: nothing is tokenised, and every rank makes the same."""

    def __init__(self, pieces: list[Tokens]) -> None:  # not the base's: there is no folder
        self._all = np.concatenate(pieces)
        self._all_lengths = np.array([len(piece) for piece in pieces], np.uint32)
        self.content = f"{zlib.crc32(self._all.data):08x}"
        self.num_documents, self.num_tokens = len(pieces), len(self._all)
        ends = np.cumsum(self._all_lengths, dtype=np.int64)
        self.block_starts = np.array(
            [0, *ends[BLOCK_DOCUMENTS - 1 : -1 : BLOCK_DOCUMENTS], ends[-1]]
        )

    def lengths(self, block: int) -> npt.NDArray[np.uint32]:
        """As the base's."""
        begin = block * BLOCK_DOCUMENTS
        return self._all_lengths[begin : begin + BLOCK_DOCUMENTS]

    def tokens(self, begin: int, end: int) -> npt.NDArray[np.unsignedinteger]:
        """As the base's."""
        return self._all[begin:end]


class _Numbered(Encoder):
    """Gives the tokens of a document whose text is its number."""

    def __init__(self, pieces: list[Tokens]) -> None:
        self._pieces = pieces

    def encode(self, document: object) -> Tokens:
        return self._pieces[int(str(document))]


class Vocabulary(ByteTokenizer):
    """In the place of a tokenizer: every id of the model stands for some bytes of text."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    @cached_property
    def token_bytes(self) -> list[int]:
        """Of each of the V ids, as validations ask for it."""
        return [number % 5 for number in range(self.vocab_size)]


def documents_of(training: Training, vocab_size: int, seed: int) -> list[Tokens]:
    """Return the documents that `open_source` reads."""
    shortest = SHORTEST if training.packing == "cut" else SHORTEST_PACKED
    return documents(vocab_size, seed, shortest)


def open_source(training: Training, vocab_size: int, seed: int) -> OpenSource:
    """Documents in memory, streamed or not as `training` says."""
    entry = Entry("training", "synthetic", Source())
    pieces, is_cut = documents_of(training, vocab_size, seed), training.packing == "cut"
    if training.dataset_mode != "streamed":
        cache = MemoryCache(pieces)
        packing = None if is_cut else packed_in_memory(cache, training.seq_len + 1)
        return CachedSource(entry, cache, packing=packing)
    numbered = IndexedDocuments(len(pieces), str)
    shards, window = training.stream_shards, training.shuffle_window
    return StreamedSource(entry, numbered, _Numbered(pieces), shards, window)


def first_cursor(source: OpenSource, training: Training) -> Cursor:
    """Return where the small job begins to read: so near the end of an epoch of a cache that the
    next one begins after the resume. A stream begins at its start."""
    if not isinstance(source, CachedSource):
        return Cursor()
    batch = training.global_batch_size
    batches = source.samples_per_epoch(training.seq_len + 1) // batch
    begin = (batches - SAVED_STEP) * batch
    return Cursor(begin, (begin,))
