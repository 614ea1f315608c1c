"""Figures and where they go."""

import dataclasses
import io
import json
import logging
import math
import sys
import time
import types
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from meshwright.commands.plan.devices import DEVICES
from meshwright.config.changes import changed, to_json
from meshwright.config.job_config import Checkpoint, JobConfig
from meshwright.metrics.console import Console
from meshwright.metrics.reporter import Phases, Reporter, SinkWriter, Work
from meshwright.metrics.sinks import JsonLines, Record, SafeSink, TextLines, WholeRecords
from meshwright.metrics.trackers import TensorBoard, WeightsAndBiases
from meshwright.system import hardware
from meshwright.system.errors import ConfigError
from meshwright.system.log import log_to_console, logger
from meshwright.train.best_validation import BestValidation
from meshwright.train.build import _peak_flops_per_s
from meshwright.train.build_observers import _files
from tests.helpers.files import no_room


class Kept(list):
    def write(self, record) -> None:
        self.append(record)

    def close(self) -> None:
        pass


WORK = Work(1, 1, 1, num_devices=1, peak_flops_per_s=None)
CPU = torch.device("cpu")


def report(reporter: Reporter, step: int, **figures: float) -> Record:
    reporter.count(step, data_s=0.0)
    return reporter.report(step, figures)


def test_rates_follow_from_tokens_time_and_flops(monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    work = Work(1000, 600, 450, num_devices=4, peak_flops_per_s=1e6)
    phases = Phases(CPU)
    reporter = Reporter(work, CPU, phases, tokens_seen=5000)
    for step in (6, 7):
        now += 0.2
        phases.mark("optimizer")
        now += 0.3
        phases.mark(None)
        reporter.count(step, data_s=0.1)
    with reporter.paused("validation"):
        now += 50.0
    record = reporter.report(7, {"loss/train": 2.0})
    assert record["time/step_s"] == pytest.approx(0.5)
    assert record["time/data_s"] == pytest.approx(0.1)
    assert record["time/wps"] == pytest.approx(1000 / 0.5 / 4)
    assert record["time/mfu_pct"] == pytest.approx(100 * 500 * 600 / 1e6)
    assert record["time/mfu_causal_pct"] == pytest.approx(100 * 500 * 450 / 1e6)
    assert record["data/tokens"] == 7000
    assert record["time/tflops"] == pytest.approx(500 * 600 / 1e12)
    assert record["time/optimizer_s"] == pytest.approx(0.3)
    assert record["time/validation_s"] == pytest.approx(50)
    with reporter.paused(None):
        now += 7.0
    now += 0.25
    later = report(reporter, 8, **{"loss/train": 2.0})
    assert later["time/step_s"] == pytest.approx(0.25)  # since the last record alone
    assert later.keys() == record.keys() - {"time/validation_s", "time/optimizer_s"}
    slow = dataclasses.replace(work, peak_flops_per_s=1.0)  # more is computed than it can
    reporter = Reporter(slow, CPU, phases, tokens_seen=0)
    now += 1.0
    without_peak = report(reporter, 1)
    assert without_peak["time/tflops"] > 0
    assert "time/mfu_pct" not in without_peak
    # long sequences: kernels skip half of the pairs that the first percentage counts
    reporter = Reporter(dataclasses.replace(work, peak_flops_per_s=130e3), CPU, phases, 0)
    now += 1.0
    assert report(reporter, 1)["time/mfu_pct"] == pytest.approx(100 * 150 / 130)


def test_a_resumed_run_leaves_no_step_twice(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (10, 20, 30)]
    damage = b'5\n\xff\n"step"\n{"step": 40, "lo'  # by a disk; killed in the middle of a line
    path.write_bytes("\n".join(lines).encode() + b"\n" + damage)
    sink = JsonLines(path, resumed_step=20)
    figures = {"loss": math.nan, "grad_norm": math.inf, "norms": [1.5, math.nan]}
    sink.write({"step": 30} | figures | {"samples": [1, 2]})
    sink.close()
    *kept, new = path.read_text().splitlines()
    assert kept == lines[:2]
    lost = '"loss": null, "grad_norm": null, "norms": [1.5, null]'
    assert new == f'{{"step": 30, {lost}, "samples": [1, 2]}}'


@pytest.mark.parametrize("clock", [0, 86_400])
def test_tensorboard_hides_steps_after_the_one_resumed_from(clock, tmp_path, monkeypatch) -> None:
    """Also if the job resumes on a machine whose clock is behind."""
    now = time.time()
    (tmp_path / "events.out.tfevents.of another program").touch()
    for resumed_step, steps in ((0, (1, 2, 3, 4)), (2, (3,))):
        monkeypatch.setattr("time.time", lambda s=resumed_step: now + (clock if s == 0 else 0))
        sink = TensorBoard(tmp_path, resumed_step, "[optimizer]\nlr = 2e-3")
        for step in steps:
            sink.write({"step": step, "loss": float(resumed_step)})
        sink.close()
    assert len({path.name.split(".")[3] for path in tmp_path.iterdir()}) == 3
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 0.0), (2, 0.0), (3, 2.0)]
    texts = events.Tensors("config/text_summary")
    assert [text.step for text in texts] == [0, 2]  # one per start
    assert b"lr = 2e-3" in texts[0].tensor_proto.string_val[0]
    hparams = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    start = HParamsPluginData.FromString(hparams).session_start_info
    assert {name: value.number_value for name, value in start.hparams.items()} == {
        "optimizer.lr": 2e-3
    }


