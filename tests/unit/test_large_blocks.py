"""Memory of large tensors from heaps of their own: each scenario in a process that took them."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from meshwright.models.kernels import large_blocks
from meshwright.train.set_up import _take_large_blocks

MIB = 1 << 20
BLOCK = 64
"""Alignment of blocks, bytes."""


def memory(mib: float) -> Tensor:
    return torch.empty(int(mib * MIB), dtype=torch.uint8)


def a_hole_between_neighbours_is_filled() -> None:
    first, hole, last = memory(20), memory(30), memory(20)
    place = hole.data_ptr()
    assert first.data_ptr() < place < last.data_ptr()
    del hole
    smaller = [memory(0.5), memory(3)]  # malloc would put them there
    assert memory(30).data_ptr() == place
    del smaller


def the_smallest_hole_that_is_large_enough_is_taken() -> None:
    kept, holes = [], []
    for mib in (60, 20, 40):
        holes.append(memory(mib))
        kept.append(memory(16))  # keeps them apart
    places = [hole.data_ptr() for hole in holes]
    holes.clear()
    assert memory(17).data_ptr() == places[1]
    assert memory(21).data_ptr() == places[2]
    two = [memory(20), memory(40)]
    assert [tensor.data_ptr() for tensor in two] == [places[1], places[2]]


def holes_become_one(order: list[int]) -> None:
    parts = [memory(20), memory(30), memory(40)]
    place = parts[0].data_ptr()
    edge = memory(16)
    for index in order:
        parts[index] = memory(0)
    assert memory(90).data_ptr() == place < edge.data_ptr()


def in_any_order_holes_become_one() -> None:
    for order in ([0, 1, 2], [2, 1, 0], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1]):
        holes_become_one(order)


def more_than_the_machine_has_comes_from_malloc() -> None:
    most = int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 0.6) / MIB
    untouched = [memory(most) for _ in range(3)]
    places = sorted(tensor.data_ptr() for tensor in untouched)
    assert all(b - a >= most * MIB for a, b in pairwise(places))
    first = untouched[0].data_ptr()
    untouched.clear()
    assert memory(most).data_ptr() == first


def a_tensor_grows_and_shrinks() -> None:
    tensor = torch.arange(MIB)  # 8 MiB
    assert tensor.resize_(4 * MIB)[:MIB].equal(torch.arange(MIB))
    assert tensor.resize_(10).equal(torch.arange(10))
    assert tensor.share_memory_().equal(torch.arange(10))


def a_forked_process_has_its_own() -> None:
    tensor = torch.ones(4 * MIB)
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        tensor.zero_()
        del tensor
        os._exit(int(memory(8).fill_(3).sum() != 24 * MIB))
    assert os.waitpid(child, 0)[1] == 0
    assert tensor.sum() == 4 * MIB


def a_process_forked_beside_busy_threads_does_not_wait_for_them() -> None:
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            torch.empty(2 * MIB, dtype=torch.uint8)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(50):
            child = os.fork()
            if child == 0:
                signal.alarm(5)
                memory(8)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        is_over.set()
        thread.join()


def the_profiler_sees_them() -> None:
    with torch.profiler.profile(profile_memory=True) as profiler:
        tensor = memory(32)
        del tensor
    events = [e for e in profiler.events() if e.name == "[memory]" or e.name == "aten::empty"]
    sizes = [getattr(e, "cpu_memory_usage", 0) for e in events]
    assert {32 * MIB, -32 * MIB} <= {*sizes}, sizes


def nothing_is_lost_or_shared_on_any_thread() -> None:
    """Random sizes, each tensor filled with its own number, which must be there at its end."""
    seed = int(os.environ["SEED"])
    before = memory(1000).data_ptr()

    def work(thread: int) -> None:
        draw, alive = random.Random(seed + thread), []
        for _ in range(10_000):  # often at the same moment
            torch.empty(draw.randrange(MIB, 3 * MIB), dtype=torch.uint8)
        for number in range(100):
            size = int(draw.choice((0.3, 3, 20)) * MIB * draw.uniform(0.5, 2)) + draw.randrange(100)
            value = (number * 4 + thread) % 251
            tensor = torch.full((size,), value, dtype=torch.uint8)
            assert tensor.data_ptr() % BLOCK == 0
            alive.append((tensor, value))
            while len(alive) > draw.randrange(1, 12):
                old, its_value = alive.pop(draw.randrange(len(alive)))
                assert bool((old == its_value).all()), f"seed {seed}"

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert memory(1000).data_ptr() == before, f"seed {seed}"  # holes are one again


SCENARIOS: dict[str, Callable[[], None]] = {
    scenario.__name__: scenario
    for scenario in (
        a_hole_between_neighbours_is_filled,
        the_smallest_hole_that_is_large_enough_is_taken,
        in_any_order_holes_become_one,
        more_than_the_machine_has_comes_from_malloc,
        a_tensor_grows_and_shrinks,
        a_forked_process_has_its_own,
        a_process_forked_beside_busy_threads_does_not_wait_for_them,
        the_profiler_sees_them,
        nothing_is_lost_or_shared_on_any_thread,
    )
}


def main() -> None:
    """Print the error of each scenario, as JSON."""
    reason = large_blocks.take()
    errors = {}
    if not reason:
        assert large_blocks.take() == ""  # a second time it is done
        for name, scenario in SCENARIOS.items():
            try:
                scenario()
            except AssertionError as error:
                errors[name] = f"{error!r} in line {error.__traceback__.tb_next.tb_lineno}"  # type: ignore[union-attr]
    print(json.dumps({"reason": reason, "errors": errors}))


needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="no compiler"
)


@pytest.fixture(scope="module")
def outcome() -> dict:
    # one thread: others would be missing in forked processes
    env = os.environ | {"SEED": str(random.randrange(10**6)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.unit.test_large_blocks"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@needs_compiler
@pytest.mark.parametrize("name", SCENARIOS)
def test_blocks(outcome: dict, name: str) -> None:
    assert outcome["reason"] == ""
    assert name not in outcome["errors"], outcome["errors"][name]


@pytest.mark.parametrize(
    ("variable", "reason", "said"),
    [
        ("", "", "memory of large tensors: heaps of their own"),
        ("", "no compiler", "memory of large tensors: malloc's, since no compiler"),
        ("LD_PRELOAD", "", "memory of large tensors: malloc's, since LD_PRELOAD is set"),
        ("GLIBC_TUNABLES", "", "memory of large tensors: malloc's, since GLIBC_TUNABLES is set"),
    ],
)
def test_the_log_says_whose_memory_it_is(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    reason: str,
    said: str,
) -> None:
    for name in ("LD_PRELOAD", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "x")

    def take() -> str:
        assert not variable
        return reason

    monkeypatch.setattr(large_blocks, "take", take)
    with caplog.at_level("INFO"):
        _take_large_blocks()
    assert caplog.messages == [said]


def without_addresses() -> None:
    """Print why memory stays malloc's, for each reason."""
    take = large_blocks.take.__wrapped__
    with patch.object(large_blocks, "OVERCOMMIT", Path("/dev/stdin")):  # 2
        print(take())
    with patch.object(os, "sysconf", lambda name: 1 << 24):  # 2^48 bytes, and again
        print(take())
    resource.setrlimit(resource.RLIMIT_AS, (1 << 45, 1 << 45))
    print(take())
    assert torch.ones(2 * MIB).sum() == 2 * MIB


@needs_compiler
def test_without_addresses_memory_is_mallocs() -> None:
    code = "from tests.unit.test_large_blocks import without_addresses as show; show()"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, input="2\n", capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "/dev/stdin is 2, which counts addresses as memory",
        "the system refused the address space",
        "addresses are limited (ulimit -v)",
    ]


if __name__ == "__main__":
    main()
