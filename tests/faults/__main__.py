"""Plant each fault, run the case that must find it, and print the score."""

import argparse
import sys
import time

from tests.faults.catalogue import FAULTS
from tests.faults.probe import failures_of


def main() -> None:
    """Print a line for each; exit with 1 if one was not found, or a clean case fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="names")
    parser.add_argument("--clean", action="store_true", help="the same cases without the faults")
    given = parser.parse_args()
    chosen = [fault for fault in FAULTS if not given.only or fault.name in given.only]
    num_found = num_named = 0
    for fault in chosen:
        start = time.perf_counter()
        lines = failures_of(fault, planted=not given.clean)
        is_named = any(fault.named in line for line in lines)
        num_found, num_named = num_found + bool(lines), num_named + is_named
        score = "named" if is_named else "found" if lines else "clean" if given.clean else "BLIND"
        seconds = time.perf_counter() - start
        thread = fault.thread or "no thread"
        print(f"{score} {seconds:5.1f} s  {fault.name} ({thread})", flush=True)
        for line in lines[:2]:
            print(f"          {line}", flush=True)
    print(f"{len(chosen)} cases: {num_found} found, {num_named} of them named")
    sys.exit(bool(num_found) if given.clean else num_found < len(chosen))


if __name__ == "__main__":
    main()
