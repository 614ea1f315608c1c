"""Our trainer, as a user's job with a report every step. Its loader reads ahead as in any job; the
tokens of its batches are then those of all contenders."""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from meshwright.system.modules import uncollected  # noqa: E402

with uncollected():  # torch, too, as train.py
    from workload import Stopwatch, Workload, fill, from_command_line, job_keys, random_tokens

    from meshwright.config.loader import load_config
    from meshwright.models.loss import Batch
    from meshwright.system.log import log_to_console
    from meshwright.train import set_up
    from meshwright.train.facts import look
    from meshwright.train.job import run
    from meshwright.train.resolve import resolve
    from meshwright.train.trainer import Trainer

OVERRIDES = "MESHWRIGHT_BENCHMARK_KEYS"
"""Environment variable: more keys for our job, as JSON."""


class Marks:
    """A sink that notes every step."""

    def __init__(self) -> None:
        self.watch = Stopwatch()

    def write(self, record: dict[str, float]) -> None:
        """A step is over."""
        self.watch.step(record["loss/train"])

    def close(self) -> None:
        """Nothing to flush."""


def start_as_others(w: Workload, device: object) -> None:
    """Give the model the weights, and each step the tokens, that every contender has."""
    tokens, step = random_tokens(w, w.steps).to(device), Trainer.step
    initialize = set_up.initialize_weights

    def with_weights(resolved: Any, model: Any, ranks: Any) -> None:
        initialize(resolved, model, ranks)
        fill(model.named_parameters())

    def with_tokens(self: Trainer, number: int, batches: Sequence[Batch], detector: Any) -> Any:
        (batch,), own = batches, tokens[number - 1]
        batch = replace(batch, tokens=own[:, :-1].contiguous(), labels=own[:, 1:].contiguous())
        return step(self, number, [batch], detector)

    set_up.initialize_weights = with_weights
    Trainer.step = with_tokens  # type: ignore[method-assign]


def main() -> None:
    """Train, and print the result."""
    w = from_command_line()
    log_to_console()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = {"model.tokenizer_path": ROOT / "assets/tokenizers/python_2k.model"}
        keys = job_keys(w, folder) | tokenizer | json.loads(os.environ.get(OVERRIDES, "{}"))
        config = load_config([f"--{key}={value}" for key, value in keys.items()])
        marks = Marks()
        start_as_others(w, marks.watch.device)
        run(resolve(config, look(config, w.ranks)), extra_sinks=[marks])
    marks.watch.report()
    os._exit(0)


if __name__ == "__main__":
    main()
