"""Jobs by the launcher, on the GPUs that there are."""

import os
from pathlib import Path

import torch

from tests.helpers.jobs import launch, losses

ALL = ",".join(map(str, range(torch.cuda.device_count())))
GPUS = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", ALL)}


def run(folder: Path, num_ranks: int, *words: str) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step of a small job of 20 steps, in fp32 unless `words` differ."""
    launch(folder, *words, NGPU=num_ranks, **GPUS)
    return losses(folder)
