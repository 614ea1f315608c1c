"""TensorBoard's files, written whole."""

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import summary as protos

from meshwright.metrics.records import Record, Texts
from meshwright.metrics.sinks import WholeRecords

SCALARS = (bool, int, float, str)

SHOWN_BESIDE = ("loss/train", "validation/loss")
"""Figures in the table of hyperparameters."""


class TensorBoard:
    """TensorBoard's scalars, hyperparameters and the config as text.

    It hides events of an earlier run after the step to resume from.

    Not torch's SummaryWriter, whose thread writes half a record to a full disk, and dies of it.
    """

    def __init__(
        self,
        folder: Path,
        resumed_step: int,
        config_text: str,
        hyperparameters: Mapping[str, Any],
    ) -> None:
        """
        Args:
            config_text: TOML.
            hyperparameters: by dotted key; lists and tables are shown as text.
        """
        folder.mkdir(parents=True, exist_ok=True)
        # as SummaryWriter names it; TensorBoard looks for "tfevents"
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = WholeRecords(folder / name)
        try:
            self._add(0, file_version="brain.Event:2")
            self._add(resumed_step + 1, session_log=SessionLog(status=SessionLog.START))
            self._add(resumed_step, summary=_text("config", config_text))
            values = {
                k: v if isinstance(v, SCALARS) else str(v) for k, v in hyperparameters.items()
            }
            for proto in protos.hparams(values, dict.fromkeys(SHOWN_BESIDE, 0)):
                self._add(resumed_step, summary=proto)
        except OSError:
            (folder / name).unlink()
            raise

    def write(self, record: Record) -> None:
        figures = {name: value for name, value in record.items() if name != "step"}
        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
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


def _text(tag: str, text: str) -> Summary:
    """Return a text that is shown as it is: indented, it is code to TensorBoard's Markdown."""
    indented = "".join(f"    {line}\n" for line in text.splitlines())
    summary: Summary = protos.text(tag, indented)
    return summary
