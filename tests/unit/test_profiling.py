"""Traces and snapshots of GPU memory: when they are written, and their summaries."""

import json
import pickle
from pathlib import Path

import pytest
import torch

import meshwright
from meshwright.config.job_config import Profiling
from meshwright.metrics.profiling import Profiler, summarize_memory

SNAPSHOT: dict[str, list[object]] = {"segments": []}


@pytest.fixture
def recorded(monkeypatch) -> list[object]:
    """In place of the GPU: what was asked of its recorder."""
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **options: asked.append(options)
    )
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: SNAPSHOT)
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
    assert pickle.loads((folder / "step_6/rank_2.pickle").read_bytes()) == SNAPSHOT


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


def test_the_summary_of_memory_names_lines_of_code() -> None:
    frames = [
        {"filename": "??", "line": 0, "name": "c10::alloc"},
        {"filename": (torchs := torch.nn.__file__), "line": 1, "name": "forward"},
        {"filename": (ours := meshwright.__file__), "line": 7, "name": "train_step"},
    ]

    def block(gib: float, state: str = "active_allocated", frames: list = frames) -> dict:
        return {"size": int(gib * 2**30), "state": state, "frames": frames}

    blocks = [block(1), block(0.5), block(0.25, frames=frames[:2]), block(3, frames=[])]
    text = summarize_memory({"segments": [{"blocks": blocks}, {"blocks": [block(2, "inactive")]}]})
    assert text.splitlines() == [
        "memory in use: 4.750 GiB; reserved and free: 2.000 GiB",
        "by the line that asked for it:",
        "     3.000 GiB      1 x  unknown: allocated before recording began",
        f"     1.500 GiB      2 x  {ours}:7 train_step",
        f"     0.250 GiB      1 x  {torchs}:1 forward",
    ]
