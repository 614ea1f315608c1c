"""Snapshots of GPU memory: when they are written, and that none is asked of a machine without."""

from pathlib import Path

import pytest
import torch

from meshwright.config.job_config import Profiling
from meshwright.log import logger
from meshwright.profiling import build_profiler


@pytest.fixture
def recorded(monkeypatch) -> list[object]:
    """In place of the GPU: what was asked of its recorder."""
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **options: asked.append(options)
    )
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"snapshot")
    )
    return asked


def written(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.pickle")}


CONFIG = Profiling(enable_memory_snapshot=True, profile_freq=3)


def test_snapshots_by_the_step_of_the_job(recorded, tmp_path) -> None:
    with build_profiler(CONFIG, tmp_path, 2, 4) as profiler:
        for _ in range(5):  # steps 5 to 9
            profiler.step()
    folder = tmp_path / "memory_snapshot"
    assert written(folder) == {"step_6/rank_2.pickle", "step_9/rank_2.pickle"}
    assert recorded == [{"max_entries": 100_000}, {"enabled": None}]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), ValueError("other")])
def test_a_snapshot_when_memory_runs_out(error: Exception, recorded, tmp_path) -> None:
    def train() -> None:
        with build_profiler(CONFIG, tmp_path, 0, 0) as profiler:
            profiler.step()
            raise error

    with pytest.raises(type(error)):
        train()
    is_full = isinstance(error, torch.OutOfMemoryError)
    wanted = {"step_2_out_of_memory/rank_0.pickle"} if is_full else set()
    assert written(tmp_path / "memory_snapshot") == wanted


def test_without_a_gpu_it_says_so(monkeypatch, tmp_path, caplog) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level("INFO"), build_profiler(CONFIG, tmp_path, 0, 0) as profiler:
        profiler.step()
    assert "enable_memory_snapshot has no effect: there is no GPU" in caplog.text
    assert not written(tmp_path)
