"""Traces and snapshots of GPU memory: when they are written, and their summaries."""

import gc
import json
from pathlib import Path

import pytest
import torch
from torch.autograd.profiler_util import FunctionEvent

from meshwright.config.job_config import Profiling
from meshwright.metrics.profiling import Profiler

# a job without is rightly told so
pytestmark = pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")


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


CONFIG = Profiling(enable_memory_snapshot=True, profile_freq=3)


def written(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.pickle")}


@pytest.mark.parametrize("is_asked", [False, True])
def test_snapshots_by_the_step_of_the_job_or_on_demand(is_asked, recorded, tmp_path) -> None:
    config = Profiling(profiler_warmup=0) if is_asked else CONFIG
    with Profiler(config, tmp_path, 2, 4) as profiler:
        if is_asked:
            profiler.on_trace_request()
        for _ in range(5):  # steps 5 to 9
            profiler.on_step_end()
    steps = (5,) if is_asked else (6, 9)
    assert written(tmp_path / "memory_snapshot") == {f"step_{n}/rank_2.pickle" for n in steps}
    assert recorded == [{"max_entries": 100_000}, {"enabled": None}]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), ValueError("other")])
def test_a_snapshot_when_memory_runs_out(error: Exception, recorded, tmp_path) -> None:
    def train() -> None:
        with Profiler(CONFIG, tmp_path, 0, 0) as profiler:
            profiler.on_step_end()
            raise error

    with pytest.raises(type(error)):
        train()
    is_full = isinstance(error, torch.OutOfMemoryError)
    wanted = {"step_2_out_of_memory/rank_0.pickle"} if is_full else set()
    assert written(tmp_path / "memory_snapshot") == wanted


def test_traces_do_not_fill_the_memory(tmp_path) -> None:
    """A job's own collections leave out old objects, and a trace lives until the next one."""
    config, was_on, seen = Profiling(enable_profiling=True, profile_freq=5), gc.isenabled(), []
    gc.disable()
    try:
        with Profiler(config, tmp_path, 0, 0) as profiler:
            for step in range(1, 21):
                torch.ones(1).add(1)
                profiler.on_step_end()
                gc.collect(1)
                if step % 5 == 0:
                    seen.append(sum(isinstance(one, FunctionEvent) for one in gc.get_objects()))
    finally:
        if was_on:
            gc.enable()
    assert 0 < seen[-1] <= 2 * seen[0]


def test_a_trace_on_demand_with_its_summary(tmp_path, caplog) -> None:
    """After step 4: step 5 warms up, 6 and 7 are traced, and no other."""
    config = Profiling(profiler_warmup=1, profiler_active=2)
    with caplog.at_level("INFO"), Profiler(config, tmp_path, 1, 4) as profiler:
        profiler.on_trace_request()
        profiler.on_trace_request()
        for step in range(5, 10):
            with torch.profiler.record_function(f"step {step}"):
                torch.ones(64, 64) @ torch.ones(64, 64)
            profiler.on_step_end()
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


def test_a_job_that_ends_before_or_has_no_gpu_says_so_and_leaves_no_file(tmp_path, caplog) -> None:
    config = Profiling(profiler_warmup=0, enable_memory_snapshot=True)
    with caplog.at_level("INFO"), Profiler(config, tmp_path, 0, 0) as profiler:
        profiler.on_trace_request()
    assert "the job ended before the requested trace" in caplog.text
    assert "enable_memory_snapshot has no effect: there is no GPU" in caplog.text
    assert not any(tmp_path.iterdir())
