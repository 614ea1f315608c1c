"""Traces and snapshots of GPU memory: when they are written, and their summaries."""

import json
from pathlib import Path

import pytest
import torch

from meshwright.config.job_config import Profiling
from meshwright.metrics.profiling import Profiler


@pytest.fixture
def recorded(monkeypatch) -> list[object]:
    """In place of the GPU: what was asked of its recorder."""
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **options: asked.append(options)
    )
    dump = lambda path: Path(path).write_bytes(b"its memory")  # noqa: E731
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    return asked


def written(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.pickle")}


CONFIG = Profiling(enable_memory_snapshot=True, profile_freq=3)


def test_snapshots_by_the_step_of_the_job(recorded, tmp_path) -> None:
    with Profiler(CONFIG, tmp_path, 2, 4) as profiler:
        for _ in range(5):  # steps 5 to 9
            profiler.step()
    folder = tmp_path / "memory_snapshot"
    assert written(folder) == {"step_6/rank_2.pickle", "step_9/rank_2.pickle"}
    assert recorded == [{"max_entries": 100_000}, {"enabled": None}]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), ValueError("other")])
def test_a_snapshot_when_memory_runs_out(error: Exception, recorded, tmp_path) -> None:
    def train() -> None:
        with Profiler(CONFIG, tmp_path, 0, 0) as profiler:
            profiler.step()
            raise error

    with pytest.raises(type(error)):
        train()
    is_full = isinstance(error, torch.OutOfMemoryError)
    wanted = {"step_2_out_of_memory/rank_0.pickle"} if is_full else set()
    assert written(tmp_path / "memory_snapshot") == wanted


def test_without_a_gpu_it_says_so(monkeypatch, tmp_path, caplog) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level("INFO"), Profiler(CONFIG, tmp_path, 0, 0) as profiler:
        profiler.step()
    assert "enable_memory_snapshot has no effect: there is no GPU" in caplog.text
    assert not written(tmp_path)


def test_a_trace_on_demand_with_its_summary(tmp_path, caplog) -> None:
    """After step 4: step 5 warms up, 6 and 7 are traced, and no other."""
    config = Profiling(profiler_warmup=1, profiler_active=2)
    with caplog.at_level("INFO"), Profiler(config, tmp_path, 1, 4) as profiler:
        profiler.request()
        profiler.request()
        for step in range(5, 10):
            with torch.profiler.record_function(f"step {step}"):
                torch.ones(64, 64) @ torch.ones(64, 64)
            profiler.step()
    assert "asked for a trace: of 2 step(s) after step 5" in caplog.text
    assert caplog.text.count("PROFILE ignored: profiling is already on") == 1
    (folder,) = (tmp_path / "profile_traces").iterdir()
    assert folder.name == "step_7"
    names = {e["name"] for e in json.loads((folder / "rank_1.json").read_text())["traceEvents"]}
    assert {"step 6", "step 7"} <= names
    assert not {"step 5", "step 8"} & names
    summary = (folder / "rank_1.txt").read_text()
    (multiplied,) = (line.split() for line in summary.splitlines() if "aten::mm " in line)
    assert multiplied[-1] == "2"  # calls
    assert "Self CPU time total: " in summary


def test_a_job_that_ends_before_leaves_no_half_of_a_trace(tmp_path, caplog) -> None:
    with Profiler(Profiling(profiler_warmup=0), tmp_path, 0, 0) as profiler:
        profiler.request()
    assert "the job ended before the requested trace" in caplog.text
    assert not (tmp_path / "profile_traces").exists()


def test_on_a_gpu_a_request_gives_the_memory_too(recorded, tmp_path) -> None:
    with Profiler(Profiling(profiler_warmup=0), tmp_path, 0, 0) as profiler:
        profiler.request()
        for _ in range(3):
            profiler.step()
    assert written(tmp_path / "memory_snapshot") == {"step_1/rank_0.pickle"}
    assert recorded == [{"max_entries": 100_000}, {"enabled": None}]
