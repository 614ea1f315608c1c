"""The jobs of benchmarks/gpu_speed.py, where there is no GPU."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu_speed


@pytest.mark.slow
def test_a_tiny_job_leaves_its_figures_and_one_that_fails_its_error(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = gpu_speed.run_job(gpu_speed.TINY, tmp_path / "good", {}, steps=7)
    assert "error" not in found, found["error"]
    for key in ("time/step_s", "time/wps", "step_1_allocated_gib", "steady_reserved_gib"):
        assert found[key] > 0
    assert "Self CPU time total" in found["operators"]
    bad = gpu_speed.run_job(gpu_speed.TINY, tmp_path / "bad", {"training.seq_len": -1}, steps=7)
    assert bad["exit_code"] == 2
    assert "training.seq_len" in bad["error"]
    machine = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.13"}
    jobs = json.loads(json.dumps({"good": found, "bad": bad}))  # as saved
    gpu_speed.show({"machine": machine, "rates": {"memory, GB/s": 1.0}, "jobs": jobs})
    said = capsys.readouterr().out
    assert "bad: FAILED" in said
    assert "989 TFLOP/s" in said
    assert f"{found['time/wps']:12.2f}" in said


@pytest.mark.slow
def test_a_job_that_does_not_end_is_killed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_speed, "LIMIT_S", 0.2)
    found = gpu_speed.run_job(gpu_speed.TINY, tmp_path, {})
    assert found["exit_code"] == -9
    assert "0.2 s" in found["error"]
