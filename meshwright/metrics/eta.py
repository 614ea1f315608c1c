"""The time that a job has left, from the times of its records."""

from collections import deque
from dataclasses import dataclass

from meshwright.metrics.record import Record

NUM_RECENT = 10
"""Records whose steps the time of a step is averaged over."""


@dataclass(frozen=True)
class Schedule:
    """The steps at which a job validates and saves."""

    steps: int
    validation_interval: int = 0
    """Steps between validations, besides the last step. 0: it does not validate."""
    save_interval: int = 0
    """Steps between saves, besides the last step. 0: it does not save."""

    def num_left(self, interval: int, step: int) -> int:
        """Return how many multiples of `interval`, or last steps, lie after `step`."""
        if interval == 0 or step >= self.steps:
            return 0
        is_last_extra = self.steps % interval != 0
        return self.steps // interval - step // interval + is_last_extra


class Eta:
    """Seconds to the end: steps, validations and saves, each as long as it has taken.

    The first record of a process is left out: compilation and warm-up are in it. A kind of work
    that has not been timed yet counts nothing.
    """

    def __init__(self, schedule: Schedule, step: int) -> None:
        """
        Args:
            step: the last one before this process.
        """
        self._schedule, self._first, self._step = schedule, step, step
        self._recent: deque[tuple[int, float]] = deque(maxlen=NUM_RECENT)
        self._validation = [0, 0.0]  # how many, and their seconds together
        self._save = [0, 0.0]

    def add(self, record: Record) -> None:
        """Take the times of a record in."""
        step = int(record["step"])
        if self._step != self._first:
            self._recent.append((step - self._step, record["time/step_s"]))
        if "time/validation_s" in record:
            self._validation[0] += 1
            self._validation[1] += record["time/validation_s"]
        if "time/checkpoint_s" in record and self._schedule.save_interval:
            # a save comes after the record of its step
            interval = self._schedule.save_interval
            self._save[0] += max((step - 1) // interval - (self._step - 1) // interval, 1)
            self._save[1] += record["time/checkpoint_s"]
        self._step = step

    @property
    def seconds(self) -> float | None:
        """Seconds from the last record on; None until steps have been timed."""
        num_steps = sum(count for count, _ in self._recent)
        if num_steps == 0:
            return 0.0 if self._step >= self._schedule.steps else None
        step_s = sum(count * seconds for count, seconds in self._recent) / num_steps
        left_s = (self._schedule.steps - self._step) * step_s
        for interval, (count, seconds) in (
            (self._schedule.validation_interval, self._validation),
            (self._schedule.save_interval, self._save),
        ):
            left_s += self._schedule.num_left(interval, self._step) * seconds / max(count, 1)
        return left_s
