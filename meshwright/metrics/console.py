"""A run on the console: one line per logged step, and on a terminal a progress bar."""

import json
import time
from contextlib import suppress

from tqdm import tqdm

from meshwright.metrics.sinks import Record, Texts
from meshwright.system.log import (
    INDENT,
    ConsoleHandler,
    console_stream,
    console_width,
    is_terminal,
    logger,
)

HEADER_EVERY = 25
"""Lines from one header to the next."""

BOLD, DIM, CYAN, RESET = "\x1b[1m", "\x1b[2m", "\x1b[36m", "\x1b[0m"

COLUMNS = {
    "loss": (9, BOLD),
    "load": (6, ""),
    "grad_norm": (10, ""),
    "lr": (9, DIM),
    "wps": (10, CYAN),
    "mfu": (6, ""),
    "TFLOP/s": (8, DIM),
    "GiB": (7, ""),
    "eta": (12, ""),
}
"""Width and color of each column, by its header."""

LOAD = "experts/load_max"
"""Metric of the column "load", which is there for models that have it."""

LEFT_OUT = ("TFLOP/s", "GiB", "lr")
"""Columns that a narrow console drops, in this order; metrics.jsonl has them."""


def duration(seconds: float | None) -> str:
    """Return "1:02:03", or "2d 01:02:03"; "-" if it isn't known."""
    if seconds is None:
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{f'{days}d {hour:02}' if days else hour}:{minute:02}:{second:02}"


def _short(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.2e}"


class Console:
    """Shows records as a table, validations below, and how far the job is."""

    def __init__(self, steps: int, step: int) -> None:
        """`steps`: of the whole job; `step`: the last one before this process."""
        self._steps, self._num_lines = steps, 0
        self._begun: tuple[int, float] | None = None
        self._columns: list[str] = []
        self._bar: tqdm[None] | None = None
        stream = console_stream()
        if is_terminal(stream):
            self._bar = tqdm(
                total=steps,
                initial=step,
                file=stream,
                leave=False,
                dynamic_ncols=True,
                mininterval=0.5,
                bar_format="{percentage:3.0f}% {bar} step {n_fmt}/{total_fmt}{postfix}",
            )
            ConsoleHandler.bar = self._bar

    def advance(self, step: int) -> None:
        """Move the bar on: `step` has been handed to the device."""
        if self._bar is not None:
            with suppress(OSError):  # the terminal was closed
                self._bar.update(step - self._bar.n)

    def write(self, record: Record) -> None:
        left = duration(self._seconds_left(int(record["step"])))
        if self._bar is not None:
            self._bar.set_postfix_str(f"eta {left}", refresh=False)
        width = 2 * len(str(self._steps)) + 1
        step = f"{record['step']}/{self._steps}".rjust(width)
        if self._num_lines == 0:
            self._columns = _fitting(record, len(f"{INDENT}step ") + width)
        if self._num_lines % HEADER_EVERY == 0:
            names = "".join(name.rjust(COLUMNS[name][0]) for name in self._columns)
            logger.info("%s", f"{'step':>{width + 5}}{names}")
        self._num_lines += 1
        mfu, tflops = record.get("time/mfu_pct"), record["time/tflops"]
        texts = {
            "loss": _short(record["loss/train"]),
            "load": f"{record.get(LOAD, 0):.2f}",
            "grad_norm": _short(record["optim/grad_norm"]),
            "lr": f"{record['optim/lr']:.2e}",
            "wps": f"{record['time/wps']:,.0f}",
            "mfu": "-" if mfu is None else f"{mfu:.1f}%",
            "TFLOP/s": f"{tflops:.{3 if tflops < 10 else 1}f}",
            "GiB": f"{record['memory/peak_gib']:.2f}",
            "eta": left,
        }
        cells = {name: f" {texts[name]:>{COLUMNS[name][0] - 1}}" for name in self._columns}
        plain = f"step {step}{''.join(cells.values())}"
        coloured = f"step {BOLD}{step}{RESET}"
        coloured += "".join(f"{COLUMNS[name][1]}{cell}{RESET}" for name, cell in cells.items())
        logger.info("%s", plain, extra={"coloured": coloured})
        self._write_validation(record)

    def _seconds_left(self, step: int) -> float | None:
        """Return the seconds to the end, if steps take as long as those since the first record of
        this process, pauses included: compilation and warm-up are before. None: not known yet."""
        now = time.monotonic()
        first, since = self._begun = self._begun or (step, now)
        if step in (first, self._steps):
            return 0.0 if step == self._steps else None
        return (self._steps - step) * (now - since) / (step - first)

    def _write_validation(self, record: Record) -> None:
        sets: dict[str, list[str]] = {}
        for name, value in record.items():
            if name.startswith("validation/"):
                prefix, _, figure = name.rpartition("/")
                sets.setdefault(prefix, []).append(f"{figure.replace('_', ' ')} {value:.4f}")
        for prefix, figures in sets.items():
            plain = f"{prefix}: {'  '.join(figures)}"
            logger.info("%s", plain, extra={"coloured": f"{CYAN}{plain}{RESET}"})

    def write_texts(self, step: int, texts: Texts) -> None:
        for text in texts.values():
            logger.info("text: %s", json.dumps(text, ensure_ascii=False))  # in one line

    def close(self) -> None:
        if self._bar is not None:
            ConsoleHandler.bar = None
            with suppress(OSError):
                self._bar.close()


def _fitting(record: Record, used: int) -> list[str]:
    """Return the columns of which the record has metrics, and for which there is room."""
    found = [name for name in COLUMNS if name != "load" or LOAD in record]
    for name in LEFT_OUT:
        if used + sum(COLUMNS[shown][0] for shown in found) > console_width(console_stream()):
            found.remove(name)
    return found
