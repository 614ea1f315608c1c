"""Report figures of one results file that are worse than those of another beyond noise.

Ratios to the bare loop are compared, since machines and days differ; and peak memory and the time
to the first step where the machine is the same. Noise is half the spread of rounds, at least 3 %.
Exit code 1 if anything is worse.

    python benchmarks/compare.py benchmarks/results/OLD.json benchmarks/results/NEW.json
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LEAST_NOISE = 0.03


def worse(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Say what is worse in `new`, of what both have measured."""
    is_same_machine = all(old["machine"][k] == new["machine"][k] for k in ("device", "cores"))
    before = {_key(part, row): row for part in old["results"] for row in part["rows"]}
    for part in new["results"]:
        for row in part["rows"]:
            was = before.get(_key(part, row))
            if was is None:
                continue
            noise = max(LEAST_NOISE, _noise(was), _noise(row))
            name = f"{part['mode']}, {row['contender']}"
            changes = [("ratio_to_bare", was["ratio_to_bare"] / row["ratio_to_bare"])]
            if is_same_machine:
                changes += [(k, row[k] / was[k]) for k in ("peak_gib", "first_step_s")]
            for figure, change in changes:
                if change > 1 + noise:
                    yield f"{name}: {figure} {was[figure]} -> {row[figure]} (noise {noise:.0%})"


def _key(part: dict[str, Any], row: dict[str, Any]) -> str:
    return json.dumps([part["workload"], row["contender"]], sort_keys=True)


def _noise(row: dict[str, Any]) -> float:
    low, high = row["spread"]
    return (high - low) / 2 / row["tokens_per_s"]


def main() -> None:
    """Compare two files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    args = parser.parse_args()
    found = list(worse(json.loads(args.old.read_text()), json.loads(args.new.read_text())))
    print("\n".join(found) or "nothing is worse beyond noise")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
