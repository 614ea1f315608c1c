"""This rank's part of every global batch, read ahead of the step that needs it."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from meshwright.batch import Batch
from meshwright.datasets.packing import Cursor, Packer
from meshwright.datasets.sources import Documents
from meshwright.datasets.tokenizers import Tokenizer

STEPS_AHEAD = 4


@dataclass(frozen=True)
class StepData:
    """What one rank reads for one optimizer step."""

    batches: list[Batch]
    """The microbatches, on the CPU, pinned if a device follows."""
    cursor: Cursor
    """Behind the step's whole global batch."""


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


class Loader:
    """Iterates over the steps of a job, from a cursor on, without end.

    The stream of samples is the same on every rank; each walks all of it and keeps its own. A
    thread reads ahead; errors in it are raised where the data is asked for.
    """

    def __init__(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        seq_len: int,
        shape: BatchShape,
        *,
        cursor: Cursor,
        pin_memory: bool,
    ) -> None:
        self._packer = Packer(documents, tokenizer, seq_len + 1, cursor)
        self._shape = shape
        self._pin_memory = pin_memory
        self._ready: queue.Queue[StepData | Exception] = queue.Queue(STEPS_AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, name="loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[StepData]:
        return self

    def __next__(self) -> StepData:
        item = self._ready.get()
        if isinstance(item, Exception):
            raise item
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
            while not self._closed.is_set():
                self._ready.put(self._next_step())
        except Exception as error:
            self._ready.put(error)

    def _next_step(self) -> StepData:
        shape = self._shape
        mine: list[list[int]] = []
        for index in range(shape.global_batch_size):
            sample = self._packer.next_sample()
            if index // shape.local_batch_size % shape.dp_size == shape.dp_rank:
                mine.append(sample)
        samples = torch.tensor(mine, dtype=torch.int64)
        tokens, labels = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
        if self._pin_memory:
            tokens, labels = tokens.pin_memory(), labels.pin_memory()
        size = shape.local_batch_size
        batches = [*map(Batch, tokens.split(size), labels.split(size))]
        return StepData(batches, self._packer.cursor)
