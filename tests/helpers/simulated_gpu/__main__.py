"""A table of meshes and modes on a simulated H100: what one step waits for, and what it needs.

python -m tests.helpers.simulated_gpu [CASE ...]
"""

import sys
import tempfile
from pathlib import Path

from tests.helpers.simulated_gpu.cases import CASES
from tests.helpers.simulated_gpu.guard import build_guard
from tests.helpers.simulated_gpu.run import simulate


def main() -> None:
    names = sys.argv[1:] or list(CASES)
    with tempfile.TemporaryDirectory() as folder:
        guard = build_guard(Path(folder))
        if guard is None:
            sys.exit("needs g++")
        found = simulate(guard, names)
    print("| job | host waits | blocking copies | peak MiB | attention | waits at start |")
    print("|---|---|---|---|---|---|")
    for name, figures in found.items():
        if "error" in figures:
            print(f"| {name} | fails: {figures['error'].splitlines()[-1]} |")
            continue
        waits, copies, at_start = (
            sum(figures[key].values()) for key in ("waits", "blocking_copies", "init_waits")
        )
        kernels = ", ".join(f"{kernel} {count}" for kernel, count in figures["kernels"].items())
        peak = figures["peak_bytes"] / 2**20
        print(f"| {name} | {waits} | {copies} | {peak:.1f} | {kernels} | {at_start} |", flush=True)


if __name__ == "__main__":
    main()
