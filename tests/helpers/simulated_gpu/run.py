"""Starts the processes that simulate, and reads what they found."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def simulate(guard: Path, names: Sequence[str]) -> dict[str, Any]:
    """Figures of each case, as `rank.Figures`; or {"error": traceback}.

    Args:
        guard: the library that `guard.py` builds.
    """
    words = [sys.executable, "-m", "tests.helpers.simulated_gpu.worker", str(guard), *names]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # a GPU that is there is left alone
    worker = subprocess.run(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(line) for line in worker.stdout.splitlines())
