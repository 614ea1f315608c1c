"""How long the parts of a step take, on the device's own clock."""

import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import torch

Phase = Literal["forward_backward", "communication", "optimizer"]
LONGEST_QUEUE = 64
"""Marks on a GPU that may wait. Beyond it, finished marks are read."""


class Phases:
    """Adds up the seconds of each phase. A mark costs microseconds and waits for nothing.

    On a GPU the times are between events of its stream: the time that kernels take, whenever the
    host launched them. Elsewhere they are the host's, which computes.

    Args:
        note: gets the name of each phase when the host begins it.
    """

    def __init__(self, device: torch.device, note: Callable[[Phase], None] | None = None) -> None:
        self._note = note
        self._is_gpu = device.type == "cuda"
        self._seconds: dict[Phase, float] = {}
        self._phase: Phase | None = None
        self._since: float | torch.cuda.Event = 0.0
        self._queue: deque[tuple[Phase, torch.cuda.Event, torch.cuda.Event]] = deque()

    def mark(self, phase: Phase | None) -> None:
        """End the phase under way, and begin `phase`. None: nothing that is timed follows."""
        if self._note is not None and phase is not None:
            self._note(phase)
        now: float | torch.cuda.Event
        if self._is_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        if self._phase is not None:
            if isinstance(now, float):
                assert isinstance(self._since, float)
                self._add(self._phase, now - self._since)
            else:
                assert isinstance(self._since, torch.cuda.Event)
                self._queue.append((self._phase, self._since, now))
                while len(self._queue) > LONGEST_QUEUE and self._queue[0][2].query():
                    self._read()
        self._phase, self._since = phase, now

    def take(self) -> dict[Phase, float]:
        """Return the seconds of each phase since the last call. Waits for the device's marks."""
        while self._queue:
            self._queue[0][2].synchronize()
            self._read()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _read(self) -> None:
        phase, start, end = self._queue.popleft()
        self._add(phase, start.elapsed_time(end) / 1000)

    def _add(self, phase: Phase, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
