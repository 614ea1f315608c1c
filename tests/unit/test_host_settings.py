"""Environment variables that the launcher chooses."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/host_settings.sh"
NAMES = (
    "OMP_NUM_THREADS",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "PYTORCH_ALLOC_CONF",
)


def chosen(ranks: int, gpus: int, **own: str) -> tuple[dict[str, str], list[str]]:
    """Values of `NAMES`, and what the script says that it chose."""
    code = f'source "{SCRIPT}"; choose_host_settings {ranks} {gpus}; env'
    result = subprocess.run(
        ["bash", "-euc", code],
        env={"PATH": os.environ["PATH"]} | own,
        capture_output=True,
        text=True,
        check=True,
    )
    found = dict(line.split("=", 1) for line in result.stdout.splitlines())
    values = {name: found[name] for name in NAMES if name in found}
    return values, found["MESHWRIGHT_HOST_SETTINGS"].split()


def test_cpu_ranks_share_the_cores_and_keep_freed_memory() -> None:
    values, said = chosen(2, 0)
    assert values["OMP_NUM_THREADS"] == str(max((os.cpu_count() or 1) // 2, 1))
    assert int(values["MALLOC_MMAP_THRESHOLD_"]) > 1 << 30
    assert int(values["MALLOC_TRIM_THRESHOLD_"]) > 1 << 30
    assert said == [f"{name}={value}" for name, value in values.items()]
    assert chosen(1000, 0)[0]["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "OMP_NUM_THREADS"])
def test_a_setting_of_the_user_stays(name: str) -> None:
    values, said = chosen(1, 0, **{name: "3"})
    assert values[name] == "3"
    assert not any(word.startswith(name) for word in said)
    assert len(values) == 3


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "LD_PRELOAD"])
def test_who_chose_an_allocator_keeps_it(name: str) -> None:
    assert [*chosen(1, 0, **{name: ""})[0]] == [*chosen(1, 0)[0]]
    assert [*chosen(1, 0, **{name: "glibc.malloc.arena_max=1"})[0]] == ["OMP_NUM_THREADS"]


def test_with_gpus_it_is_the_memory_of_those() -> None:
    values, _ = chosen(1, 1)
    assert [*values] == ["OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF"]
    assert "PYTORCH_ALLOC_CONF" not in chosen(1, 1, PYTORCH_CUDA_ALLOC_CONF="x")[0]
