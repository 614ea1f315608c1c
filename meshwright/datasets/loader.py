"""This rank's part of every global batch, read ahead of the step that needs it."""

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from meshwright.datasets.encoding import NO_LOSS
from meshwright.datasets.samples import Sample, blank_sample
from meshwright.datasets.shards import EndOfData
from meshwright.datasets.stream import Cursor, SampleStream, merged
from meshwright.models.loss import IGNORE, PADDING, Batch
from meshwright.system.errors import DataError, config_error

STEPS_AHEAD = 4

CLOSE_WITHIN_S = 5.0
"""Seconds that `close` waits for a read to end: it may be waiting to try again."""


@dataclass(frozen=True)
class StepData:
    """One rank's data for one optimizer step."""

    batches: list[Batch]
    """One a microbatch, on the CPU, pinned if a device follows."""
    cursor: Cursor
    """Behind the step's whole global batch, as far as this rank knows it."""
    epochs: dict[str, float]
    """How often each source has been read."""

    @property
    def figures(self) -> dict[str, float]:
        """Return `epochs` by the names that records have for them."""
        return {f"data/epochs/{name}": count for name, count in self.epochs.items()}


def slots_of(rank: int, ranks: int, local_batch_size: int, global_batch_size: int) -> list[int]:
    """Return which samples of a global batch a data-parallel rank has: sample i goes to microbatch
    i // (ranks * local), and within that to rank (i // local) % ranks."""
    return [i for i in range(global_batch_size) if i // local_batch_size % ranks == rank]


class Loader:
    """Iterates over the steps of a job, from where `stream` is, to the end of the data.

    The stream is the same on every rank; each skips the samples of others. A thread reads ahead.

    Attributes:
        error: why no step follows the fetched ones; None if nothing went wrong.
    """

    error: Exception | None = None

    def __init__(
        self,
        stream: SampleStream,
        local_batch_size: int,
        *,
        mask_documents: bool,
        pin_memory: bool,
        mtp_depth: int = 0,
    ) -> None:
        self._stream, self._local_batch_size = stream, local_batch_size
        self._mask_documents, self._pin_memory = mask_documents, pin_memory
        self._mtp_depth = mtp_depth
        self._ready: queue.Queue[StepData | Exception | None] = queue.Queue(STEPS_AHEAD)
        self._fetched = deque[StepData]()
        self._is_over = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, name="loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[StepData]:
        return self

    def __next__(self) -> StepData:
        self.fetch(1)
        if self._fetched:
            return self._fetched.popleft()
        if self.error is not None:
            raise self.error
        raise StopIteration

    def fetch(self, count: int) -> int:
        """Wait until the next `count` steps are here, or fewer, if the data ends or fails before;
        return how many are."""
        while len(self._fetched) < count and not self._is_over:
            item = self._ready.get()
            if isinstance(item, StepData):
                self._fetched.append(item)
            else:
                self._is_over, self.error = True, item
        return len(self._fetched)

    @property
    def is_at_end(self) -> bool:
        """Whether the data ends with the last step that was taken, as far as was fetched."""
        return self._is_over and self.error is None and not self._fetched

    def close(self) -> None:
        """Stop reading ahead."""
        self._closed.set()
        end = time.monotonic() + CLOSE_WITHIN_S
        while self._thread.is_alive() and time.monotonic() < end:
            try:
                self._ready.get(timeout=0.1)
            except queue.Empty:
                continue

    def _read_ahead(self) -> None:
        try:
            while not self._closed.is_set() and (step := self._next_step()) is not None:
                self._ready.put(step)
            self._ready.put(None)
        except Exception as error:
            self._ready.put(error)
        except BaseException as error:  # a panic in Rust, an exit: the ranks would wait for ever
            what = f"the thread that reads it ended: {type(error).__name__}: {error}"
            self._ready.put(DataError(what))

    def _next_step(self) -> StepData | None:
        """None if the data ends before the global batch is full."""
        try:
            # every rank walks the order of all samples, so the order is the same on any mesh; those
            # of other ranks are None, and aren't read
            read = [self._stream.next_sample() for _ in range(self._stream.batch)]
        except EndOfData:
            return None
        mine = [sample for sample in read if sample is not None]
        batches = to_batches(
            mine,
            self._local_batch_size,
            self._mask_documents,
            tells_sources=self._stream.is_mixture,
            mtp_depth=self._mtp_depth,
        )
        if self._pin_memory:
            batches = [batch.pin_memory() for batch in batches]
        return StepData(batches, self._stream.cursor, self._stream.epochs)


def whole_cursor(cursor: Cursor) -> Cursor:
    """Merge the cursors of all ranks. Collective."""
    if not cursor.places:
        return cursor
    cursors = [cursor] * dist.get_world_size()
    dist.all_gather_object(cursors, cursor)
    return merged(cursors)


def padded_samples(stream: SampleStream, num_samples: int) -> Iterator[list[Sample]]:
    """Yield this rank's samples of each step; after the last of all, samples without a label
    follow.

    Raises:
        ConfigError: if the data ends before.
    """
    padding = blank_sample(stream.rules.length)
    for first in range(0, num_samples, stream.batch):
        left = num_samples - first
        try:
            read = [
                stream.next_sample() if index < left else padding if index in stream.slots else None
                for index in range(stream.batch)
            ]
        except EndOfData:
            key, rule = "validation.num_samples", f"{stream.names} holds fewer"
            raise config_error(key, num_samples, rule, "lower it, or add data") from None
        yield [sample for sample in read if sample is not None]


def to_batches(
    samples: Sequence[Sample],
    size: int,
    mask_documents: bool,
    *,
    tells_sources: bool = False,
    mtp_depth: int = 0,
) -> list[Batch]:
    """Batches of `size` samples, with the tokens and labels of `mtp_depth` further places."""
    raw = np.stack([sample.raw for sample in samples]).astype(np.int64)
    # a copy, since labels that don't count are overwritten, and the array holds the tokens as well
    tokens, labels = raw[:, :-1], raw[:, 1:].copy()
    if raw.max() >= NO_LOSS:
        labels[labels >= NO_LOSS] = IGNORE
        tokens = tokens & ~NO_LOSS
    parts = {"tokens": np.ascontiguousarray(tokens), "labels": labels}
    if mask_documents:
        documents = np.stack([sample.documents for sample in samples])
        # the first token of a document can't be foreseen
        labels[documents[:, 1:] != documents[:, :-1]] = IGNORE
        parts["documents"] = np.ascontiguousarray(documents[:, :-1])
    if tells_sources:
        parts["sources"] = np.array([sample.source for sample in samples], np.int64)
    for row, sample in enumerate(samples):
        labels[row, raw.shape[1] - sample.padding :] = PADDING
    if mtp_depth:
        parts |= _future(parts["tokens"], labels, parts.get("documents"), mtp_depth)
    split = zip(*(torch.from_numpy(part).split(size) for part in parts.values()), strict=True)
    return [Batch(**dict(zip(parts, tensors, strict=True))) for tensors in split]


def _future(
    tokens: np.ndarray[Any, Any],
    labels: np.ndarray[Any, Any],
    documents: np.ndarray[Any, Any] | None,
    depth: int,
) -> dict[str, np.ndarray[Any, Any]]:
    """(B, S) each -> `Batch.future_tokens` and `Batch.future_labels`, (B, depth, S) each.

    Tokens are shifted on the host: a rank of context parallelism has a part of each sequence only.
    """
    shape = len(tokens), depth, tokens.shape[1]
    future_tokens, future_labels = np.zeros(shape, np.int64), np.full(shape, PADDING, np.int64)
    for shift in range(1, min(depth + 1, tokens.shape[1])):
        of_tokens, of_labels = (
            part[:, shift - 1, :-shift] for part in (future_tokens, future_labels)
        )
        of_tokens[:], of_labels[:] = tokens[:, shift:], labels[:, shift:]
        if documents is not None:
            is_beyond = documents[:, shift:] != documents[:, :-shift]
            of_tokens[is_beyond], of_labels[is_beyond] = 0, PADDING
    return {"future_tokens": future_tokens, "future_labels": future_labels}
