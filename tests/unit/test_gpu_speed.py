"""What benchmarks/gpu_speed.py reads from a trace, and its jobs where there is no GPU."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_speed

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def event(name: str, start: float, length: float, stream: int = 7, cat: str = "kernel") -> dict:
    args = {"stream": stream}
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "args": args}


def test_gaps_of_the_compute_stream_are_found_in_a_trace() -> None:
    trace = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5000},
        {"ph": "M", "name": "process_name", "args": {}},
        event("gemm", 1000, 400),
        event("flash_fwd_kernel", 1700, 200),
        event("Memset", 1900, 50, cat="gpu_memset"),
        event("gemm", 1920, 80),  # begins before the last one ends
        event("gemm", 1800, 10, stream=8),  # of another stream
    ]
    found = gpu_speed.stream_use(trace)
    assert found["window_ms"] == 1.0
    assert found["idle_pct"] == pytest.approx(30)
    assert found["longest_gaps"] == [{"us": 300, "after": "gemm", "before": "flash_fwd_kernel"}]
    assert [kernel["name"] for kernel in found["kernels"]] == ["gemm", "flash_fwd_kernel"]
    assert found["kernels"][0]["ms"] == 0.49
    assert found["attention_kernels"] == ["flash_fwd_kernel"]
    assert gpu_speed.stream_use(trace[:2]) == {}


def test_rates_are_measured_on_a_cpu_too(monkeypatch) -> None:
    for module in (gpu_speed, sys.modules["roofline"]):
        monkeypatch.setattr(module, "best_s", lambda function, device: (function(), 1.0)[1])
    rates = gpu_speed.measure_rates(gpu_speed.TINY, CPU)
    assert rates["attention by torch's choice, forward, TFLOP/s"] == 2 * 64 * 64**2 / 1e12
    assert "attention" in rates["attention by torch's choice, kernels"]
    assert {"memory, GB/s", "host to device, GB/s", "launch by the host, us"} <= rates.keys()
    assert sum(name.startswith("matmul") for name in rates) == 15
    assert all(rate > 0 for rate in rates.values() if not isinstance(rate, str))


def test_the_docs_state_the_limits_of_the_gpu_script() -> None:
    script = (ROOT / "scripts/gpu_smoke.sh").read_text()
    seconds = sum(map(int, re.findall(r"^part \w+ (\d+) ", script, re.MULTILINE)))
    stated = re.search(
        r"gpu_smoke.sh +# (\d+) minutes at most", (ROOT / "docs/clusters.md").read_text()
    )
    assert stated is not None
    assert int(stated[1]) == seconds / 60


@pytest.mark.slow
def test_a_tiny_job_leaves_its_figures_and_one_that_fails_its_error(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    good = gpu_speed.run_job(gpu_speed.TINY, tmp_path / "good", {}, steps=7)
    assert "error" not in good, good["error"]
    bad = gpu_speed.run_job(gpu_speed.TINY, tmp_path / "bad", {"training.seq_len": -1}, steps=7)
    assert (bad["exit_code"], "training.seq_len" in bad["error"]) == (2, True)
    monkeypatch.setattr(gpu_speed, "LIMIT_S", 0.2)
    late = gpu_speed.run_job(gpu_speed.TINY, tmp_path / "late", {})
    assert (late["exit_code"], "0.2 s" in late["error"]) == (-9, True)
    machine = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.13"}
    jobs = json.loads(json.dumps({"good": good, "bad": bad}))  # as saved
    gpu_speed.show({"machine": machine, "rates": {"memory, GB/s": 1.0}, "jobs": jobs})
    said = capsys.readouterr().out
    for part in ("bad: FAILED", "989 TFLOP/s", f"{good['time/wps']:12.2f}"):
        assert part in said
