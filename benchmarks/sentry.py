"""What `[sentry]` costs: the time of a comparison over that of a step, on two CPU ranks.

Steps and comparisons of one job alternate, so both see the same load of the machine, and each pair
gives a ratio. The last line is the share of time at `interval = 100`, from the median ratio.

    python benchmarks/sentry.py --pairs 12 --microbatches 2
    python benchmarks/sentry.py --pairs 12 --training.mask_documents=true     (keys of the job)
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from statistics import median

from meshwright.commands.prove.ranks import RankPool
from meshwright.config.loader import load_config
from meshwright.metrics.sinks import Record
from meshwright.train.facts import look
from meshwright.train.job import run
from meshwright.train.resolve import resolve
from meshwright.train.sentry import Sentry

RANKS, WARM_UP = 2, 2
INTERVAL = 100
"""Steps between comparisons of a job, here one behind each step."""


def pairs_of(words: Sequence[str]) -> list[tuple[float, float]]:
    """Train on this rank; return the seconds of each step and of the comparison behind it."""
    config = load_config([*words])
    seconds: list[float] = []
    compare = Sentry.after_step

    def timed(sentry: Sentry, step: int, samples_read: tuple[int, ...]) -> None:
        start = time.perf_counter()
        compare(sentry, step, samples_read)
        seconds.append(time.perf_counter() - start)

    Sentry.after_step = timed  # type: ignore[method-assign]
    sink = Steps()
    run(resolve(config, look(config, RANKS)), [sink])
    return [(whole - own, own) for whole, own in zip(sink.seconds, seconds, strict=True)]


class Steps:
    """A metrics sink that takes the time of each step, with the comparison behind it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._since = time.perf_counter()

    def write(self, record: Record) -> None:
        """Take the time since the last step."""
        now = time.perf_counter()
        self.seconds.append(now - self._since)
        self._since = now

    def close(self) -> None:
        """Nothing is open."""


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--microbatches", type=int, default=2)
    args, more = parser.parse_known_args()
    os.environ["WORLD_SIZE"] = str(RANKS)
    batch = 4
    with tempfile.TemporaryDirectory() as folder:
        keys = {
            "job.dump_folder": folder,
            "training.seq_len": 256,
            "training.local_batch_size": batch,
            "training.global_batch_size": batch * RANKS * args.microbatches,
            "training.steps": args.pairs + WARM_UP,
            "checkpoint.enable": "false",
            "compile.enable": "false",
            "metrics.log_freq": 1,
            "metrics.enable_tensorboard": "false",
            "sentry.interval": 1,
        }
        words = ["debug_model", *(f"--{key}={value}" for key, value in keys.items()), *more]
        pairs, *_ = RankPool(RANKS).run(pairs_of, words)
    pairs = pairs[WARM_UP:]
    step_s, comparison_s = (median(seconds) for seconds in zip(*pairs, strict=True))
    count = f"{args.microbatches} microbatches"
    print(f"a step of {count} takes {step_s:.3f} s, a comparison {comparison_s:.3f} s")
    ratio = median(comparison / step for step, comparison in pairs)
    print(f"median ratio of {len(pairs)} pairs: {ratio:.2f}")
    print(f"share of time at interval = {INTERVAL}: {100 * ratio / (INTERVAL + ratio):.2f} %")


if __name__ == "__main__":
    main()