def test_tensorboard_opens_with_both_losses(tmp_path) -> None:
    """It sorts groups of tags by their bytes."""
    sink = TensorBoard(tmp_path, 0, "")
    sink.write({"step": 1, "data/tokens": 4, "loss/train": 2.0, "validation/loss": 3.0})
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = sorted(events.Tags()["scalars"])
    assert tags == ["Loss/train", "Loss/validation", "data/tokens"]


def test_the_best_validation_is_the_lowest_mean_and_outlives_a_resume() -> None:
    validation = BestValidation(Checkpoint(enable=True, keep_best=True))
    validation.load_state_dict((10, 4.0))
    for step, losses, is_best in (
        *((11, [], False), (20, [3.0, 6.0], False), (30, [3.5, 4.0], True)),
        (40, [math.nan, 1.0], False),
    ):
        figures = {f"validation/{n}/loss": loss for n, loss in enumerate(losses)}
        validation.on_report({"step": step, **figures})
        assert validation.wants_save(step) == is_best, step
    assert validation.state_dict() == (30, 3.75)


@pytest.mark.parametrize(
    "keys", [{"keep_best": False}, {"enable": False}, {"load_only": True}], ids=str
)
def test_a_job_that_keeps_or_saves_none_saves_no_best(keys: dict[str, bool]) -> None:
    validation = BestValidation(Checkpoint(**{"enable": True, "keep_best": True} | keys))
    validation.on_report({"step": 5, "validation/loss": 1.0})
    assert not validation.wants_save(5)


TEXTS = {"def f": "def f(x):\n    return x", "1 +": "1 + 1"}


def test_texts_follow_the_record_of_their_step_in_sinks_that_take_them() -> None:
    class WithTexts(Kept):
        def write_texts(self, step, texts) -> None:
            self.append(texts | {"step": step})

    figures, both = Kept(), WithTexts()
    writer = SinkWriter([SafeSink("b", lambda: figures), SafeSink("a", lambda: both)])
    writer.add_texts(TEXTS)
    for step in (1, 2):
        writer.on_report({"step": step})
    assert [row["step"] for row in figures] == [1, 2]
    assert [row["step"] for row in both] == [1, 1, 2]
    assert both[1] == TEXTS | {"step": 1}


def test_texts_are_written_as_they_are(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, "meshwright")
    lines = TextLines(tmp_path / "samples.jsonl", resumed_step=0)
    events = TensorBoard(tmp_path, 0, "")
    for sink in (lines, events, Console(10, step=0)):
        sink.write({"step": 3, **RECORD})
        sink.write_texts(3, TEXTS)
        sink.close()
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert rows == [{"step": 3, "prompt": prompt, "text": text} for prompt, text in TEXTS.items()]
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    (event,) = read.Tensors("validation/text/0/text_summary")
    assert event.step == 3
    assert event.tensor_proto.string_val[0] == b"    def f(x):\n        return x\n"
    assert r'text: "def f(x):\n    return x"' in caplog.messages
    TextLines(tmp_path / "samples.jsonl", resumed_step=2).close()
    assert (tmp_path / "samples.jsonl").read_text() == ""


