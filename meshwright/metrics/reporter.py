"""Times the steps of a job, computes the metrics that it reports, and writes them to sinks."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from meshwright.metrics.observers import Observer
from meshwright.metrics.sinks import Record, Sink, Texts, TextSink
from meshwright.system import hardware
from meshwright.system.log import logger

Phase = Literal["forward_backward", "communication", "optimizer", "layer_stats", "qk_clip"]


class Phases:
    """Adds up the seconds of each phase. A mark costs microseconds and waits for nothing.

    On a GPU the times are between events of its stream: the time that kernels take, whenever the
    host launched them. Elsewhere they are the host's, which computes.

    Args:
        note: gets each phase when the host starts it, in words: "forward/backward".
    """

    def __init__(self, device: torch.device, note: Callable[[str], None] | None = None) -> None:
        self._note = note
        self._is_gpu = device.type == "cuda"
        self._seconds: dict[Phase, float] = {}
        self._phase: Phase | None = None
        self._since: Any = 0.0  # a CUDA event on a GPU
        self._events: list[tuple[Phase, torch.cuda.Event, torch.cuda.Event]] = []

    def mark(self, phase: Phase | None) -> None:
        """End the phase under way, and start `phase`. None: nothing that is timed follows."""
        if self._note is not None and phase is not None:
            self._note(phase.replace("_", "/"))
        now: Any = time.perf_counter()
        if self._is_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        if self._phase is not None and self._is_gpu:
            self._events.append((self._phase, self._since, now))
        elif self._phase is not None:
            self._add(self._phase, now - self._since)
        self._phase, self._since = phase, now

    def take(self) -> dict[Phase, float]:
        """Return the seconds of each phase since the last call. Waits for the device's marks."""
        for phase, start, end in self._events:
            end.synchronize()
            self._add(phase, start.elapsed_time(end) / 1000)
        seconds, self._seconds, self._events = self._seconds, {}, []
        return seconds

    def _add(self, phase: Phase, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds


Pause = Literal["validation", "checkpoint"]


@dataclass(frozen=True)
class Work:
    """The work of one optimizer step, and the devices that share it."""

    tokens_per_step: int
    """Over all ranks."""
    flops_per_token: int
    causal_flops_per_token: int
    """The same with half of attention's pairs, as its kernels compute them."""
    num_devices: int
    peak_flops_per_s: float | None
    """Of one device; None: not known, so there is no MFU."""


class Reporter:
    """Times steps, and makes the record of each logged step.

    Rates are averages over the steps since the last record.

    Attributes:
        step: the last step that was counted.
        tokens_seen: by all ranks, since step 1.
    """

    def __init__(
        self,
        work: Work,
        device: torch.device,
        phases: Phases,
        tokens_seen: int,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`clock`: gives the seconds that rates are made of."""
        self._work, self._device = work, device
        self._clock = clock or time.perf_counter
        self.tokens_seen = tokens_seen
        self.step = 0
        self._phases = phases
        self._restart()

    def _restart(self) -> None:
        self._steps, self._data_s = 0, 0.0
        self._paused: dict[Pause | None, float] = {}
        self._since = self._clock()

    def count(self, step: int, data_s: float) -> None:
        """Note that `step` was taken, and how long it waited for its data."""
        self.step = step
        self._steps += 1
        self._data_s += data_s
        self.tokens_seen += self._work.tokens_per_step

    def report(self, step: int, figures: Mapping[str, float]) -> Record:
        """Return the record of `step`; its metrics being on the host, the device has finished
        it."""
        passed_s = self._clock() - self._since - sum(self._paused.values())
        step_s = passed_s / self._steps
        wps = self._work.tokens_per_step / step_s / self._work.num_devices
        flops_per_s = wps * self._work.flops_per_token
        record: Record = {
            "step": step,
            **figures,
            "data/tokens": self.tokens_seen,
            "time/wps": wps,
            "time/tflops": flops_per_s / 1e12,
            "time/step_s": step_s,
            "time/data_s": self._data_s / self._steps,
        }
        peak = self._work.peak_flops_per_s
        causal_flops_per_s = wps * self._work.causal_flops_per_token
        # kernels compute no less than the causal part: above the peak, that is too low
        if peak is not None and causal_flops_per_s <= peak:
            record["time/mfu_pct"] = 100 * flops_per_s / peak
            record["time/mfu_causal_pct"] = 100 * causal_flops_per_s / peak
        for phase, seconds in self._phases.take().items():
            record[f"time/{phase}_s"] = seconds / self._steps
        for pause, seconds in self._paused.items():
            if pause is not None:
                record[f"time/{pause}_s"] = seconds
        record["memory/peak_gib"] = hardware.peak_memory_gib(self._device)
        self._restart()
        return record

    @contextmanager
    def paused(self, pause: Pause | None) -> Iterator[None]:
        """Leave the time inside out of rates.

        Args:
            pause: the metric that the time adds to; None: no chart.
        """
        start = self._clock()
        yield
        self._paused[pause] = self._paused.get(pause, 0.0) + self._clock() - start


class SinkWriter(Observer):
    """Writes each record, and the text of its validation, to every sink.

    Args:
        advance: shows how far the job is; gets the number of every step.
    """

    def __init__(self, sinks: Sequence[Sink], advance: Callable[[int], None] | None = None) -> None:
        self._sinks, self._advance = sinks, advance
        self._texts: Texts = {}

    def after_step(self, step: int, samples_read: tuple[int, ...]) -> None:
        if self._advance is not None:
            self._advance(step)

    def add_texts(self, texts: Texts) -> None:
        """Have the next record followed by text that the model wrote."""
        self._texts = texts

    def on_report(self, record: Record) -> None:
        for sink in self._sinks:
            sink.write(record)
            if self._texts and isinstance(sink, TextSink):
                sink.write_texts(int(record["step"]), self._texts)
        self._texts = {}

    def __exit__(self, *_: object) -> None:
        """Close every sink, also those after one that fails."""
        failed: Exception | None = None
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                logger.warning("closing %s failed: %r", type(sink).__name__, error)
                failed = error
        if failed is not None and sys.exception() is None:  # it would hide why training failed
            raise failed
