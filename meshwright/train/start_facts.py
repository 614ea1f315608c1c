"""What the history of a run says of each start: enough to tell, much later, why two runs differ."""

import os
import platform
import shlex
import socket
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import meshwright
from meshwright.config.changes import to_json
from meshwright.datasets.stream import OpenSource
from meshwright.metrics.sinks import note_event
from meshwright.system import hardware, slurm
from meshwright.system.modules import git_state, source_hash
from meshwright.train.resolve import ResolvedJob
from meshwright.train.resume import library_versions


def note_start(
    resolved: ResolvedJob,
    device: torch.device,
    sources: Sequence[OpenSource],
    validation_sources: Sequence[OpenSource],
    attention: Sequence[str],
    is_new_stage: bool,
) -> None:
    """Add this start to the history of the run. Collective.

    Args:
        attention: torch's kernels on GPUs, in the order in which they are tried.
        is_new_stage: it is no resume.
    """
    gpus = _gpus_by_host(device)
    if dist.get_rank() > 0:
        return
    facts: dict[str, Any] = {
        "ranks": dist.get_world_size(),
        "stage": resolved.stage_number,
        "is_new_stage": is_new_stage,
        "mesh": str(resolved.dims) or "no mesh",
        "host": socket.gethostname(),
        "system": platform.platform(),
        "device": hardware.device_name(device),
        "gpus": gpus,
        "kernels": hardware.kernels(device) | {"attention": list(attention)},
        "versions": {
            "meshwright": meshwright.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            **library_versions(),
        },
        "source": source_hash(),
        "git": git_state(),
        "own_code": resolved.own_code,
        "tokenizer": resolved.tokenizer.fingerprint,
        "data_content": {source.entry.name: source.content for source in sources},
        "validation_content": {source.entry.name: source.content for source in validation_sources},
        "parameters": resolved.model_args.table.num_params,
        "command": shlex.join(sys.argv),
        "config": to_json(resolved.config),
    }
    if job := slurm.job_name(os.environ):
        facts["slurm"] = {"job": job, "restart": slurm.restarts(os.environ)}
    note_event(Path(resolved.config.job.dump_folder), resolved.resume_step, "start", facts)


def _gpus_by_host(device: torch.device) -> dict[str, dict[int, str]]:
    """Return the GPU of each rank by the name of its node; "" of a rank on a CPU. Collective."""
    here = socket.gethostname(), hardware.device_id(device)
    of_ranks = [here] * dist.get_world_size()
    dist.all_gather_object(of_ranks, here)
    found = defaultdict[str, dict[int, str]](dict)
    for rank, (host, gpu) in enumerate(of_ranks):
        found[host][rank] = gpu
    return dict(found)
