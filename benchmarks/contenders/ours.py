"""Our trainer, as a user's job with a report every step."""

import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from meshwright.system.modules import uncollected  # noqa: E402

with uncollected():  # torch, too, as train.py
    from workload import Stopwatch, from_command_line, job_keys

    from meshwright.config.loader import load_config
    from meshwright.system.log import log_to_console
    from meshwright.train.facts import look
    from meshwright.train.job import run
    from meshwright.train.resolve import resolve

OVERRIDES = "MESHWRIGHT_BENCHMARK_KEYS"
"""Environment variable: more keys for our job, as JSON."""


class Marks:
    """A sink that notes every step."""

    def __init__(self) -> None:
        self.watch = Stopwatch()

    def write(self, record: dict[str, float]) -> None:
        """A step is over."""
        self.watch.step()

    def close(self) -> None:
        """Nothing to flush."""


def main() -> None:
    """Train, and print the result."""
    w = from_command_line()
    log_to_console()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = {"model.tokenizer_path": ROOT / "assets/tokenizers/python_2k.model"}
        keys = job_keys(w, folder) | tokenizer | json.loads(os.environ.get(OVERRIDES, "{}"))
        config = load_config([f"--{key}={value}" for key, value in keys.items()])
        marks = Marks()
        run(resolve(config, look(config, w.ranks)), extra_sinks=[marks])
    marks.watch.report()
    os._exit(0)


if __name__ == "__main__":
    main()
