"""Initial values: a function of seed, name and index, and normally distributed."""

import ctypes
import math
import os
import subprocess
import sys
from ast import literal_eval

import pytest
import torch

from meshwright.parallelisms import initialize
from meshwright.parallelisms.initialize import fill, normal_blocks


def whole(shape, seed=0, name="w") -> torch.Tensor:
    values = torch.empty(shape)
    fill(normal_blocks(values, 1.0, seed, name, shape, (0,) * len(shape)), is_on_cpu=True)
    return values


@pytest.mark.parametrize(
    ("shape", "offset", "box"),
    [
        ((1000, 70), (990, 63), (10, 7)),
        ((70_000,), (65_530,), (20,)),
        ((5, 14, 6), (1, 2, 0), (3, 4, 6)),
        ((3, 70_000), (1, 5), (2, 69_000)),
    ],
)
def test_a_box_equals_the_same_part_of_the_whole(shape, offset, box) -> None:
    part = torch.empty(box)
    fill(normal_blocks(part, 1.0, 0, "w", shape, offset), is_on_cpu=True)
    where = tuple(slice(o, o + n) for o, n in zip(offset, box, strict=True))
    assert torch.equal(part, whole(shape)[where])


@pytest.mark.parametrize("block", [1, 100, 1 << 22])
def test_blocks_of_any_size_give_equal_bits(monkeypatch, block: int) -> None:
    """GPUs take larger ones."""
    want = whole((700, 3))
    monkeypatch.setitem(initialize.BLOCKS, "cpu", block)
    assert torch.equal(whole((700, 3)), want)


SHOW_THREADS = """
import ctypes, threading
from pathlib import Path
import torch
from meshwright.parallelisms import initialize

mkl = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
dynamic = getattr(mkl, "mkl_serv_get_dynamic", lambda: 1)
counts = []
count = lambda: counts.append((torch.get_num_threads(), dynamic()))
def count_alone():
    initialize._compute_alone()
    count()
count()
for target in (count_alone, count):
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
blocks = initialize.normal_blocks(torch.empty(9), 1.0, 0, "w", (9,), (0,))
initialize.fill(blocks, is_on_cpu=True)
count()
print(counts)
"""


def test_a_thread_computes_alone_and_others_multiply_as_before() -> None:
    """Otherwise a job that resumes, and fills nothing, would round its products differently."""
    if not hasattr(ctypes.CDLL(None), "omp_set_num_threads"):
        pytest.skip("torch without OpenMP")
    show = [sys.executable, "-c", SHOW_THREADS]
    env = os.environ | {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    run = subprocess.run(show, capture_output=True, text=True, check=True, env=env)
    before, (alone, _), *others = literal_eval(run.stdout)
    assert alone == 1
    assert others == [before] * 2


@pytest.mark.parametrize("count", [1, 3])
def test_any_number_of_threads_gives_equal_bits(monkeypatch, count) -> None:
    want = whole((700, 300))
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    assert torch.equal(whole((700, 300)), want)


def test_a_gpus_blocks_are_filled_in_order() -> None:
    filled: list[int] = []
    fill(iter([lambda: filled.append(1), lambda: filled.append(2)]), is_on_cpu=False)
    assert filled == [1, 2]


def test_the_error_of_a_thread_is_raised(monkeypatch) -> None:
    monkeypatch.setattr(initialize, "_mix_", lambda states: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        whole((700, 300))


def test_name_and_seed_matter() -> None:
    base = whole((100, 10))
    assert not torch.isclose(base, whole((100, 10), seed=1)).any()
    assert not torch.isclose(base, whole((100, 10), name="v")).any()


def test_values_do_not_change_between_releases() -> None:
    """A run is to be repeatable with a later version, on another machine, on a GPU."""
    assert whole((2, 3)).tolist() == PINNED


PINNED = [
    [-1.145664930343628, 2.286067485809326, -0.29462292790412903],
    [0.9278504848480225, -0.41763657331466675, -1.6461267471313477],
]


def test_distribution_is_the_truncated_normal() -> None:
    values = whole((1000, 1000)).double()
    density = math.exp(-4.5) / math.sqrt(2 * math.pi)
    inside = math.erf(3 / math.sqrt(2))
    variance = 1 - 6 * density / inside  # of a standard normal cut at 3
    assert values.abs().max() <= 3.0
    assert abs(values.mean()) < 0.004  # 4 standard errors
    assert abs(values.var() - variance) < 0.005
    for quantile, want in ((0.1, -1.2754), (0.5, 0.0), (0.975, 1.9385)):
        assert abs(values.view(-1).kthvalue(int(quantile * 1e6)).values - want) < 0.01


def test_neighbours_are_independent() -> None:
    values = whole((1000, 1000))
    rows = torch.corrcoef(values[:20])
    columns = torch.corrcoef(values[:, :20].T)
    for matrix in (rows, columns):
        assert (matrix - torch.eye(20)).abs().max() < 0.15  # 1000 samples: 4.7 standard errors
