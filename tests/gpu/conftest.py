"""Tests of this folder need GPUs, and their folder named to pytest: all others hide GPUs. With
TEST_DEVICE=cpu they run on CPUs as far as they can."""

import os
from pathlib import Path

import pytest
import torch

# for the test of deterministic runs: torch looks at it once, at the first product of this process
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cuda"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue  # pytest asks for all tests of the session
        item.add_marker(pytest.mark.gpu)
        if DEVICE.type == "cuda" and num_gpus == 0:
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and pytest tests/gpu"))
        elif DEVICE.type == "cpu" and item.get_closest_marker("only_cuda"):
            item.add_marker(pytest.mark.skip(reason="looks at CUDA itself"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return DEVICE
