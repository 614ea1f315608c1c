"""Starts the process that simulates ranks on a GPU, each case in a fork of it, and reads its lines.

python -m tests.helpers.simulated_gpu.run GUARD CASE ...      is that process
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.helpers.simulated_gpu.guard import load_guard

ROOT = Path(__file__).parents[3]


def simulate(guard: Path, names: Sequence[str]) -> dict[str, Any]:
    """Figures of each case, as `rank.py` has them; or {"error": traceback}.

    Args:
        guard: the library that `guard.py` builds.
    """
    words = [sys.executable, "-m", "tests.helpers.simulated_gpu.run", str(guard), *names]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # a GPU that is there is left alone
    worker = subprocess.run(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(line) for line in worker.stdout.splitlines())


def main() -> None:
    library, *names = sys.argv[1:]
    load_guard(Path(library))
    # not before: torch asks once whether there is CUDA, and FSDP2 and others take its names
    from tests.helpers.simulated_gpu import fake_cuda

    fake_cuda.install()
    from tests.helpers.simulated_gpu.rank import simulate_all

    simulate_all(names)


if __name__ == "__main__":
    main()
