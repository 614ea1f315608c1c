"""One rank of a job on a simulated GPU, by the trainer's own functions; see `run.py`."""

import contextlib
import json
import multiprocessing
import sys
import traceback
from collections.abc import Sequence
from unittest import mock

import torch
import torch.distributed as dist

# registers what collectives give for fake tensors
import torch.distributed._tools.fake_collectives
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import _utils as sharding
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.checkpoint.staging import Staging
from meshwright.checkpoint.state import TrainingTensors
from meshwright.commands.plan.simulate import deal
from meshwright.config.loader import load_config
from meshwright.parallelisms import expert_parallel
from meshwright.parallelisms.meshes import Meshes, build_meshes
from meshwright.train.resolve import ResolvedJob
from tests.helpers.one_rank import OneRank
from tests.helpers.resolved import resolved
from tests.helpers.simulated_gpu import fake_cuda
from tests.helpers.simulated_gpu.cases import CASES, Case
from tests.helpers.simulated_gpu.watch import Watch

DEVICE = torch.device("cuda", 0)
NUM_PROCESSES = 2


def simulate(case: Case) -> dict[str, object]:
    """Build rank `case.rank`, and take two steps; of the second, figures."""
    dist.init_process_group("fake", store=FakeStore(), rank=case.rank, world_size=case.world_size)
    config = load_config(case.words)
    plan = resolved(config, case.world_size)
    meshes = build_meshes(plan.dims, "cuda")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    watch = Watch(fake)
    with fake, watch, mock.patch.object(expert_parallel, "on_host", deal):
        return _run(case, plan, meshes, watch)


sharding.compute_local_shape_and_global_offset = fake_cuda.real(
    sharding.compute_local_shape_and_global_offset  # of meshes, on the host
)


def _run(case: Case, plan: ResolvedJob, meshes: Meshes, watch: Watch) -> dict[str, object]:
    rank = OneRank(plan, meshes, DEVICE)
    model, optimizer = rank.model, rank.optimizer
    watch.begin()
    rank.initialize()
    init_waits = fake_cuda.host_waits | watch.blocking_copies
    staging = Staging()
    optimizer.register_step_pre_hook(lambda *_: staging.hold_update())
    growths = []
    for step in (1, 2):  # the optimizer has its state, and DTensor its plans, from the second on
        watch.begin()
        batches = rank.batches()
        send_waits = fake_cuda.host_waits | watch.blocking_copies
        watch.begin()
        start_bytes = watch.now
        if case.is_saved and step == 2:
            staging.take(TrainingTensors(model, optimizer, case.rank).state_dict())
        if case.is_faulty:
            _commit_faults()
        rank.step(step, batches)
        growths.append(watch.peak - start_bytes)
    tensors = dict(model.named_parameters())
    names = {parameter: name for name, parameter in tensors.items()}
    tensors |= {f"{name}.grad": p.grad for name, p in tensors.items() if p.grad is not None}
    for parameter, state in optimizer.state.items():
        tensors |= {f"{names[parameter]}.{key}": value for key, value in state.items()}
    return {
        # while weights get their first values, and while batches are sent: waits of the host, and
        # copies that it waits for
        "init_waits": dict(init_waits),
        "send_waits": dict(send_waits),
        # of a step: calls that wait for the device, copies that the host waits for, tensors made in
        # host memory, and calls of attention
        "waits": dict(fake_cuda.host_waits),
        "blocking_copies": dict(watch.blocking_copies),
        "on_host": dict(watch.on_host),
        "kernels": dict(fake_cuda.kernels),
        # copies by stream; what streams waited for, and on which the optimizer updated
        "copies": dict(watch.copies),
        "stream_log": list(fake_cuda.stream_log),
        "collectives": dict(watch.collectives),  # functional ones
        "not_on_device": sorted(name for name, tensor in tensors.items() if not tensor.is_cuda),
        "start_bytes": start_bytes,
        "peak_bytes": watch.peak,
        "first_growth_bytes": growths[0],  # of the step that makes the optimizer's state
    }


def _commit_faults() -> None:
    """One of each kind that figures are to show."""
    x = torch.ones(2, 4, 64, 8, device=DEVICE, requires_grad=True)
    x.sum().item()
    torch.cuda.synchronize()
    torch.tensor([1.0]).to(DEVICE, non_blocking=True)  # which is not pinned
    x.detach().cpu()
    mask = torch.ones(64, 64, dtype=torch.bool, device=DEVICE)
    F.scaled_dot_product_attention(x, x[:, :2], x[:, :2], attn_mask=mask, enable_gqa=True)


def _figures(name: str) -> str:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return json.dumps([name, simulate(CASES[name])])
    except Exception:
        return json.dumps([name, {"error": traceback.format_exc()}])


def simulate_all(names: Sequence[str]) -> None:
    """Print a line of JSON for each case: [name, figures], or [name, {"error": traceback}]."""
    FakeTensorMode.avoid_device_init = True
    torch.set_num_threads(1)  # fake tensors know nothing of threads, and first values use some
    # each in a process of its own: torch keeps meshes, of groups that are gone, in caches
    with multiprocessing.get_context("fork").Pool(NUM_PROCESSES, maxtasksperchild=1) as pool:
        for line in pool.imap(_figures, names, chunksize=1):
            print(line, flush=True)
