"""Plant each fault, run what must find it, and print the score."""

import argparse
import signal
import sys
import time
from pathlib import Path

from tests.faults.catalogue import FAULTS, Fault
from tests.faults.probe import failures_of

HEAD = "| fault | published | case | seconds | score | verdict |\n|---|---|---|---|---|---|\n"


def row(fault: Fault, seconds: float, score: str, line: str) -> str:
    """Return a row of the table."""
    axes = " x ".join(f"{axis} {degree}" for axis, degree in fault.mesh.items())
    name = fault.case or axes or "one process"
    case = f"prove: {name}" if fault.finder == "prove" else f"meshwright {fault.finder}"
    case = f"prove: {fault.finder}" if fault.finder in ("reference", "properties") else case
    case = fault.finder if fault.test_file else case
    options = fault.words if fault.kind == "fp32" else (*fault.words, fault.kind)
    case = ", ".join([case, " ".join(options)]) if options else case
    *_, text = ["", *line.strip().splitlines()]  # of a traceback, what was raised
    text = text[:110].replace("|", "\\|")
    cells = (
        f"{fault.name.replace('_', ' ')} | {fault.thread}",
        f"{case} | {seconds:.1f} | {score} | {text}",
    )
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    """Print a line for each; exit with 1 if one was not found, or a clean case fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="names")
    parser.add_argument("--table", type=Path, help="file for a table in Markdown")
    parser.add_argument("--clean", action="store_true", help="the same cases without the faults")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and ends the case's processes
    chosen = [fault for fault in FAULTS if not given.only or fault.name in given.only]
    num_found, num_named, rows = 0, 0, list[str]()
    for fault in chosen:
        start = time.perf_counter()
        try:
            lines, other = failures_of(fault, planted=not given.clean), "BLIND"
        except TimeoutError:
            lines, other = [], "LATE"
        naming = [line for line in lines if fault.named in line]
        is_named = bool(naming)
        num_found, num_named = num_found + bool(lines), num_named + is_named
        other = "clean" if given.clean and other == "BLIND" else other
        score = "named" if is_named else "found" if lines else other
        seconds = time.perf_counter() - start
        print(f"{score} {seconds:5.1f} s  {fault.name} ({fault.thread})", flush=True)
        rows.append(row(fault, seconds, score, (naming or lines or [""])[0]))
        if given.table is not None:
            given.table.write_text(HEAD + "".join(rows), "utf-8")
        for line in lines[:2]:
            print(f"          {line}", flush=True)
    print(f"{len(chosen)} cases: {num_found} found, {num_named} of them named")
    sys.exit(bool(num_found) if given.clean else num_found < len(chosen))


if __name__ == "__main__":
    main()
