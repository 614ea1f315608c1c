"""What the exact record of steps (steps.jsonl) costs: processor time beside that of a step.

python -m benchmarks.records
"""

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from unittest import mock

from meshwright import Session, load
from meshwright.train.step_record import StepRecord

SECONDS = defaultdict[str, list[float]](list)


def timed(name: str, method: Callable[..., None]) -> Callable[..., None]:
    """Return the method with its processor seconds kept."""

    def call(*args: object) -> None:
        start = time.process_time()
        method(*args)
        SECONDS[name].append(time.process_time() - start)

    return call


def main() -> None:
    """Train the debug preset on one process, with a report after each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    steps = parser.parse_args().steps
    methods = {"add": StepRecord.add, "on_report": StepRecord.on_report}
    wrapped = {name: timed(name, method) for name, method in methods.items()}
    with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(StepRecord, **wrapped):
        keys = {"job.dump_folder": folder, "training.steps": steps, "metrics.log_freq": 1}
        with Session(load("debug_model", keys)) as session:
            start = time.process_time()
            for _ in session.steps():
                SECONDS["step"].append(time.process_time() - start)
                start = time.process_time()
    step, add, report = (median(SECONDS[name][2:]) for name in ("step", "add", "on_report"))
    print(f"a step: {step:.2f} s")
    print(f"a logged step's line, with fingerprints: {1e3 * report:.1f} ms")
    print(f"per step at log_freq = 10: {100 * report / 10 / step:.2f} %")
    print(f"a line of every_step: {1e3 * add:.2f} ms")


if __name__ == "__main__":
    main()
