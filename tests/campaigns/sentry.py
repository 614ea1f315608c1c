"""Healthy ranks that the sentry must not accuse, and flipped bits that it must find.

    python -m tests.campaigns.sentry --canaries 1000 --flips 200 --seed 1

Every mesh takes part in both, a training step after every fifth comparison. A flip is of one bit,
from bit 10 on, of one element of a matrix product in a block: its output, or the gradient of its
input or its weight. One rank has it whenever it computes the product. Prints a line for each mesh,
and exits with 1 after a false alarm, a flip that wasn't found, or a rank that was named wrongly.
"""

import argparse
import random
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from meshwright.commands.prove.ranks import RankPool
from meshwright.models.loss import Batch
from meshwright.parallelisms.rules.degrees import ParallelDims
from tests.helpers.job import DEEP, SCHEDULES, Job, global_batch, mesh
from tests.helpers.sick import Flip, alarm, flipping, sentry_of
from tests.helpers.tiny import MIXED, TIED

BF16: dict[str, object] = {"param_dtype": torch.bfloat16}
V_SHAPED = {"num_microbatches": 4, **SCHEDULES["ZBVZeroBubble"]}
MESHES: list[tuple[ParallelDims, dict[str, object]]] = [
    (mesh(dp_shard=3), {}),
    (mesh(dp_replicate=3), {}),
    (mesh(dp_shard=4), BF16),
    (mesh(dp_replicate=2, dp_shard=2), {"ac_mode": "full"}),
    (mesh(dp_shard=3, tp=2), {}),
    (mesh(dp_shard=3, cp=2), {"args": TIED}),
    (mesh(dp_shard=3, pp=2), {"num_microbatches": 2}),
    (mesh(dp_replicate=3, pp=2), {"args": DEEP, **V_SHAPED}),
    (mesh(dp_shard=3), {"args": MIXED, "balance_loss": 0.1, "bias_update_rate": 0.1}),
    (mesh(dp_shard=3, tp=2), {"args": MIXED, "bias_update_rate": 0.1}),
]
PRODUCTS = ("forward", "input", "weight")
MATRICES = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
MATRICES += ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")


def attack(
    dims: ParallelDims,
    options: dict[str, object],
    canaries: int,
    flips: Sequence[Flip],
    folder: str,
) -> tuple[list[str], list[str]]:
    """The false alarms of healthy ranks, and what is said of each flip.

    The second data-parallel rank has the flips, on every stage and tensor-parallel rank.
    """
    sequences = 2 * dims.dp * int(str(options.get("num_microbatches", 1)))
    job = Job(dims, num_sequences=sequences, **options)  # type: ignore[arg-type]
    sentry = sentry_of(job, dims, folder)
    alarms, found = [], []
    is_sick = job.meshes.dp.get_local_rank() == 1
    for number in range(canaries):
        if number % 5 == 0:
            job.take_step(1 + number, job.part(Batch(*global_batch(1 + number, sequences))))
        alarms.append(alarm(sentry, 1 + number))
    for number, flip in enumerate(flips):
        has_it = any(name == flip.module for name, _ in job.model.named_modules())
        with flipping(job, flip) if is_sick and has_it else nullcontext():
            found.append(alarm(sentry, 1 + number))
    return [text for text in alarms if text], found


def draw(dice: random.Random, options: dict[str, object]) -> Flip:
    """A flip in a block of a mesh's model."""
    # of a model with experts the first layer, which has none: its modules have the names
    layer = 0 if options.get("args") is MIXED else dice.randrange(3)
    return Flip(
        f"layers.{layer}.{dice.choice(MATRICES)}",
        dice.choice(PRODUCTS),
        dice.randrange(10, 16 if options.get("param_dtype") else 32),
        dice.random(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--canaries", type=int, default=1000)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    dice, wrong, pools = random.Random(args.seed), 0, dict[int, RankPool]()
    total = [0, 0, 0, 0, 0]
    for number, (dims, options) in enumerate(MESHES):
        share = range(number, args.flips, len(MESHES))
        flips = [draw(dice, options) for _ in share]
        canaries = len(range(number, args.canaries, len(MESHES)))
        ranks = dims.num_ranks
        if ranks not in pools:
            pools[ranks] = RankPool(ranks, modules=("tests.helpers.sick",))
        with tempfile.TemporaryDirectory() as folder:
            alarms, found = pools[ranks].run(attack, dims, options, canaries, flips, folder)[0]
        missed = [flip for flip, text in zip(flips, found, strict=True) if not text]
        misnamed = [text for text in found if text and not _names_the_second(text, dims)]
        print(f"{dims}: {len(alarms)} alarms in {canaries} canaries; ", end="")
        print(f"of {len(flips)} flips {len(missed)} missed, {len(misnamed)} misnamed", flush=True)
        for line in [*alarms, *missed, *misnamed]:
            print(f"  {line}")
        wrong += len(alarms) + len(missed) + len(misnamed)
        counts = (canaries, len(alarms), len(flips), len(missed), len(misnamed))
        total = [before + now for before, now in zip(total, counts, strict=True)]
    print("{} canaries, {} alarms; {} flips, {} missed, {} misnamed".format(*total))
    sys.exit(wrong > 0)


def _names_the_second(text: str, dims: ParallelDims) -> bool:
    """Whether only ranks of the second data-parallel rank are accused, or, of two, both."""
    accused = text.partition(": ")[0]
    named = [int(rank) for rank in re.findall(r"rank (\d+) \(on", accused)]
    return bool(named) and all(dp_rank(rank, dims) == 1 for rank in named)


def dp_rank(rank: int, dims: ParallelDims) -> int:
    """The number of a rank among its data-parallel peers: pp is the outermost axis."""
    inner = dims.cp * dims.tp
    return rank // inner % dims.dp


if __name__ == "__main__":
    main()
