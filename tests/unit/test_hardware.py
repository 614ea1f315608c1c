"""Which device a rank takes, and when it refuses to take one."""

import os
import re

import pytest
import torch

from meshwright import hardware
from meshwright.errors import ConfigError


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(n)`: torch can use n."""

    def are(number: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    return are


def test_a_rank_takes_its_gpu_or_the_cpu_if_none_is_expected(gpus) -> None:
    gpus(2)
    assert hardware.pick_device(1, 2) == torch.device("cuda", 1)
    gpus(0)
    assert hardware.pick_device(1, 0) == torch.device("cpu")


@pytest.mark.parametrize(
    ("usable", "local_rank", "expected", "message"),
    [
        (0, 0, 8, "GPUs = 8: torch .* can use none of them\n  fix: "),
        (1, 1, 2, "LOCAL_RANK = 1: torch can use 1 GPUs\n  fix: "),
    ],
)
def test_gpus_that_are_not_there_are_no_reason_to_train_on_cpus(
    gpus, usable, local_rank, expected, message
) -> None:
    gpus(usable)
    with pytest.raises(ConfigError) as error:
        hardware.pick_device(local_rank, expected)
    assert re.match(message, str(error.value))


def test_deterministic_algorithms_without_filling_memory(monkeypatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        hardware.make_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills
