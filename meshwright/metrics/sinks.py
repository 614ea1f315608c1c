"""The record of a logged step, the sinks that write it to files, whole and never twice, and the
history of a run: a line for each start and end of its processes, in history.jsonl."""

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from meshwright.system.files import only_warn, text_of, whole_file
from meshwright.system.log import logger

Record = dict[str, float | int]
"""`step`, and the metrics of that step; docs/monitoring.md explains each name."""


@runtime_checkable
class Sink(Protocol):
    """Takes one record per logged step."""

    def write(self, record: Record) -> None:
        """`record["step"]` is the step; the rest are its metrics."""

    def close(self) -> None:
        """Nothing is written afterwards."""


Texts = Mapping[str, str]
"""Text that the model wrote, by their prompts, with which they start."""


@runtime_checkable
class TextSink(Protocol):
    """A sink that takes text as well."""

    def write_texts(self, step: int, texts: Texts) -> None:
        """Take the text of a validation, after the record of its step."""


def validation_loss(figures: Mapping[str, Any]) -> float | None:
    """Return the mean loss of all validation sets; None if there is none, or one isn't finite."""
    names = [n for n in figures if n.startswith("validation/") and n.endswith("/loss")]
    if "validation/loss" in names:  # the mean already; runs of earlier versions lack it
        names = ["validation/loss"]
    losses = [figures[name] for name in names]
    if not losses or not all(loss is not None and math.isfinite(loss) for loss in losses):
        return None
    return float(sum(losses) / len(losses))


class SafeSink:
    """A sink that may fail, as a full disk or code of the user's: it warns once, and tries again
    with every record."""

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self._name, self._make = name, make
        self._sink: Sink | None = None
        self._has_warned = False
        self._try(lambda sink: None)

    def write(self, record: Record) -> None:
        self._try(lambda sink: sink.write(record))

    def write_texts(self, step: int, texts: Texts) -> None:
        def write(sink: Sink) -> None:
            if isinstance(sink, TextSink):
                sink.write_texts(step, texts)

        self._try(write)

    def close(self) -> None:
        self._try(lambda sink: sink.close())

    def _try(self, do: Callable[[Sink], None]) -> None:
        try:
            if self._sink is None:
                self._sink = self._make()
            do(self._sink)
        except Exception as error:
            is_bug = not isinstance(error, OSError)
            if is_bug and self._sink is None and not self._has_warned:  # nothing is lost yet
                raise
            if not self._has_warned:
                words = "%s cannot be written: %s; training continues"
                logger.warning(words, self._name, error, exc_info=is_bug)
            self._has_warned = True


class WholeRecords:
    """A file to which a record is appended whole, or not at all."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  closed by `close`

    def append(self, record: bytes) -> None:
        """Raises: OSError, on a full disk for one; the file is then as it was."""
        end, written = os.fstat(self._file.fileno()).st_size, 0
        try:
            while written < len(record):
                written += self._file.write(record[written:]) or 0
        except OSError:
            with suppress(OSError):
                self._file.truncate(end)
            raise

    def close(self) -> None:
        self._file.close()


class JsonLines:
    """One JSON object a line. Lines of an earlier run after the step to resume from are removed.

    Metrics that aren't finite become null: JSON has no word for them.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        kept = [
            line
            for line in (path.read_text("utf-8", "replace").splitlines() if path.exists() else [])
            if _step_of(line) <= resumed_step
        ]
        with whole_file(path) as file:
            file.write("".join(line + "\n" for line in kept).encode())
        self._file = WholeRecords(path)

    def write(self, record: Mapping[str, Any]) -> None:
        writable = {name: _finite(value) for name, value in record.items()}
        self._file.append(json.dumps(writable).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def _finite(value: Any) -> Any:
    """Return a value with None where a number in it isn't finite."""
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TextLines(JsonLines):
    """One JSON object per text."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Metrics are elsewhere."""

    def write_texts(self, step: int, texts: Texts) -> None:
        for prompt, text in texts.items():
            super().write({"step": step, "prompt": prompt, "text": text})


class LoadsFile:
    """The tokens of each expert in the last logged step, by layer, as one JSON object."""

    def __init__(self, path: Path, loads: Callable[[], Mapping[int, Sequence[int]]]) -> None:
        self._path, self._loads = path, loads

    def write(self, record: Mapping[str, Any]) -> None:
        if layers := self._loads():
            self._path.write_text(json.dumps({"step": record["step"], "layers": layers}), "utf-8")

    def close(self) -> None:
        """The file is closed."""


def _step_of(line: str) -> float:
    """Return the step of a line; infinite for one that is no record, as after a kill."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


HISTORY = "history.jsonl"

Event = Literal["start", "end", "sentry"]

OF_A_RUN = (
    "metrics.jsonl",
    HISTORY,
    "samples.jsonl",
    "skipped_steps.jsonl",
    "experts.json",
    "config.toml",
    "steps.jsonl",
)
"""Files in the dump folder that a job which starts over starts again."""


def set_aside_run(folder: Path) -> None:
    """Move the files of an earlier run in `folder` to their own folder in it; nothing if that
    run has logged no step."""
    metrics = folder / OF_A_RUN[0]
    with only_warn("the earlier run in %s cannot be set aside", folder):
        if not (metrics.exists() and metrics.stat().st_size):
            return
        numbers = (folder / f"earlier_run_{number}" for number in itertools.count(1))
        earlier = next(path for path in numbers if not path.exists())
        earlier.mkdir()
        for name in OF_A_RUN:
            if (folder / name).exists():
                (folder / name).rename(earlier / name)
        logger.info("the earlier run's metrics are now in %s", earlier)


def note_event(folder: Path, step: int, event: Event, facts: Mapping[str, Any]) -> None:
    """Append an event, with facts for JSON. A job that starts over at step 0 starts a new file."""
    line = json.dumps({"event": event, "step": step, "unix_s": round(time.time(), 1), **facts})
    try:
        if event == "start" and step == 0:
            (folder / HISTORY).unlink(missing_ok=True)
        # a loss of power may have torn the last line: the new one starts on a line of its own
        if text_of(folder / HISTORY)[-1:] not in ("", "\n"):
            line = "\n" + line
        with closing(WholeRecords(folder / HISTORY)) as file:
            file.append(f"{line}\n".encode())
    except OSError as error:  # a full disk, say
        logger.warning("%s cannot be written: %s; training continues", folder / HISTORY, error)


def note_missing_end(folder: Path, step: int, reason: str, since: float) -> None:
    """Append the end of a process that was killed before it could do so itself.

    Args:
        step: the step that it was in.
        since: seconds of the epoch; a start that is older is another process's.
    """
    try:
        rows = map(json.loads, (folder / HISTORY).read_text("utf-8").splitlines())
        *_, row = (row for row in rows if row["event"] in ("start", "end"))
        is_open = row["event"] == "start" and row["unix_s"] >= round(since, 1)
    except (OSError, ValueError, KeyError):  # no process has noted its start
        return
    if is_open:
        note_event(folder, step, "end", {"reason": reason})
