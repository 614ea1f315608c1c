"""Planned peaks beside those of torch's allocator, for every axis, mode and schedule.

    python -m benchmarks.planning [CASE ...]

Each case is one rank on the CPU, of the small model of tests/helpers/planning.py: planned on fake
tensors, and run with real tensors under the fake process group; the peak is that of step 2.
"""

import json
import subprocess
import sys


def main() -> None:
    words = [sys.executable, "-m", "tests.helpers.planning", *sys.argv[1:]]
    worker = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    print("| job | planned bytes | allocated bytes | difference | unattributed |")
    print("|---|---|---|---|---|")
    for line in worker.stdout:
        name, found = json.loads(line)
        if "error" in found:
            print(f"| {name} | fails: {found['error'].splitlines()[-1]} |", flush=True)
            continue
        planned, allocated = found["planned"], found["allocated"]
        part = found["by_purpose"]["unattributed"] / planned
        off = planned / allocated - 1
        print(f"| {name} | {planned:,} | {allocated:,} | {off:+.3%} | {part:.2%} |", flush=True)


if __name__ == "__main__":
    main()
