"""From what a job counts to the figures that it reports."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from meshwright import hardware
from meshwright.metrics.sinks import Record, Sink


@dataclass(frozen=True)
class Work:
    """What one optimizer step does, and on how many devices."""

    tokens_per_step: int
    """Over all ranks."""
    flops_per_token: int
    num_devices: int
    peak_flops_per_s: float
    """Of one device."""


class Reporter:
    """Times steps, and writes a record for those that are logged, to every sink.

    Rates are averages over the steps since the last record. Only the first rank has sinks.
    """

    def __init__(
        self, work: Work, device: torch.device, sinks: Sequence[Sink], tokens_seen: int
    ) -> None:
        self._work, self._device, self._sinks = work, device, sinks
        self.tokens_seen = tokens_seen
        self._restart()

    def _restart(self) -> None:
        self._steps, self._data_time_s = 0, 0.0
        self._since = time.perf_counter()

    def count(self, data_time_s: float) -> None:
        """Note that a step was taken, and how long it waited for its data."""
        self._steps += 1
        self._data_time_s += data_time_s
        self.tokens_seen += self._work.tokens_per_step

    def report(self, step: int, **figures: float) -> None:
        """Write the record of `step`; its figures being on the host, the device has finished it."""
        step_time_s = (time.perf_counter() - self._since) / self._steps
        wps = self._work.tokens_per_step / step_time_s / self._work.num_devices
        record: Record = {
            "step": step,
            **figures,
            "wps": wps,
            "mfu_pct": 100 * wps * self._work.flops_per_token / self._work.peak_flops_per_s,
            "memory_gib": hardware.peak_memory_gib(self._device),
            "tokens_seen": self.tokens_seen,
            "step_time_s": step_time_s,
            "data_time_s": self._data_time_s / self._steps,
        }
        for sink in self._sinks:
            sink.write(record)
        self._restart()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time spent inside, which is no part of a step (saving, say), out of rates."""
        start = time.perf_counter()
        yield
        self._since += time.perf_counter() - start

    def close(self) -> None:
        """Flush every sink."""
        for sink in self._sinks:
            sink.close()
