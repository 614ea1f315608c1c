"""Starts the processes that simulate, and reads what they found."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def simulate(guard: Path, names: Sequence[str], num_processes: int = 2) -> dict[str, Any]:
    """Figures of each case, as `worker.Figures`; or {"error": traceback}."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.simulated_gpu.worker", str(guard), *some],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(num_processes)
        if (some := names[number::num_processes])
    ]
    found: dict[str, Any] = {}
    for process in started:
        output, _ = process.communicate()
        found |= dict(json.loads(line) for line in output.splitlines())
        if process.returncode:
            raise RuntimeError(f"a process that simulates ended with {process.returncode}")
    return {name: found[name] for name in names}