def test_a_sink_that_fails_warns_once_and_is_tried_again(caplog) -> None:
    full, bug = OSError(28, "No space left on device"), KeyError("validation/loss")
    file = Mock(write=Mock(side_effect=[full, bug, full, None]))
    sink = SafeSink("a.jsonl", lambda: file)
    for step in (1, 2, 3, 4):
        sink.write({"step": step})
    assert file.write.call_args.args == ({"step": 4},)
    assert caplog.messages == [
        "a.jsonl cannot be written: [Errno 28] No space left on device; training continues"
    ]
    with pytest.raises(KeyError):  # at the start, before a step could be lost
        SafeSink("b", Mock(side_effect=bug))
    SafeSink("c", Mock(side_effect=[full, bug])).write({"step": 1})  # steps could be lost by now


def test_a_record_is_written_whole_or_not_at_all(tmp_path) -> None:
    """Past the limit, the first part of a record would still fit."""
    file = WholeRecords(tmp_path / "a")
    file.append(b"12345\n")
    with no_room(10):
        with pytest.raises(OSError, match="File too large"):
            file.append(b"67890\n")
        assert (tmp_path / "a").read_bytes() == b"12345\n"
        file.append(b"6\n")
    assert (tmp_path / "a").read_bytes() == b"12345\n6\n"


def test_mfu_takes_the_published_peak_of_a_device_or_the_users(monkeypatch) -> None:
    """A peak that is measured while the machine is busy gives an MFU above 100 %."""
    config = changed(JobConfig(), {"training": {"mixed_precision_param": "bfloat16"}})
    unknown = None
    for name, tflops in (
        *(("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA GH200 480GB", 989)),
        *(("NVIDIA RTX A1000", unknown), ("NVIDIA GB200", unknown)),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", unknown),
    ):
        monkeypatch.setattr(hardware, "device_name", lambda device, name=name: name)
        found = hardware.peak_of(torch.device("cuda"), torch.bfloat16)
        assert (found and found[0]) == (tflops and tflops * 1e12), name
        assert hardware.peak_of(torch.device("cuda"), torch.float32) is None
    assert _peak_flops_per_s(config, CPU) is None
    given = changed(config, {"metrics": {"peak_tflops": 165.2}})
    assert _peak_flops_per_s(given, CPU) == pytest.approx(165.2e12)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES.keys())
def test_mfu_and_plans_take_the_same_peak_of_a_device(device, monkeypatch) -> None:
    """Without sparsity, which doubles what data sheets print in large letters."""
    monkeypatch.setattr(hardware, "device_name", lambda _: f"NVIDIA {device.name}")
    found = hardware.peak_of(torch.device("cuda"), torch.bfloat16)
    assert found is not None
    assert found[0] == device.flops_per_s


