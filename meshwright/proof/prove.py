"""Run cases one after the other, and judge each."""

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.proof.cases import Case
from meshwright.proof.compare import Reference, Verdict, compare
from meshwright.proof.measure import Measure, Measurement, measure, record_reference
from meshwright.proof.ranks import RankError, RankPool

PATIENCE_S = 300
"""For a collective: ranks compile side by side on few cores."""


@dataclass(frozen=True)
class Row:
    """A case and what came of it."""

    case: Case
    verdict: Verdict
    seconds: float


def prove(reference: Case, cases: Sequence[Case], measure_case: Measure = measure) -> Iterator[Row]:
    """Run `reference` on one process, then every case on real ranks; a row as each is done.

    Ranks of a pool are kept for all cases of its size, and only one size lives at a time.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reference.pt"
        with _pool(1) as pool:
            (seen,) = pool.run(record_reference, reference.config, file)
        wanted = read_reference(seen, file)
        for world_size in sorted({case.world_size for case in cases}):
            waiting = [case for case in cases if case.world_size == world_size]
            while waiting:  # a case that fails on the way takes its ranks with it
                with _pool(world_size) as pool:
                    while waiting:
                        case = waiting.pop(0)
                        start = time.perf_counter()
                        try:
                            ranks = pool.run(measure_case, case.config, world_size, file)
                            verdict, is_broken = compare(wanted, ranks), False
                        except RankError as error:
                            verdict, is_broken = Verdict([f"stopped: {error}"]), True
                        yield Row(case, verdict, time.perf_counter() - start)
                        if is_broken:
                            break


@contextlib.contextmanager
def _pool(world_size: int) -> Iterator[RankPool]:
    pool = RankPool(world_size, PATIENCE_S)
    try:
        yield pool
    finally:
        pool.close()


def read_reference(seen: Measurement, file: Path) -> Reference:
    """What `record_reference` returned and wrote."""
    tensors = torch.load(file, weights_only=True)
    return Reference(
        seen,
        {name: tuple(tensor.shape) for name, tensor in tensors["weights"].items()},
        {name: tensor.double().norm().item() for name, tensor in tensors["gradients"].items()},
    )
