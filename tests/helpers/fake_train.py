"""A `meshwright train` for experiments that takes milliseconds: its loss is a formula of its keys.

It resumes from the step that it wrote last, or from a checkpoint; it ends with its worker, and
notes each start and end, so that a test sees a run that was taken twice. `optimizer.lr` above 1
diverges; a file `crash` in the experiment's folder, which it removes, has it crash, with the exit
code that is in it, or 1.
"""

import hashlib
import json
import math
import os
import random
import sys
import time
from pathlib import Path

from meshwright.system.processes import die_with_parent

ROOT = Path(__file__).parents[2]

STEP_S = "FAKE_STEP_S"
"""Environment variable: seconds of a step."""

BASE = f"""
extends = "{ROOT}/tests/integration/tiny.toml"
[training]
dataset = "text"
dataset_path = "text.txt"
[validation]
enable = true
dataset = "text"
dataset_path = "text.txt"
num_samples = 8
"""
"""A base of experiments, in a folder with a text.txt."""

CHILD = "from tests.helpers.fake_train import main; main()"


def loss_at(keys: dict[str, str], step: int) -> float:
    """The loss falls towards 2, faster with a larger rate; seeds share their noise in part."""
    if "model.args.dim" in keys:
        return _loss_of_rung(keys, step)
    lr = float(keys.get("optimizer.lr", 4e-3))
    noise = random.Random(f"{keys['training.seed']}").gauss(0, 0.05)
    # as of a real change: small, and another one for each value
    own = hashlib.sha256(f"{keys['training.seed']} {lr}".encode()).digest()[0] / 255 - 0.5
    return 2 + 4 * math.exp(-50 * lr * step / 24) + noise + 1e-3 * own * (lr != 4e-3)


def _loss_of_rung(keys: dict[str, str], step: int) -> float:
    """By a law of the tokens so far; it rises with the width where larger models have a learning
    rate above 4e-3."""
    tokens = 64 * step * int(keys["training.global_batch_size"])
    noise = random.Random(f"{keys['training.seed']} {keys['model.args.dim']}").gauss(0, 1e-3)
    dim = int(keys["model.args.dim"])
    rise = 1e-3 * dim**2 if float(keys["optimizer.lr"]) > 4e-3 and dim > 32 else 0.0
    return 2 + 30 * tokens**-0.25 + noise + rise


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    keys = dict(
        word[2:].split("=", 1) for word in sys.argv if word.startswith("--") and "=" in word
    )
    keys.setdefault("training.seed", "0")
    folder, steps = Path(keys["job.dump_folder"]), int(keys["training.steps"])
    (folder / "pids.txt").open("a").write(f"{os.getpid()}\n")
    crash = folder.parents[1] / "crash"
    if crash.exists():
        code = int(crash.read_text() or 1)
        crash.unlink()
        sys.exit(code)
    metrics, history = folder / "metrics.jsonl", folder / "history.jsonl"
    # a line that a kill cut short doesn't count
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    done = [line for line in lines if line.endswith("}\n")]
    metrics.write_text("".join(done))
    begin = json.loads(done[-1])["step"] if done else 0
    saved = [int(one.name.removeprefix("step-")) for one in folder.glob("checkpoint/step-*")]
    begin = begin or max(saved, default=0)
    _note(history, "start", begin)
    for step in range(begin + 1, steps + 1):
        time.sleep(float(os.environ.get(STEP_S, "0")))
        if float(keys.get("optimizer.lr", 0)) > 1 and step > 5:
            _note(history, "end", step, reason="failed: the loss is not finite")
            sys.exit(3)
        row = {"step": step, "loss/train": loss_at(keys, step), "data/tokens": 512 * step}
        row["time/step_s"] = 0.5
        if "job.max_run_seconds" in keys and step > begin + 3:
            sys.exit(75)
        if step % int(keys.get("validation.freq", steps)) == 0 or step == steps:
            row["validation/loss"] = loss_at(keys, step)
        metrics.open("a").write(json.dumps(row) + "\n")
        if step % int(keys.get("checkpoint.keep_every_n_steps", 2**31)) == 0:
            (folder / f"checkpoint/step-{step}").mkdir(parents=True)
    _note(history, "end", steps, reason="finished")


def _note(history: Path, event: str, step: int, **facts: str) -> None:
    history.open("a").write(json.dumps({"event": event, "step": step, "unix_s": 0, **facts}) + "\n")
