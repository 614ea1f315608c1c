"""Figures and where they go."""

import json
import logging
import math
import resource

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from meshwright import hardware
from meshwright.metrics.reporter import Reporter, Work
from meshwright.metrics.sinks import JsonLines, Spared, WholeRecords
from meshwright.metrics.tensorboard_file import TensorBoard


class Kept(list):
    def write(self, record) -> None:
        self.append(record)

    def close(self) -> None:
        pass


def test_rates_follow_from_tokens_time_and_flops(monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    work = Work(tokens_per_step=1000, flops_per_token=600, num_devices=4, peak_flops_per_s=1e6)
    sink = Kept()
    reporter = Reporter(work, torch.device("cpu"), [sink], tokens_seen=5000)
    for _ in range(2):
        now += 0.5
        reporter.count(data_time_s=0.1)
    with reporter.paused():
        now += 50.0
    reporter.report(7, loss=2.0, grad_norm=1.0, lr=1e-3)
    (record,) = sink
    assert record["step_time_s"] == pytest.approx(0.5)
    assert record["data_time_s"] == pytest.approx(0.1)
    assert record["wps"] == pytest.approx(1000 / 0.5 / 4)
    assert record["mfu_pct"] == pytest.approx(100 * 500 * 600 / 1e6)
    assert record["tokens_seen"] == 7000
    now += 0.25
    reporter.count(data_time_s=0.0)
    reporter.report(8, loss=2.0, grad_norm=1.0, lr=1e-3)
    assert sink[1]["step_time_s"] == pytest.approx(0.25)  # since the last record alone


def test_a_resumed_run_leaves_no_step_twice(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (10, 20, 30)]
    path.write_text("\n".join(lines) + '\n{"step": 40, "lo')  # killed in the middle of a line
    sink = JsonLines(path, resumed_step=20)
    sink.write({"step": 30, "loss": 2.0})
    sink.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["step"], r["loss"]) for r in records] == [(10, 1.0), (20, 1.0), (30, 2.0)]


def test_tensorboard_hides_steps_after_the_one_resumed_from(tmp_path) -> None:
    for resumed_step, steps in ((0, (1, 2, 3, 4)), (2, (3,))):
        sink = TensorBoard(tmp_path, resumed_step)
        for step in steps:
            sink.write({"step": step, "loss": float(resumed_step)})
        sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 0.0), (2, 0.0), (3, 2.0)]


def test_what_is_not_finite_is_null_in_json(tmp_path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl", resumed_step=0)
    sink.write({"step": 3, "loss": math.nan, "grad_norm": math.inf, "lr": 0.5, "samples": [1, 2]})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line == '{"step": 3, "loss": null, "grad_norm": null, "lr": 0.5, "samples": [1, 2]}\n'


class Full:
    """Fails until there is room."""

    def __init__(self, room: list) -> None:
        self._room = room

    def write(self, record) -> None:
        if not self._room:
            raise OSError(28, "No space left on device")
        self._room.append(record)

    def close(self) -> None:
        return


def test_a_sink_that_fails_warns_once_and_is_tried_again(caplog) -> None:
    room: list = []
    logging.getLogger("meshwright").propagate = True
    sink = Spared("a.jsonl", lambda: Full(room))
    for _ in range(3):
        sink.write({"step": 1})
    room.append("some")
    sink.write({"step": 2})
    assert room == ["some", {"step": 2}]
    assert caplog.messages == [
        "a.jsonl cannot be written: [Errno 28] No space left on device; training goes on"
    ]


def test_a_record_is_written_whole_or_not_at_all(tmp_path) -> None:
    """Past the limit, the first part of a record would still fit."""
    file = WholeRecords(tmp_path / "a")
    file.append(b"12345\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            file.append(b"67890\n")
        assert (tmp_path / "a").read_bytes() == b"12345\n"
        file.append(b"6\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "a").read_bytes() == b"12345\n6\n"


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
    ],
)
def test_published_peaks(monkeypatch, name: str, peak: float) -> None:
    monkeypatch.setattr(hardware, "device_name", lambda device: name)
    assert hardware.peak_of(torch.device("cuda"), torch.bfloat16).flops_per_s == peak


@pytest.mark.parametrize(
    "name",
    ["NVIDIA RTX A1000", "NVIDIA GB200", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Intel(R) Xeon(R)"],
)
def test_a_device_not_in_the_table_is_measured_and_says_so(monkeypatch, name: str) -> None:
    monkeypatch.setattr(hardware, "device_name", lambda device: name)
    peak = hardware.peak_of(torch.device("cpu"), torch.bfloat16)
    assert peak.source == "measured"
    assert math.isfinite(peak.flops_per_s)
    assert peak.flops_per_s > 1e9
