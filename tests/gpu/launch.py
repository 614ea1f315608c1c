"""Jobs by the launcher, on the GPUs that there are.

A job of more ranks than GPUs is one of as many machines, each with one rank, which share the GPUs:
NCCL refuses two ranks on a GPU of one host, so each has the name of a host of its own, and reaches
the others by sockets. All paths but NCCL's own transports are a cluster's; the times are not.
"""

import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.helpers.jobs import command, environment, losses

ALL = ",".join(map(str, range(torch.cuda.device_count())))
GPUS = os.environ.get("CUDA_VISIBLE_DEVICES", ALL)
LIMIT_S = 300

Launcher = subprocess.Popen[str]


@contextmanager
def started(folder: Path, num_ranks: int, *words: str) -> Iterator[list[Launcher]]:
    """The job's launchers, one a machine; at the end none is left, nor its ranks."""
    gpus = [gpu for gpu in GPUS.split(",") if gpu]
    if not gpus or num_ranks <= len(gpus):
        settings = [{"NGPU": num_ranks, "CUDA_VISIBLE_DEVICES": GPUS}]
    else:
        with socket.create_server(("127.0.0.1", 0)) as free:
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        shared = {"NGPU": 1, "NNODES": num_ranks, "RDZV_ENDPOINT": endpoint}
        shared |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": 1}
        settings = [
            {**shared, "NCCL_HOSTID": rank, "CUDA_VISIBLE_DEVICES": gpus[rank % len(gpus)]}
            for rank in range(num_ranks)
        ]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": "/"}
    line = command(folder, *words)
    jobs = [subprocess.Popen(line, env=environment(**each), **options) for each in settings]
    try:
        yield jobs
    finally:
        for job in jobs:
            job.kill()


def outputs(jobs: Sequence[Launcher]) -> list[str]:
    """Of each, once all have ended. Read side by side: a full pipe would hold up all of them."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [*pool.map(lambda job: job.communicate(timeout=LIMIT_S)[0], jobs)]


def run(folder: Path, num_ranks: int, *words: str) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step of a small job of 20 steps, in fp32 unless `words` differ."""
    with started(folder, num_ranks, *words) as jobs:
        texts = outputs(jobs)
    assert all(job.returncode == 0 for job in jobs), "\n".join(texts)
    return losses(folder)
