"""This rank's part of every global batch, read ahead of the step that needs it."""

import dataclasses
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from meshwright.batch import Batch
from meshwright.datasets.encoding import NO_LOSS
from meshwright.datasets.global_order import Cursor, GlobalOrder, merged
from meshwright.datasets.sample import Sample, blank_sample
from meshwright.datasets.streamed_samples import EndOfData
from meshwright.errors import ConfigError
from meshwright.loss import IGNORE

STEPS_AHEAD = 4


@dataclass(frozen=True)
class StepData:
    """What one rank reads for one optimizer step."""

    batches: list[Batch]
    """One a microbatch, on the CPU, pinned if a device follows."""
    cursor: Cursor
    """Behind the step's whole global batch, as far as this rank knows it."""
    epochs: dict[str, float]
    """How often each source has been read."""
    is_last: bool = False
    """Whether the data ends here."""


@dataclass(frozen=True)
class BatchShape:
    """How a global batch is split: sample i of it goes to microbatch i // (ranks * local), and
    within that to rank (i // local) % ranks."""

    local_batch_size: int
    num_microbatches: int
    dp_rank: int
    dp_size: int

    @property
    def global_batch_size(self) -> int:
        """Sequences over all ranks and microbatches."""
        return self.local_batch_size * self.num_microbatches * self.dp_size

    @property
    def slots(self) -> list[int]:
        """Which samples of a global batch this rank has."""
        return [
            index
            for index in range(self.global_batch_size)
            if index // self.local_batch_size % self.dp_size == self.dp_rank
        ]


class Loader:
    """Iterates over the steps of a job, from where `order` is, to the end of the data.

    The order is the same on every rank; each steps over what is not its own. A thread reads ahead;
    errors in it are raised where the data is asked for.
    """

    def __init__(
        self, order: GlobalOrder, shape: BatchShape, *, mask_documents: bool, pin_memory: bool
    ) -> None:
        self._order, self._shape = order, shape
        self._mask_documents, self._pin_memory = mask_documents, pin_memory
        self._ready: queue.Queue[StepData | Exception | None] = queue.Queue(STEPS_AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, name="loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[StepData]:
        return self

    def __next__(self) -> StepData:
        item = self._ready.get()
        if isinstance(item, Exception):
            raise item
        if item is None:
            raise StopIteration
        return item

    def close(self) -> None:
        """Stop reading ahead."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.1)
            except queue.Empty:
                continue

    def _read_ahead(self) -> None:
        try:
            step = self._next_step()
            while step is not None and not self._closed.is_set():
                try:
                    following = self._next_step()
                except Exception:
                    self._ready.put(step)  # the error concerns the one after it
                    raise
                self._ready.put(dataclasses.replace(step, is_last=following is None))
                step = following
            self._ready.put(None)
        except Exception as error:
            self._ready.put(error)

    def _next_step(self) -> StepData | None:
        """None if the data ends before the global batch is full."""
        try:
            read = [self._order.next_sample() for _ in range(self._shape.global_batch_size)]
        except EndOfData:
            return None
        mine = [sample for sample in read if sample is not None]
        batches = _stack(mine, self._shape.local_batch_size, self._mask_documents)
        if self._pin_memory:
            batches = [batch.pin_memory() for batch in batches]
        return StepData(batches, self._order.cursor, self._order.epochs)


def whole_cursor(cursor: Cursor) -> Cursor:
    """What all ranks together know of the place that `cursor` is. Collective."""
    if not cursor.places:
        return cursor
    cursors = [cursor] * dist.get_world_size()
    dist.all_gather_object(cursors, cursor)
    return merged(cursors)


def padded_steps(
    order: GlobalOrder, shape: BatchShape, num_samples: int, *, mask_documents: bool
) -> Iterator[list[Batch]]:
    """This rank's batches of the first `num_samples` samples, in steps of equal shape: where they
    end, sequences without a label follow.

    Raises:
        ConfigError: if the data ends before.
    """
    padding, slots = blank_sample(order.length), frozenset(shape.slots)
    for first in range(0, num_samples, shape.global_batch_size):
        left = num_samples - first
        try:
            read = [
                order.next_sample() if index < left else padding if index in slots else None
                for index in range(shape.global_batch_size)
            ]
        except EndOfData:
            raise ConfigError(
                "validation.num_samples",
                f"validation.num_samples = {num_samples}: {order.names} holds fewer"
                "\n  fix: lower it, or add data",
            ) from None
        mine = [sample for sample in read if sample is not None]
        yield _stack(mine, shape.local_batch_size, mask_documents)


def _stack(samples: Sequence[Sample], size: int, mask_documents: bool) -> list[Batch]:
    """Batches of `size` samples."""
    raw = np.stack([sample.raw for sample in samples]).astype(np.int64)
    tokens, labels = raw[:, :-1], raw[:, 1:].copy()
    if raw.max() >= NO_LOSS:
        labels[labels >= NO_LOSS] = IGNORE
        tokens = tokens & ~NO_LOSS
    parts = [np.ascontiguousarray(tokens), labels]
    if mask_documents:
        documents = np.stack([sample.documents for sample in samples])
        # the first token of a document cannot be foreseen
        labels[documents[:, 1:] != documents[:, :-1]] = IGNORE
        parts.append(np.ascontiguousarray(documents[:, :-1]))
    split = zip(*(torch.from_numpy(part).split(size) for part in parts), strict=True)
    return [Batch(*tensors) for tensors in split]
