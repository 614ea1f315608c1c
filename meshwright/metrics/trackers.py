"""Sinks that show a run in a browser: TensorBoard, and Weights & Biases (https://docs.wandb.ai)."""

import io
import os
import secrets
import socket
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import summary as protos

from meshwright.metrics.sinks import Record, Texts, WholeRecords
from meshwright.system.errors import config_error

RUN_ID = "wandb_run_id"
"""File in the dump folder that names the run of W&B, so that a resumed job continues it."""

SHOWN_FIRST = {"loss/train": "Loss/train", "validation/loss": "Loss/validation"}
"""Metrics by their tags in TensorBoard, which sorts groups by name, capitals before small letters,
and opens the first two."""


class TensorBoard:
    """TensorBoard's scalars, text (the config as TOML, and the model's) and hyperparameters.

    It hides events of an earlier run after the step to resume from.

    Not torch's SummaryWriter, whose thread writes half a record to a full disk, and dies of it.
    """

    def __init__(self, folder: Path, resumed_step: int, config_text: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # as SummaryWriter names it; TensorBoard looks for "tfevents"
        begun = int(time.time())
        for path in folder.glob("events.out.tfevents.*"):  # it reads files in the order of numbers,
            number = path.name.split(".")[3]  # and the clock of an earlier machine may be ahead
            begun = max(begun, int(number) + 1 if number.isdecimal() else 0)
        name = f"events.out.tfevents.{begun}.{socket.gethostname()}.{os.getpid()}"
        self._file = WholeRecords(folder / name)
        try:
            self._add(0, file_version="brain.Event:2")
            self._add(resumed_step + 1, session_log=SessionLog(status=SessionLog.START))
            self._add(resumed_step, summary=_text("config", config_text))
            for summary in protos.hparams(_hyperparameters(config_text), {"Loss/validation": 0.0}):
                self._add(resumed_step, summary=summary)
        except OSError:
            (folder / name).unlink()
            raise

    def write(self, record: Record) -> None:
        figures = {name: value for name, value in record.items() if name != "step"}
        values = [
            Summary.Value(tag=SHOWN_FIRST.get(name, name), simple_value=value)
            for name, value in figures.items()
        ]
        self._add(int(record["step"]), summary=Summary(value=values))

    def write_texts(self, step: int, texts: Texts) -> None:
        for number, text in enumerate(texts.values()):
            self._add(step, summary=_text(f"validation/text/{number}", text))

    def close(self) -> None:
        self._file.close()

    def _add(self, step: int, **content: Any) -> None:
        framed = io.BytesIO()
        event = Event(wall_time=time.time(), step=step, **content)
        RecordWriter(framed).write(event.SerializeToString())
        self._file.append(framed.getvalue())


def _hyperparameters(config_text: str) -> dict[str, bool | int | float | str]:
    """Return the keys of a TOML whose values are single ones, as HPARAMS compares between runs."""
    sections = tomllib.loads(config_text).items()
    return {
        f"{section}.{key}": value
        for section, keys in sections
        if isinstance(keys, dict)
        for key, value in keys.items()
        if isinstance(value, bool | int | float | str)
    }


def _text(tag: str, text: str) -> Summary:
    """Return a text that is shown as it is: indented, it is code to TensorBoard's Markdown."""
    indented = "".join(f"    {line}\n" for line in text.splitlines())
    summary: Summary = protos.text(tag, indented)
    return summary


class WeightsAndBiases:
    """Sends records to a run, which a resumed job continues.

    W&B takes each step once, in rising order. A job that was killed resumes at its last checkpoint,
    so it trains some steps again that the run already has: the run keeps the metrics that it has.
    Without a connection (WANDB_MODE=offline) the steps that the run has aren't known, and a
    resumed job's part starts at its checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        *,
        project: str,
        entity: str,
        name: str,
        is_resumed: bool,
    ) -> None:
        """
        Args:
            folder: the job's dump folder.
            project, entity, name: as W&B means them; "": its own choice.

        Raises:
            ConfigError: if W&B rejects the run or can't be reached.
        """
        import wandb  # an extra; `resolve` has made sure that it is there

        file = folder / RUN_ID
        if not (is_resumed and file.exists()):
            file.write_text(secrets.token_hex(4), "ascii")
        try:
            self._run = wandb.init(
                dir=str(folder),
                config=dict(config),
                project=project or None,
                entity=entity or None,
                name=name or None,
                id=file.read_text("ascii"),
                resume="allow",
                allow_val_change=True,  # a resume may change the config
            )
        except wandb.Error as error:
            fix = "wandb login, or set WANDB_MODE=offline"
            raise config_error("metrics.enable_wandb", True, str(error), fix) from None
        self._next_step = int(self._run.step)

    def write(self, record: Record) -> None:
        step = int(record["step"])
        if step >= self._next_step:
            self._run.log({k: v for k, v in record.items() if k != "step"}, step=step)

    def close(self) -> None:
        # an error that ends the job is on its way: W&B shows the run as failed
        self._run.finish(exit_code=1 if sys.exception() else 0)
