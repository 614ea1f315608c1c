"""`meshwright prove --gpu` on the GPUs that there are. scripts/gpu_smoke.sh runs the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.jobs import ROOT


@pytest.mark.only_cuda
def test_every_case_that_fits_equals_one_process(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "meshwright", "prove", "debug_model", "--gpu"]
    done = subprocess.run(
        [*words, "--output", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    proof, gpus = json.loads((tmp_path / "proof.json").read_text()), torch.cuda.device_count()
    assert proof["gpus"] == gpus
    verdicts = {case["name"]: case["verdict"] for case in proof["cases"] if case["ranks"] <= gpus}
    assert {*verdicts.values()} == {"equal"}, verdicts
    assert any(name.startswith("as it trains") for name in verdicts)
    too_large = {case["verdict"] for case in proof["cases"] if case["ranks"] > gpus}
    assert too_large <= {"not run"}
