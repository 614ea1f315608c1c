"""Environment variables that the launcher chooses."""

import json

import pytest

from meshwright.commands.train import MALLOC, WAITING, environment
from meshwright.system.machine import Ranks, count_cores
from meshwright.system.processes import LAUNCH

CPU, GPU = Ranks(2, 1, 0), Ranks(1, 1, 1)


def chosen(ranks: Ranks, **own: str) -> dict[str, str]:
    """What is chosen beside `own`; the list that the job logs must be the same."""
    new = environment(ranks, own)
    told = json.loads(new.pop(LAUNCH))
    assert dict(word.split("=", 1) for word in told["host_settings"].split()) == new
    return new


def test_cpu_ranks_share_the_cores_and_keep_freed_memory() -> None:
    threads = max(count_cores() // 2, 1)
    assert chosen(CPU) == {"OMP_NUM_THREADS": str(threads)} | WAITING | MALLOC
    assert all(int(size) > 1 << 30 for size in MALLOC.values())


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", *WAITING, *MALLOC])
def test_a_setting_of_the_user_stays(name: str) -> None:
    found = chosen(CPU, **{name: "3"})
    assert name not in found
    assert len(found) == 3


def test_who_chose_how_threads_wait_keeps_it() -> None:
    assert {*chosen(CPU, OMP_WAIT_POLICY="active")} == {"OMP_NUM_THREADS", *MALLOC}


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "LD_PRELOAD"])
def test_who_chose_an_allocator_keeps_it(name: str) -> None:
    assert chosen(CPU, **{name: ""}) == chosen(CPU)
    assert [*chosen(CPU, **{name: "x"})] == ["OMP_NUM_THREADS", *WAITING]


def test_with_gpus_it_is_the_memory_of_those() -> None:
    assert {*chosen(GPU)} == {"OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", *WAITING}
    for own in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert {*chosen(GPU, **{own: "x"})} == {"OMP_NUM_THREADS", *WAITING}
