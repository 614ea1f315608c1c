"""Trains a narrow model and a wide one with muP at a grid of learning rates: is the best the same?

    python -m tests.campaigns.carried_rates --widths 64 512 --steps 30

Exits with 1 if the best rates are more than one point of the grid apart. `--without` leaves muP out
for comparison.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from meshwright.commands.experiment.spec import as_word
from tests.helpers.forked import Forked
from tests.helpers.forked_train import LIMIT_S
from tests.helpers.jobs import ROOT, ended, environment

BASE = f"""
extends = "{ROOT}/train_configs/debug_model.toml"
training = {{seq_len = 32, local_batch_size = 8, global_batch_size = 8}}
validation = {{num_samples = 64, freq = 1_000_000}}
compile.enable = false
metrics.enable_tensorboard = false
"""
RATES = [1e-3 * 2**power for power in range(6)]
"""A grid of factors of 2."""

HEAD_DIM = 16

METRIC = "validation/loss"


def loss_of(folder: Path, width: int, rate: float, steps: int, base: int | None) -> float:
    """Return the validation loss after the last step of a model with a constant learning rate."""
    sizes = {"dim": width, "n_layers": 2, "hidden_dim": 3 * width, "n_heads": width // HEAD_DIM}
    sizes |= {"n_kv_heads": width // HEAD_DIM // 2}
    if base is not None:
        sizes["mup_base_dim"] = base
    dump = folder / f"{width}-{rate}"
    words = [
        f"--job.config_file={folder / 'base.toml'}",
        f"--job.dump_folder={dump}",
        f"--training.steps={steps}",
        f"--optimizer.lr={rate}",
        f"--lr_scheduler.warmup_steps={steps // 6}",
        "--lr_scheduler.decay_ratio=0.0",
        f"--model.args={as_word(sizes)}",
    ]
    done = Forked([ROOT / "train.py", *words], environment(OMP_NUM_THREADS=1)).wait(LIMIT_S)
    ended(done, 0)
    return float(json.loads((dump / "metrics.jsonl").read_text().splitlines()[-1])[METRIC])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--widths", type=int, nargs=2, default=(64, 512))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--without", action="store_true", help="without muP")
    given, since, best = parser.parse_args(words), time.monotonic(), list[int]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "base.toml").write_text(BASE)
        for width in given.widths:
            losses = list[float]()
            base = None if given.without else given.widths[0]
            for rate in RATES:
                losses.append(loss_of(folder, width, rate, given.steps, base))
                print(f"width {width}, lr {rate:.4f}: {losses[-1]:.4f}", flush=True)
            best.append(losses.index(min(losses)))
    minutes = (time.monotonic() - since) / 60
    print(f"best: {', '.join(f'{RATES[one]:.4f}' for one in best)}, in {minutes:.1f} min")
    sys.exit(abs(best[0] - best[1]) > 1)


if __name__ == "__main__":
    main()
