"""Experts on several ranks against a loop in plain PyTorch on one: losses, every gradient, and the
loads and biases of routers to the bit."""

import dataclasses
import functools

import pytest
import torch

from meshwright.models.decoder import Decoder
from meshwright.models.families.qwen3_moe import Qwen3MoeArgs
from meshwright.models.loss import PADDING, Batch, has_loss
from meshwright.models.router import BalanceLosses
from tests.helpers.job import GLOBAL_BATCH, SCHEDULES, Job, global_batch, mesh
from tests.helpers.rounding import adamw
from tests.helpers.slow import slow_but
from tests.helpers.tiny import MIXED, SEQ_LEN, BiasedArgs, plain_model, whole

STEPS = 3
NUM_TOKENS = (GLOBAL_BATCH - 2) * SEQ_LEN + 5 + SEQ_LEN // 2  # without padding
KEPT = (1, 3)  # steps whose gradients are compared: at the first, biases are 0
OPTIONS = {
    "balance_loss": 0.5,
    "sequence_balance_loss": 0.5,
    "router_z_loss": 0.1,
    "bias_update_rate": 0.01,
}
Tensors = dict[str, torch.Tensor]
BIASED = BiasedArgs(**dataclasses.asdict(MIXED))


def padded(step: int) -> Batch:
    tokens, labels = global_batch(step)
    labels[2, 5:], labels[6, SEQ_LEN // 2 :] = PADDING, PADDING
    return Batch(tokens, labels)


@torch.no_grad()
def begin_unevenly(model: Decoder, crowds: bool = False) -> None:
    """With loads that are not even, at which a balance loss has no gradient.

    Args:
        crowds: every token goes to the first experts; the others have none.
    """
    for mixture in model.mixtures().values():
        mixture.load.copy_(torch.arange(len(mixture.load)) + 1)
        if crowds:
            mixture.bias[: mixture.spec.n_active] = 10


@functools.cache
def reference(
    args: Qwen3MoeArgs, crowds: bool = False
) -> tuple[list[float], dict[int, Tensors], list[Tensors]]:
    """Losses; gradients of the steps `KEPT`, before clipping; loads and biases after each step."""
    model = plain_model(args)
    begin_unevenly(model, crowds)
    tokens_per_step = GLOBAL_BATCH * SEQ_LEN
    optimizer = adamw(model)
    losses, gradients, states = [], {}, []
    for mixture in model.mixtures().values():
        mixture.losses = BalanceLosses(
            OPTIONS["balance_loss"] / tokens_per_step,
            OPTIONS["sequence_balance_loss"] / tokens_per_step,
            OPTIONS["router_z_loss"] / tokens_per_step,
        )
    for step in range(1, STEPS + 1):
        batch = padded(step)
        loss = model(batch.tokens, batch.labels) / has_loss(batch.labels).sum()
        loss.backward()
        losses.append(loss.item())
        if step in KEPT:
            gradients[step] = {name: p.grad.clone() for name, p in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        for mixture in model.mixtures().values():
            assert mixture.counts.sum() == NUM_TOKENS * args.n_active
            assert not crowds or mixture.counts[args.n_active :].sum() == 0
            mixture.load.copy_(mixture.counts)
            mean = mixture.counts.sum() / len(mixture.counts)
            mixture.bias += OPTIONS["bias_update_rate"] * (mean - mixture.counts).sign()
            mixture.counts.zero_()
        states.append(state_of(model))
    return losses, gradients, states


def state_of(model: torch.nn.Module) -> Tensors:
    ends = (".load", ".bias")
    return {name: tensor.clone() for name, tensor in model.named_buffers() if name.endswith(ends)}


def job_on(
    axes: dict[str, int], num_microbatches: int = 1, crowds: bool = False, **options: object
) -> Job:
    dims = mesh(**{"ep": 1} | axes)
    job = Job(dims, 0, num_microbatches, **{"args": MIXED} | OPTIONS | options)
    for stage in job.model.stages:
        begin_unevenly(stage, crowds)
    return job


def equals_one_process(axes: dict[str, int], num_microbatches: int, options: dict) -> None:
    base = options.pop("base", MIXED)
    options["args"] = args = dataclasses.replace(base, **options.get("args", {}))
    losses, gradients, states = reference(args, options.get("crowds", False))
    job = job_on(axes, num_microbatches, **options)
    seen = job.whole_gradients()
    for step in range(1, STEPS + 1):
        result = job.take_step(step, job.part(padded(step)), max_norm=0.5)
        assert result.loss.item() == pytest.approx(losses[step - 1], rel=1e-5), step
        own = state_of(job.model)
        assert own or "pp" in axes
        for name, tensor in own.items():
            assert torch.equal(tensor, states[step - 1][name]), f"step {step}: {name}"
        for name, got in seen.items() if step in KEPT else ():
            want = gradients[step][name]
            error = (got - want).norm() / want.norm().clamp(min=1e-20)
            assert error <= 1e-4, f"step {step}: {name}: {error:.1e}"


PIPELINE = {"schedule": "1F1B"}
BY_OP = {"ac_mode": "selective", "selective_ac_option": "op"}
TO_ONE = {"n_active": 1, "normalize_experts": False}
CASES = {
    "fsdp-ep": ({"dp_shard": 2, "ep": 2}, 2, {}),
    "tp": ({"tp": 2}, 1, {}),
    "tp-ep": ({"tp": 2, "ep": 2}, 1, {}),
    "cp-ep": ({"cp": 2, "ep": 2}, 1, {}),
    "pp": ({"pp": 2}, 2, PIPELINE),
    "zero-bubble": ({"pp": 2}, 4, SCHEDULES["ZBVZeroBubble"] | {"args": {"n_layers": 5}}),
    "biases-fsdp": ({"dp_shard": 2}, 1, {"base": BIASED, "ac_mode": "full"}),
    "biases-tp": ({"tp": 2}, 1, {"base": BIASED}),
    "biases": ({"tp": 2, "ep": 2}, 1, {"base": BIASED, "compile_backend": "aot_eager"}),
    "biases-pp": ({"pp": 2}, 2, PIPELINE | {"base": BIASED}),
    "biases-cp": ({"cp": 2, "ep": 2}, 1, {"base": BIASED, "ac_mode": "full"}),
    "biases-offload": ({"dp_shard": 2, "ep": 2}, 1, {"base": BIASED, "enable_cpu_offload": True}),
    "ac": ({"dp_shard": 2, "ep": 2}, 1, {"ac_mode": "full"}),
    "ac-op": ({"tp": 2, "ep": 2}, 1, BY_OP),
    "offload": ({"dp_shard": 2, "ep": 2}, 1, {"enable_cpu_offload": True}),
    "no-rows": ({"dp_shard": 2, "ep": 2}, 1, {"crowds": True}),
    "all-to-one": ({"tp": 2, "ep": 2}, 1, {"crowds": True, "args": TO_ONE}),
    "compiled-op": ({"dp_shard": 2, "ep": 2}, 1, BY_OP | {"compile_backend": "aot_eager"}),
    "compiled-full": (
        {"dp_shard": 2, "ep": 2},
        1,
        {"ac_mode": "full", "compile_backend": "aot_eager"},
    ),
    "fsdp-ep2": ({"dp_shard": 4, "ep": 2}, 1, {}),
    "fsdp-tp-ep4": ({"dp_shard": 2, "tp": 2, "ep": 4}, 1, {"ac_mode": "full"}),
    "biases-fsdp-tp-ep": ({"dp_shard": 2, "tp": 2, "ep": 2}, 2, {"base": BIASED}),
    "biases-within": (
        {"dp_shard": 4, "ep": 2},
        1,
        {"base": BIASED, "args": {"n_experts": 2, "n_active": 2}},
    ),
    "hsdp-ep": ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, 1, {}),
    "cp-tp-ep4": ({"cp": 2, "tp": 2, "ep": 4}, 1, {}),
    "pp-fsdp-ep": ({"pp": 2, "dp_shard": 2, "ep": 2}, 2, PIPELINE),
    "within-experts": ({"dp_shard": 4, "ep": 2}, 1, {"args": {"n_experts": 2, "n_active": 2}}),
    "uneven": ({"dp_shard": 4}, 1, {"args": {"n_experts": 6}}),
    "pp-tp-ep": ({"pp": 2, "tp": 2, "ep": 2}, 2, PIPELINE),
}

EVERYDAY = "fsdp-ep tp-ep cp-ep pp no-rows biases-fsdp-tp-ep pp-fsdp-ep uneven"


@pytest.mark.parametrize(("axes", "num_microbatches", "options"), slow_but(EVERYDAY, CASES))
def test_a_mesh_equals_one_process(on_ranks, axes, num_microbatches, options) -> None:
    ranks = mesh(**axes).num_ranks
    on_ranks(ranks, equals_one_process, axes, num_microbatches, options)


FROZEN = frozenset(
    f"layers.1.feed_forward.{name}" for name in ("router.weight", "experts.w1", "experts.w3")
)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_frozen_experts_and_routers_stay() -> None:
    initial = dict(plain_model(MIXED).named_parameters())
    job = job_on({"dp_shard": 2, "ep": 2}, frozen=FROZEN)
    seen = job.whole_gradients()
    for step in range(1, STEPS + 1):
        job.take_step(step, job.part(padded(step)), max_norm=0.5)
        assert not FROZEN & seen.keys()
        own = dict(job.model.named_parameters())
        for name in FROZEN:
            assert torch.equal(whole(own[name]), initial[name]), name
        first, second = job.model.stages[0].mixtures().values()
        assert not first.bias.any()  # a frozen router keeps its choice
        assert second.bias.any() or step == 2  # whose loads are the other way round
