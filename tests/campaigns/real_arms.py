"""Trains experiments whose answers are known: arms without an effect, and arms with one.

    python -m tests.campaigns.real_arms nulls --count 100 --seed 1
    python -m tests.campaigns.real_arms effects
    python -m tests.campaigns.real_arms meshes

`nulls` draws arms of six kinds: a different mesh, different microbatches, a key without effect,
`log_freq`, compilation, and runs that resume twice. `effects` trains eight changes, and prints the
pairs that each took and the runs that an unpaired t test needs. `meshes` trains two of them on one
rank, with tensor parallelism and with FSDP2. All exit with 1 if a verdict isn't the right one. With
`--folder`, a campaign that was stopped goes on.
"""

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import variance
from typing import Any

from meshwright.commands.experiment.spec import as_word
from tests.helpers.forked_train import experiment

ROOT = Path(__file__).parents[2]

Arm = dict[str, Any]
"""Its keys and their values, as in [arms.NAME]."""

BASE = f"""
extends = "{ROOT}/train_configs/debug_model.toml"
model.args = {{dim = 64, n_layers = 2}}
training = {{seq_len = 64, local_batch_size = 4, global_batch_size = 8}}
validation.num_samples = 16
compile.enable = false
metrics.enable_tensorboard = false
"""
EXPERIMENT = """
base = "base.toml"
budget = {{steps = {steps}}}
ranks = 1
seeds = 6
[common]
"optimizer.lr" = {lr}
"lr_scheduler.warmup_steps" = {warmup}
"validation.freq" = {freq}
"""

NULL_STEPS, EFFECT_STEPS = 16, 60

AXES = (
    "data_parallel_shard",
    "data_parallel_replicate",
    "tensor_parallel",
    "context_parallel",
    "pipeline_parallel",
)
WITHOUT_EFFECT: dict[str, Any] = {
    "comm.init_timeout_seconds": 333,
    "training.gc_freq": 7,
    "metrics.every_step": True,
    "metrics.grad_norm_by_group": True,
    "metrics.layer_stats_freq": 7,
    "metrics.enable_tensorboard": True,
    "comm.train_timeout_seconds": 77,
}
OF_EACH_KIND = 2
KINDS = ("compile", "mesh", "microbatches", "without effect", "log_freq", "resumed twice")
"""In the order of an experiment's arms: those whose bits may differ come first, since they need
more pairs, and later arms need more of them."""

MIXTURE = [
    {"dataset": "sympy_source", "weight": 1.0},
    {"dataset": "text", "dataset_path": f"{ROOT}/docs/*.md", "weight": 1.0},
]
EFFECTS: dict[str, tuple[str, Arm]] = {
    "lr_x2": ("better", {"optimizer.lr": "x2"}),
    "lr_x1.1": ("better", {"optimizer.lr": "x1.1"}),
    "lr_x1.01": ("better", {"optimizer.lr": "x1.01"}),
    "no_weight_decay": ("better or equal", {"optimizer.weight_decay": 0.0}),
    "warmup_x5": ("", {"lr_scheduler.warmup_steps": "x5"}),
    "qk_norm": ("", {"model.name": "qwen3", "model.args.head_dim": 8}),
    "batch_x2": ("better", {"training.global_batch_size": "x2"}),
    "mixture": ("worse", {"training.datasets": MIXTURE}),
}
"""The right verdict of each change, "" if it isn't known, and its keys. In runs this short the
base's learning rate is below the best one, and weight decay can't gain more than the margin."""

MESHES: dict[str, Arm] = {
    "one_rank": {},
    "tp_2": {"ranks": 2, "parallelism.tensor_parallel_degree": 2},
    "fsdp_2": {"ranks": 2, "parallelism.data_parallel_shard_degree": 2},
}
ON_MESHES = ("lr_x2", "lr_x1.01")
"""Of the effects."""

T_TEST = (1.96 + 0.84) ** 2
"""(z_0.975 + z_0.8)^2: an unpaired t test at 5 % has a power of 80 % with T_TEST (s / d)^2 runs of
each arm, for a difference d of runs whose difference spreads by s (normal approximation)."""


def two_ranks(axis: str) -> Arm:
    """Return the keys of an arm whose runs are on two ranks."""
    return {"ranks": 2, f"parallelism.{axis}_degree": 2}


def null_arms(kind: str, names: Sequence[str], draw: random.Random) -> Iterator[tuple[str, Arm]]:
    """Yield arms of a kind, none of which changes anything; before each, the one that it needs."""
    frequencies = draw.sample(range(2, 10), len(names))
    axes = draw.sample(AXES, len(names))
    sizes = draw.sample((1, 2, 8), len(names))
    keys = draw.sample([*WITHOUT_EFFECT], len(names))
    for number, name in enumerate(names):
        if kind == "mesh":
            yield name, two_ranks(axes[number])
        elif kind == "microbatches":
            yield name, {"training.local_batch_size": sizes[number]}
        elif kind == "without effect":
            yield name, {keys[number]: WITHOUT_EFFECT[keys[number]]}
        elif kind == "log_freq":
            yield name, {"metrics.log_freq": frequencies[number]}
        elif kind == "compile":
            # two arms can't be the same
            yield name, {"compile.enable": True, "metrics.log_freq": frequencies[number]}
        else:
            yield f"{name}_once", {"from": 4, "training.gc_freq": 11 + number}
            yield name, {"from": 8, "on": f"{name}_once", "training.gc_freq": 21 + number}


