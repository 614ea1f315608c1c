"""Starts the processes that simulate, and reads what they found."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def simulate(guard: Path | None, names: Sequence[str]) -> dict[str, Any]:
    """Figures of each case, as `rank.Figures`; or {"error": traceback}.

    Args:
        guard: None where torch has a GPU.
    """
    library = "-" if guard is None else str(guard)
    words = [sys.executable, "-m", "tests.helpers.simulated_gpu.worker", library, *names]
    worker = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(line) for line in worker.stdout.splitlines())
