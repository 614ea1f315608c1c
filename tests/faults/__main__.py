"""Plant each fault, run the case that must find it, and print the score."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import meshwright
from tests.faults.catalogue import FAULTS, Fault

PACKAGE = Path(meshwright.__file__).parent
PATIENCE_S = 300


def plant(fault: Fault, folder: Path) -> None:
    """Copy the package to `folder`, with the fault in it.

    Raises:
        ValueError: if its place has changed.
    """
    copy = shutil.copytree(
        PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("train_configs", "assets", "tests"):
        (folder / name).symlink_to(PACKAGE.parent / name)
    file = copy / fault.file
    text = file.read_text("utf-8")
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {fault.file} has changed; mend the patch")
    file.write_text(text.replace(fault.old, fault.new), "utf-8")


def failures_of(fault: Fault | None, case: Fault) -> list[str]:
    """Return the lines of the verdict of `case` in a copy with `fault` in it; None: as it is."""
    with tempfile.TemporaryDirectory() as folder:
        path = PACKAGE.parent
        if fault is not None:
            plant(fault, Path(folder))
            path = Path(folder)
        done = subprocess.run(
            [sys.executable, "-m", "tests.faults.probe", case.name],
            cwd=path,
            env=os.environ | {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    if done.returncode:
        return [f"stopped: {done.stderr.strip().splitlines()[-1]}"]
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print a line for each; exit with 1 if one was not found, or a clean case fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="name of one")
    parser.add_argument("--clean", action="store_true", help="the same cases without the faults")
    given = parser.parse_args()
    chosen = [fault for fault in FAULTS if given.only in (None, fault.name)]
    num_found = num_named = 0
    for fault in chosen:
        start = time.perf_counter()
        lines = failures_of(None if given.clean else fault, fault)
        is_named = any(fault.named in line for line in lines)
        num_found, num_named = num_found + bool(lines), num_named + is_named
        score = "named" if is_named else "found" if lines else "NOT FOUND"
        seconds = time.perf_counter() - start
        print(f"{score:9} {seconds:5.1f} s  {fault.name} ({fault.thread})", flush=True)
        for line in lines[:2]:
            print(f"          {line}", flush=True)
    print(f"{len(chosen)} cases: {num_found} found, {num_named} of them named")
    sys.exit(num_found if given.clean else int(num_found < len(chosen)))


if __name__ == "__main__":
    main()
