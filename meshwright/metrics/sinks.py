"""Where reports go: one protocol, and its destinations."""

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from meshwright.log import logger

Record = dict[str, float | int]


class Sink(Protocol):
    """Takes one record a logged step."""

    def write(self, record: Record) -> None:
        """`record["step"]` is the step; the rest are its figures."""

    def close(self) -> None:
        """Nothing is written afterwards."""


class Spared:
    """A sink whose files may fail: it warns once, and tries again with every record.

    Args:
        name: of what is written, for the warning.
        make: the sink.
    """

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self._name, self._make = name, make
        self._sink: Sink | None = None
        self._has_warned = False
        self._try(lambda sink: None)

    def write(self, record: Record) -> None:
        self._try(lambda sink: sink.write(record))

    def close(self) -> None:
        self._try(lambda sink: sink.close())

    def _try(self, do: Callable[[Sink], None]) -> None:
        try:
            if self._sink is None:
                self._sink = self._make()
            do(self._sink)
        except OSError as error:
            if not self._has_warned:
                logger.warning("%s cannot be written: %s; training goes on", self._name, error)
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


class Console:
    """One line a record, with the time that is left; one more if it has a validation."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def write(self, record: Record) -> None:
        left_s = round((self._steps - record["step"]) * record["step_time_s"])
        logger.info(
            "step %*d/%d  loss %7.4f  grad_norm %7.4f  lr %.2e  wps %s  mfu %.1f%%  "
            "memory %.2f GiB  eta %d:%02d:%02d",
            len(str(self._steps)),
            record["step"],
            self._steps,
            record["loss"],
            record["grad_norm"],
            record["lr"],
            f"{record['wps']:,.0f}",
            record["mfu_pct"],
            record["memory_gib"],
            left_s // 3600,
            left_s // 60 % 60,
            left_s % 60,
        )
        validation = {k: v for k, v in record.items() if k.startswith("validation/")}
        if validation:
            logger.info("  ".join(f"{name} {value:.4f}" for name, value in validation.items()))

    def close(self) -> None:
        return


class JsonLines:
    """One JSON object a line. What an earlier run wrote after the step to resume from goes.

    What is not finite becomes null: JSON has no word for it.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        kept = [
            line
            for line in (path.read_text("utf-8").splitlines() if path.exists() else [])
            if _step_of(line) <= resumed_step
        ]
        shortened = path.with_suffix(".tmp")
        shortened.write_text("".join(line + "\n" for line in kept), "utf-8")
        os.replace(shortened, path)
        self._file = WholeRecords(path)

    def write(self, record: Mapping[str, Any]) -> None:
        writable = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        self._file.append(json.dumps(writable).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def _step_of(line: str) -> float:
    """The step of a line; infinite for one that a kill cut short."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")


class WeightsAndBiases:
    """A Weights & Biases run; its own environment variables say which project and where."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        import wandb  # an extra; preflight has made sure that it is there

        self._run = wandb.init(dir=str(folder), config=config)

    def write(self, record: Record) -> None:
        self._run.log({k: v for k, v in record.items() if k != "step"}, step=int(record["step"]))

    def close(self) -> None:
        self._run.finish()
