"""Parameter groups by name on two ranks, against plain PyTorch on one."""

import dataclasses
import itertools

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from meshwright.config.optimizer import Optimizer
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.train.optim.optimizers import build_optimizer
from meshwright.train.optim.update import update
from tests.helpers.job import Job, mesh, plain_steps
from tests.helpers.operators import Operators
from tests.helpers.optimizers import GROUPS, plain_groups
from tests.helpers.rounding import assert_updated_alike
from tests.helpers.tiny import TINY, parallel_model, plain_model

LRS, DECAY = (1.0, 0.5), 0.05
CONFIG = Optimizer(lr=LRS[0], eps=1.0, weight_decay=DECAY, groups=GROUPS)  # as `rounding.adamw`


def optimizer_of(model: LocalModel) -> torch.optim.Optimizer:
    return build_optimizer(model.named_parameters(), CONFIG, TINY.table.parameters)


def reference() -> dict[str, torch.Tensor]:
    """Weights after the last step."""
    model = plain_model()
    groups = plain_groups(model, DECAY)
    betas = (CONFIG.beta1, CONFIG.beta2)
    optimizer = torch.optim.AdamW(
        [group for group, _ in groups], betas=betas, eps=CONFIG.eps, fused=True
    )
    for step, lr in enumerate(LRS, 1):
        for group, (_, scale) in zip(optimizer.param_groups, groups, strict=True):
            group["lr"] = lr * scale
        plain_steps(model, optimizer, [step], max_norm=float("inf"))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _groups_on(dims: ParallelDims, is_early: bool) -> None:
    job = Job(dims, 0, dims.pp, is_early, optimizer_of=optimizer_of)
    if dims.pp > 1:  # the embedding's group is on the first stage alone
        assert len(job.optimizer.param_groups) == 3 - job.meshes.pp.get_local_rank()
    job.trainer.lr_at = lambda step: LRS[step - 1]
    for step in range(1, len(LRS) + 1):
        job.take_step(step)
    want, initial = reference(), dict(plain_model().named_parameters())
    for name, weight in job.weights().items():
        assert_updated_alike(weight, want[name], initial[name], name, num_steps=len(LRS))


@pytest.mark.ranks(2)
def test_groups_on_two_ranks_are_those_of_plain_torch() -> None:
    for axis in ("dp_shard", "tp", "cp", "pp"):
        _groups_on(mesh(**{axis: 2}), is_early=False)
        if axis in ("dp_shard", "tp"):
            _groups_on(mesh(**{axis: 2}), is_early=True)


@pytest.mark.ranks(2)
def test_the_kernel_gets_shards_and_the_state_is_laid_out_as_parameters() -> None:
    model, _ = parallel_model(mesh(dp_shard=2))
    optimizer = build_optimizer(model.named_parameters(), CONFIG, TINY.table.parameters)
    groups = [[*group["params"]] for group in optimizer.param_groups]
    seen = []  # by a hook, which the proof of gradients relies on
    optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append([[*group["params"]] for group in optimizer.param_groups])
    )
    for step in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        calls: list[tuple] = []
        with Operators(lambda *call, calls=calls: calls.append(call)):
            update(optimizer, torch.tensor(False))
        of_kernel = [types for name, types, *_ in calls if "fused_adam" in name]
        assert of_kernel
        assert not any(DTensor in types for types in of_kernel)
        for before, after in zip(groups, seen[-1], strict=True):
            assert all(a is b for a, b in zip(before, after, strict=True))
        assert {*optimizer.state} == {*model.parameters()}
        for parameter, slots in optimizer.state.items():
            assert slots["step"] == step + 1
            for slot in ("exp_avg", "exp_avg_sq"):
                layouts = [(type(x), x.placements, x.shape) for x in (slots[slot], parameter.data)]
                assert layouts[0] == layouts[1]
                assert slots[slot].to_local().count_nonzero() == parameter.to_local().numel()


@pytest.mark.ranks(2)
def test_the_first_update_makes_the_state_once() -> None:
    """By the most memory that each of two takes, relative to this rank's parameters."""
    dims = mesh(dp_shard=2)
    args = dataclasses.replace(TINY, dim=256, n_layers=4, hidden_dim=512)
    model, _ = parallel_model(dims, args)
    optimizer = build_optimizer(model.named_parameters(), Optimizer(), args.table.parameters)
    shards = [parameter.to_local().nbytes for parameter in model.parameters()]
    found = []
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            update(optimizer, torch.tensor(False))
        events = profiler.profiler.kineto_results.events()
        changes = sorted(
            (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
        )
        most = max(itertools.accumulate(num_bytes for _, num_bytes in changes))
        found.append(most / sum(shards))
    first, second = found
    # two moments; one of them is copied at a time
    assert 2 <= first < 2 + max(shards) / sum(shards) + 0.05
    assert second < 0.05
