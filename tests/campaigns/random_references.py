"""Random configs, whose one process is compared with plain PyTorch as `meshwright prove` does.

    python -m tests.campaigns.random_references --configs 100 --seed 1
    python -m tests.campaigns.random_references --configs 100 --seed 1 --only 17    (that one again)

Draws what `random_configs` draws, and numbers of the model, the optimizer, the schedule, the EMA
and the router losses. Prints a line for each config, and exits with 1 if one is wrong.
"""

import argparse
import random
import sys
import time
from contextlib import closing

from meshwright.commands.prove.ranks import RankPool
from meshwright.commands.prove.reference import compare_with_plain
from meshwright.commands.prove.shrink import shrink
from meshwright.config.loader import load_config
from meshwright.system.errors import ConfigError
from meshwright.train.resolve_model import resolve_model
from tests.campaigns.random_configs import draw
from tests.helpers.resolved import resolved

CHOICES = {
    "model.args.norm_eps": ("1e-5", "1e-6", "1e-8"),
    "model.args.rope_theta": ("100.0", "10000.0", "1e7"),
    "training.seq_len": ("512", "4096", "32768"),
    "training.steps": ("3", "10", "1000", "100000"),
    "optimizer.lr": ("1e-6", "1e-4", "8e-4", "0.02"),
    "optimizer.beta1": ("0.0", "0.9", "0.98"),
    "optimizer.beta2": ("0.9", "0.95", "0.999"),
    "optimizer.eps": ("1e-15", "1e-8", "1e-5"),
    "optimizer.weight_decay": ("0.0", "0.1", "1.0"),
    "optimizer.muon.momentum": ("0.0", "0.9", "0.95"),
    "optimizer.muon.nesterov": ("true", "false"),
    "optimizer.muon.steps": ("1", "3", "5", "8"),
    "lr_scheduler.warmup_steps": ("0", "1", "2", "200"),
    "lr_scheduler.total_steps": ("5", "2000"),
    "lr_scheduler.decay_ratio": ("0.0", "0.15", "0.7", "1.0"),
    "lr_scheduler.decay_type": ("linear", "sqrt", "cosine"),
    "lr_scheduler.min_lr_factor": ("0.0", "0.1", "1.0"),
    "checkpoint.average.window_tokens": ("10000000", "100000000000"),
    "experts.balance_loss": ("0.0", "0.01", "1.0"),
    "model.args.mtp_depth": ("0", "1", "2"),
    "training.mtp_loss_weight": ("0.1", "1.0"),
}
"""Values of a key, which two of three configs have; the rest keep its default."""

SCALING = "--model.args.rope_scaling.factor={} --model.args.rope_scaling.original_seq_len={}"


def words_of(seed: int, number: int) -> list[str]:
    """Return the words of the config of that number: a function of the arguments."""
    chance = random.Random(f"reference {seed} {number}")
    while True:
        drawn = draw(seed, chance.randrange(10**6), 1, has_experts=chance.random() < 0.4).words
        has_mean = any("checkpoint.average" in word for word in drawn)
        words = [
            f"--{key}={chance.choice(values)}"
            for key, values in CHOICES.items()
            if chance.random() < 2 / 3 and not (has_mean and "average" in key)
        ]
        words = [
            w for w in drawn if w.split("=")[0] not in {o.split("=")[0] for o in words}
        ] + words
        if "--model.name=llama" in words and chance.random() < 0.5:
            words += SCALING.format(chance.choice([2.0, 32.0]), chance.choice([16, 8192])).split()
        try:
            config = load_config(words)
            resolved(shrink(config, resolve_model(config)[1]), 1)
        except ConfigError:
            continue
        return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of the config to run, from 0")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    numbers = range(options.configs) if options.only is None else [options.only]
    wrong = []
    with closing(RankPool(1)) as pool:
        for number in numbers:
            words, start = words_of(options.seed, number), time.perf_counter()
            config = load_config(words)
            small = shrink(config, resolve_model(config)[1])
            (checked,) = pool.run(compare_with_plain, config, small)
            checked.seconds = time.perf_counter() - start
            wrong += [number] * bool(checked.failures)
            print(f"{number:4} {checked.row}:", *words, flush=True)
            for failure in checked.failures:
                print(f"     {failure}", flush=True)
    print(f"{len(numbers)} configs, seed {options.seed}: {len(wrong)} wrong {wrong or ''}".rstrip())
    sys.stdout.flush()
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