def test_time_left_counts_pauses_and_not_the_first_record(monkeypatch) -> None:
    console = Console(100, step=0)
    for now, step, left in ((60, 1, None), (98, 20, 80 * 2.0), (147, 41, 59 * 87 / 40)):
        monkeypatch.setattr("time.monotonic", lambda now=now: float(now))
        assert console._seconds_left(step) == (left and pytest.approx(left))
    assert console._seconds_left(100) == 0


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the library: runs by their ids, which take steps in rising order only."""
    module = types.ModuleType("wandb")
    module.Error = type("Error", (Exception,), {})
    module.runs, module.calls, module.exit_codes = {}, [], []

    class Run:
        def __init__(self, history: list) -> None:
            self.history = history

        @property
        def step(self) -> int:
            return self.history[-1][0] + 1 if self.history else 0

        def log(self, figures, step) -> None:
            assert step >= self.step, "W&B drops it"
            self.history.append((step, figures))

        def finish(self, exit_code) -> None:
            module.exit_codes.append(exit_code)

    def init(**arguments):
        module.calls.append(arguments)
        return Run(module.runs.setdefault(arguments["id"], []))

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def tracked(folder: Path) -> WeightsAndBiases:
    return WeightsAndBiases(folder, {}, project="", entity="", name="", is_resumed=False)


def test_a_resumed_job_continues_its_wandb_run_which_has_its_config(wandb, tmp_path) -> None:
    metrics = {"enable_wandb": True, "wandb_project": "p", "enable_tensorboard": False}
    config = changed(JobConfig(), {"job": {"dump_folder": str(tmp_path)}, "metrics": metrics})

    def train(first: int, last: int) -> None:
        sinks = [*_files(config, resumed_step=first - 1)]
        for step in range(first, last + 1):
            for sink in sinks:
                sink.write({"step": step, "loss/train": float(step)})
        for sink in sinks:
            sink.close()

    train(1, 5)
    train(4, 8)  # from the checkpoint of step 3
    (history,) = wandb.runs.values()
    assert history == [(step, {"loss/train": float(step)}) for step in range(1, 9)]
    for call in wandb.calls:
        found = call["project"], call["entity"], call["resume"], call["config"]
        assert found == ("p", None, "allow", to_json(config))
    train(1, 2)  # started over: another run
    assert len(wandb.runs) == 2


def test_every_logger_is_closed_and_a_run_that_fails_is_shown_as_failed(wandb, tmp_path) -> None:
    class Broken(Kept):
        def close(self) -> None:
            raise RuntimeError("its own fault")

    def close(*others: Kept) -> None:
        SinkWriter([*others, tracked(tmp_path)]).__exit__(None, None, None)

    close()
    with pytest.raises(RuntimeError, match="its own fault"):
        close(Broken())
    try:
        raise ValueError("training failed")
    except ValueError:
        close(Broken())  # which would hide it
    assert wandb.exit_codes == [0, 0, 1]


def test_a_wandb_run_that_is_refused_is_a_config_error(wandb, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(wandb, "init", Mock(side_effect=wandb.Error("permission denied")))
    with pytest.raises(ConfigError, match="permission denied\n  fix: wandb login"):
        tracked(tmp_path)


RECORD = {
    "loss/train": 7.0321,
    "optim/grad_norm": 12345.6,
    "optim/lr": 2e-3,
    "time/wps": 12345.6,
    "time/mfu_pct": 12.3,
    "time/tflops": 512.3456,
    "memory/peak_gib": 71.12,
    "validation/loss": 6.5,
    "validation/bits_per_byte": 2.1,
}


@pytest.mark.parametrize(
    ("columns", "steps", "left_out"),
    [(100, 1_000_000, []), (80, 120, ["TFLOP/s", "GiB"]), (80, 100_000, ["TFLOP/s", "GiB", "lr"])],
)
def test_console_lines_are_aligned_and_fit(capsys, monkeypatch, columns, steps, left_out) -> None:
    monkeypatch.setenv("MESHWRIGHT_COLUMNS", str(columns))
    log_to_console()
    console = Console(steps, step=0)
    for step in (1, steps // 2, steps - 1):
        monkeypatch.setattr("time.monotonic", lambda step=step: float(step))  # a second each
        console.write({"step": step, **RECORD})
    console.write({"step": steps, **{n: v for n, v in RECORD.items() if "mfu" not in n}})
    console.close()
    header, *lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if " step " in line]
    assert {len(line) for line in [header, *rows]} == {len(header)}
    assert len(header) <= columns
    names = ["step", "loss", "grad_norm", "lr", "wps", "mfu", "TFLOP/s", "GiB", "eta"]
    assert header.split()[1:] == [name for name in names if name not in left_out]
    assert "\x1b" not in "".join(lines)  # not a terminal
    assert rows[0].split()[-1] == "-"  # nothing is known yet
    assert "-" in rows[-1].split()  # a device without a known peak has no MFU
    if steps == 1_000_000:
        assert rows[1].split()[-2:] == ["5d", "18:53:20"]
    assert "validation: loss 6.5000  bits per byte 2.1000" in lines[1]


def test_colour_and_bar_are_for_terminals(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for no_colour in ("", "1"):
        terminal = io.StringIO()
        terminal.isatty = lambda: True
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("NO_COLOR", no_colour)
        log_to_console()
        console = Console(10, step=0)
        console.advance(5)
        console.write({"step": 5, **RECORD})
        console.close()
        logger.warning("careful")
        for colour in ("\x1b[1m", "\x1b[33m"):
            assert (colour in terminal.getvalue()) == (not no_colour)
        assert "step 5/10, eta" in terminal.getvalue()  # the bar