def run(folder: Path, head: str, arms: Mapping[str, Arm]) -> dict[str, Any]:
    """Train an experiment in a folder; return what `--json` prints of it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "base.toml").write_text(BASE)
    # in an inline table, text has quotes
    lines = [f"{as_word([name])[1:-1]} = {as_word([arm])[1:-1]}" for name, arm in arms.items()]
    (folder / "lab.toml").write_text("\n".join([head, "[arms]", *lines]))
    return dict(json.loads(experiment("run", folder / "lab.toml", "--json")))


def nulls(count: int, seed: int, only: Sequence[str], folder: Path) -> int:
    """Train null arms, 12 in an experiment; print a line for each, and return how many are wrong.
    A base has the learning rate that is drawn for it, up to five times a good one."""
    draw, verdicts, wrong = random.Random(seed), Counter[tuple[str, str]](), 0
    kinds = [kind for kind in KINDS for _ in range(OF_EACH_KIND) if kind in only]
    for first in range(0, count, len(kinds)):
        lr = 10 ** draw.uniform(-3.3, -2)
        drawn = kinds[: count - first]
        of_arm = {f"arm{first + number}": kind for number, kind in enumerate(drawn)}
        arms = dict[str, Arm]()
        for kind in KINDS:
            names = [name for name, own in of_arm.items() if own == kind]
            arms |= dict(null_arms(kind, names, draw))
        head = EXPERIMENT.format(steps=NULL_STEPS, lr=lr, warmup=4, freq=4)
        shown = run(folder / f"nulls-{seed}-{first}", head, arms)
        for arm in shown["arms"]:
            kind = of_arm.get(arm["arm"], "resumed once")
            verdicts[kind, arm["verdict"]] += 1
            wrong += arm["verdict"] not in ("identical", "equal")
            figures = f"{arm['verdict']:9} {arm['num_pairs']} pairs {arm['mean']:+.1e}"
            print(f"{arm['arm']:10} {kind:14} {figures} lr {lr:.1e} {arm['keys']}", flush=True)
    for (kind, verdict), number in sorted(verdicts.items()):
        print(f"{kind:14} {verdict:9} {number}")
    print(f"{count} null arms, seed {seed}: {wrong} of {verdicts.total()} verdicts are wrong")
    return wrong


def effects(folder: Path) -> int:
    """Train each change, and print its verdict and what an unpaired t test would need; return how
    many verdicts are wrong or open."""
    head = EXPERIMENT.format(steps=EFFECT_STEPS, lr=2e-3, warmup=6, freq=5)
    shown = run(folder / "effects", head, {name: keys for name, (_, keys) in EFFECTS.items()})
    values, wrong = values_of(shown), 0
    for arm in shown["arms"]:
        name, (right, _) = arm["arm"], EFFECTS[arm["arm"]]
        spread = math.sqrt(sum(variance(values[one].values()) for one in (name, "base")))
        unpaired = max(math.ceil(T_TEST * (spread / arm["mean"]) ** 2), 2)
        wrong += right != "" and arm["verdict"] not in right.split(" or ")
        print(
            f"{name:16} {arm['verdict']:6} ({right or 'not known'}) {arm['mean']:+.4f}",
            f"after {arm['num_pairs']} pairs, which spread by {arm['spread']:.5f};",
            f"unpaired by {spread:.4f}: a t test needs {unpaired} runs of each",
            flush=True,
        )
    return wrong


def meshes(folder: Path) -> int:
    """Train each change on each mesh, all compared with the base on one rank; print how far its
    numbers are from those of one rank, and return how many verdicts are wrong or open."""
    head = EXPERIMENT.format(steps=EFFECT_STEPS, lr=2e-3, warmup=6, freq=5)
    arms = {
        f"{name}-{mesh}": EFFECTS[name][1] | keys
        for name in ON_MESHES
        for mesh, keys in MESHES.items()
    }
    shown, wrong = run(folder / "meshes", head, arms), 0
    values = values_of(shown)
    for arm in shown["arms"]:
        name, _, _ = arm["arm"].partition("-")
        first = values[f"{name}-one_rank"]
        furthest = max(
            abs(own - first[seed]) for seed, own in values[arm["arm"]].items() if seed in first
        )
        wrong += arm["verdict"] != EFFECTS[name][0]
        print(
            f"{arm['arm']:17} {arm['verdict']:6} {arm['mean']:+.5f}",
            f"after {arm['num_pairs']} pairs;",
            f"at most {furthest:.1e} from one rank",
            flush=True,
        )
    return wrong


def values_of(shown: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Return the numbers of the runs of an experiment, by arm and seed."""
    values = dict[str, dict[int, float]]()
    for line in (Path(shown["folder"]) / "results.jsonl").read_text().splitlines():
        result = json.loads(line)
        values.setdefault(result["arm"], {})[result["seed"]] = result["value"]
    return values


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("nulls", "effects", "meshes"))
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="kinds of nulls")
    parser.add_argument("--folder", type=Path)
    given, since = parser.parse_args(words), time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.folder or Path(temporary)).absolute()
        if given.what == "nulls":
            wrong = nulls(given.count, given.seed, given.only, folder)
        else:
            wrong = effects(folder) if given.what == "effects" else meshes(folder)
        print(f"in {time.monotonic() - since:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
