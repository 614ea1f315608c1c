"""TensorBoard's files: apart from other sinks, for their imports take time on every rank."""

import io
import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from meshwright.metrics.sinks import Record, WholeRecords


class TensorBoard:
    """TensorBoard scalars; it hides what an earlier run wrote after the step to resume from.

    Not torch's SummaryWriter, whose thread writes half a record to a full disk, and dies of it.
    """

    def __init__(self, folder: Path, resumed_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # as SummaryWriter names it; TensorBoard looks for "tfevents"
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = WholeRecords(folder / name)
        try:
            self._add(0, file_version="brain.Event:2")
            self._add(resumed_step + 1, session_log=SessionLog(status=SessionLog.START))
        except OSError:
            (folder / name).unlink()
            raise

    def write(self, record: Record) -> None:
        figures = {name: value for name, value in record.items() if name != "step"}
        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._add(int(record["step"]), summary=Summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _add(self, step: int, **content: Any) -> None:
        framed = io.BytesIO()
        event = Event(wall_time=time.time(), step=step, **content)
        RecordWriter(framed).write(event.SerializeToString())
        self._file.append(framed.getvalue())
