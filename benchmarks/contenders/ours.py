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
    from workload import Stopwatch, from_command_line

    from meshwright.config.loader import load_config
    from meshwright.system.log import log_to_console
    from meshwright.train.job import run
    from meshwright.train.preflight import preflight

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
        keys: dict[str, object] = {
            "job.dump_folder": folder,
            "model.tokenizer_path": ROOT / "assets/tokenizers/python_2k.model",
            "model.args.dim": w.dim,
            "model.args.n_layers": w.n_layers,
            "model.args.n_heads": w.n_heads,
            "model.args.n_kv_heads": w.n_kv_heads,
            "model.args.hidden_dim": w.hidden_dim,
            "model.args.vocab_size": w.vocab,
            "training.seq_len": w.seq_len,
            "training.local_batch_size": w.batch,
            "training.steps": w.steps,
            "training.mixed_precision_param": w.dtype,
            "compile.enable": str(w.compile).lower(),
            "metrics.log_freq": 1,
        } | json.loads(os.environ.get(OVERRIDES, "{}"))
        config = load_config([f"--{key}={value}" for key, value in keys.items()])
        marks = Marks()
        run(preflight(config, w.ranks), extra_sinks=[marks])
    marks.watch.report()
    os._exit(0)


if __name__ == "__main__":
    main()
