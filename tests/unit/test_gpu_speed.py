"""What benchmarks/gpu_speed.py reads from a trace, and its jobs where there is no GPU."""

import re
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


def test_the_docs_state_the_limits_of_the_gpu_script() -> None:
    script = (ROOT / "scripts/gpu_smoke.sh").read_text()
    seconds = sum(map(int, re.findall(r"^part \w+ (\d+) ", script, re.MULTILINE)))
    stated = re.search(
        r"gpu_smoke.sh +# (\d+) minutes at most", (ROOT / "docs/clusters.md").read_text()
    )
    assert stated is not None
    assert int(stated[1]) == seconds / 60
