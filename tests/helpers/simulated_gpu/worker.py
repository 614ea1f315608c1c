"""One process that simulates ranks on a GPU, each case in a fork of it.

python -m tests.helpers.simulated_gpu.worker GUARD CASE ...      prints a line of JSON for each

GUARD is the library that `guard.py` builds.
"""

import sys
from pathlib import Path

from tests.helpers.simulated_gpu.guard import load_guard


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
