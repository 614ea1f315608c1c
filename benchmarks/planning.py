"""Planned peaks beside those of torch's allocator, for every axis, mode and schedule.

    python -m benchmarks.planning [CASE ...]
    python -m benchmarks.planning --presets [NAME ...]

The second plans every preset, or those named, and writes the plan into its header.

Each case is one rank on the CPU, of the small model of tests/helpers/planning.py: planned on fake
tensors, and run with real tensors under the fake process group; the peak is that of step 2.
"""

import datetime
import json
import subprocess
import sys

from tests.helpers.presets import peak_gib, presets, with_plan


def main() -> None:
    if sys.argv[1:2] == ["--presets"]:
        write_presets(sys.argv[2:])
        return
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


def write_presets(names: list[str]) -> None:
    today = datetime.date.today().isoformat()
    for path, ranks in presets():
        if names and path.stem not in names:
            continue
        text = path.read_text()
        peak = peak_gib(path, ranks)
        path.write_text(with_plan(path, text, ranks, peak, today))
        print(f"{path.name}: {peak:.1f} GiB on {ranks} ranks", flush=True)


if __name__ == "__main__":
    main()
