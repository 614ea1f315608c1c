"""Experts on several ranks against a loop in plain PyTorch on one: losses, every gradient, and the
loads and biases of routers to the bit."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from meshwright.checkpoint.state import TrainingTensors
from meshwright.models.batch import Batch
from meshwright.models.decoder import Decoder
from meshwright.models.families.qwen3_moe import Qwen3MoeArgs
from meshwright.models.loss import IGNORE, PADDING, has_loss
from meshwright.models.router import BalanceLosses
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.train.bad_steps import BadStepDetector
from meshwright.train.trainer import StepOptions, StepResult, train_step
from tests.helpers.rounding import adamw
from tests.helpers.slow import slow, slow_but
from tests.helpers.tiny import MIXED, SEQ_LEN, parallel_model, plain_model, whole

STEPS, GLOBAL_BATCH = 3, 8
NUM_TOKENS = (GLOBAL_BATCH - 2) * SEQ_LEN + 5 + SEQ_LEN // 2  # without padding
KEPT = (1, 3)  # steps whose gradients are compared: at the first, biases are 0
OPTIONS = {
    "balance_loss": 0.5,
    "sequence_balance_loss": 0.5,
    "router_z_loss": 0.1,
    "bias_update_rate": 0.01,
}
CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(131, (GLOBAL_BATCH, SEQ_LEN), generator=generator)
    labels = torch.randint(131, (GLOBAL_BATCH, SEQ_LEN), generator=generator)
    labels[0], labels[1, 3:] = IGNORE, IGNORE
    labels[2, 5:], labels[6, SEQ_LEN // 2 :] = PADDING, PADDING
    return tokens, labels


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
        tokens, labels = global_batch(step)
        loss = model(tokens, labels) / has_loss(labels).sum()
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


def take_steps(
    dims: ParallelDims,
    num_microbatches: int,
    options: dict,
    args: Qwen3MoeArgs,
    look: Callable[[int, LocalModel, StepResult, Tensors], None],
    *,
    first: int = 1,
    load: Callable[[LocalModel, torch.optim.Optimizer], None] = lambda *_: None,
    optimizers: list[torch.optim.Optimizer] | None = None,
) -> LocalModel:
    """Call `look` after each step, with the gradients that the optimizer was given.

    Args:
        load: called before the step `first`.
        optimizers: gets the one that is used.
    """
    given = dict(OPTIONS | options)
    crowds = given.pop("crowds", False)
    size = GLOBAL_BATCH // (dims.dp * num_microbatches)
    model, meshes = parallel_model(dims, args, microbatches=(num_microbatches, size), **given)
    for stage in model.stages:
        begin_unevenly(stage, crowds)
    optimizer, detector = adamw(model), BadStepDetector(CPU)
    names = {parameter: name for name, parameter in model.named_parameters()}
    seen: Tensors = {}

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                seen[names[parameter]] = parameter.grad.clone()

    optimizer.register_step_pre_hook(keep)
    rank, ranks = meshes.dp.get_local_rank(), meshes.dp.size()
    if optimizers is not None:
        optimizers.append(optimizer)
    load(model, optimizer)
    for step in range(first, STEPS + 1):
        parts = (part.split(size)[rank::ranks] for part in global_batch(step))
        result = train_step(
            model,
            [*map(Batch, *parts)],
            optimizer,
            step=step,
            options=StepOptions(0.5),
            meshes=meshes,
            detector=detector,
        )
        look(step, model, result, seen)
    return model


def equals_one_process(
    dims: ParallelDims, num_microbatches: int, options: dict, args: Qwen3MoeArgs = MIXED
) -> None:
    losses, gradients, states = reference(args, options.get("crowds", False))

    def look(step: int, model: LocalModel, result: StepResult, seen: Tensors) -> None:
        assert result.loss.item() == pytest.approx(losses[step - 1], rel=1e-5), step
        own = state_of(model)
        assert own or dims.pp > 1
        for name, tensor in own.items():
            assert torch.equal(tensor, states[step - 1][name]), f"step {step}: {name}"
        for name, got in seen.items() if step in KEPT else ():
            want, got = gradients[step][name], whole(got)
            error = (got - want).norm() / want.norm().clamp(min=1e-20)
            assert error <= 1e-4, f"step {step}: {name}: {error:.1e}"

    take_steps(dims, num_microbatches, options, args, look)


PIPELINE = {"schedule": "1F1B"}
ON_TWO = {
    "fsdp": ({"dp_shard": 2}, 1, {}),
    "fsdp-ep": ({"dp_shard": 2, "ep": 2}, 2, {}),
    "fsdp-ep-gloo": ({"dp_shard": 2, "ep": 2}, 1, {"fsdp_cpu_backend": "gloo"}),
    "tp": ({"tp": 2}, 1, {}),
    "tp-ep": ({"tp": 2, "ep": 2}, 1, {}),
    "cp-ep": ({"cp": 2, "ep": 2}, 1, {}),
    "copies": ({"dp_replicate": 2}, 1, {}),
    "pp": ({"pp": 2}, 2, PIPELINE),
    "zero-bubble": (
        {"pp": 2},
        4,
        {"schedule": "ZBVZeroBubble", "stages_per_rank": 2, "args": {"n_layers": 5}},
    ),
    "ac": ({"dp_shard": 2, "ep": 2}, 1, {"ac_mode": "full"}),
    "ac-op": (
        {"tp": 2, "ep": 2},
        1,
        {"ac_mode": "selective", "selective_ac_option": "op"},
    ),
    "offload": ({"dp_shard": 2, "ep": 2}, 1, {"enable_cpu_offload": True}),
    "no-rows": ({"dp_shard": 2, "ep": 2}, 1, {"crowds": True}),
    "all-to-one": (
        {"tp": 2, "ep": 2},
        1,
        {"crowds": True, "args": {"n_active": 1, "normalize_experts": False}},
    ),
    "compiled": ({"tp": 2, "ep": 2}, 1, {"compile_backend": "eager"}),
    "compiled-ac": (
        {"dp_shard": 2, "ep": 2},
        1,
        {
            "compile_backend": "aot_eager",
            "ac_mode": "selective",
            "selective_ac_option": "op",
        },
    ),
}
ON_FOUR = {
    "fsdp-ep2": ({"dp_shard": 4, "ep": 2}, 1, {}),
    "fsdp-ep4": ({"dp_shard": 4, "ep": 4}, 1, {}),
    "fsdp-tp-ep2": ({"dp_shard": 2, "tp": 2, "ep": 2}, 2, {}),
    "fsdp-tp-ep4": ({"dp_shard": 2, "tp": 2, "ep": 4}, 1, {"ac_mode": "full"}),
    "hsdp-ep": ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, 1, {}),
    "cp-tp-ep4": ({"cp": 2, "tp": 2, "ep": 4}, 1, {}),
    "pp-fsdp-ep": ({"pp": 2, "dp_shard": 2, "ep": 2}, 2, PIPELINE),
    "within-experts": (
        {"dp_shard": 4, "ep": 2},
        1,
        {"args": {"n_experts": 2, "n_active": 2}},
    ),
    "uneven": ({"dp_shard": 4}, 1, {"args": {"n_experts": 6}}),
    "pp-tp-ep": ({"pp": 2, "tp": 2, "ep": 2}, 2, PIPELINE),
}


def _dims(axes: dict[str, int]) -> ParallelDims:
    return ParallelDims(**{"dp_replicate": 1, "dp_shard": 1, "ep": 1} | axes)


def _run(on_ranks, world_size: int, axes: dict, num_microbatches: int, options: dict) -> None:
    options = dict(options)
    args = dataclasses.replace(MIXED, **options.pop("args", {}))
    on_ranks(world_size, equals_one_process, _dims(axes), num_microbatches, options, args)


def cases(table: dict[str, Any]) -> dict[str, tuple[Any]]:
    return {name: (case,) for name, case in table.items()}


@pytest.mark.parametrize("case", slow_but("fsdp-ep tp-ep cp-ep pp no-rows", cases(ON_TWO)))
def test_two_ranks_equal_one_process(on_ranks, case) -> None:
    _run(on_ranks, 2, *case)


@pytest.mark.parametrize("case", slow_but("fsdp-tp-ep2 pp-fsdp-ep uneven", cases(ON_FOUR)))
def test_four_ranks_equal_one_process(on_ranks, case) -> None:
    _run(on_ranks, 4, *case)


def _trains_in_bf16(dims: ParallelDims) -> None:
    """Nearly as in fp32: choices may differ where scores are nearly equal."""
    wanted, _, _ = reference(MIXED)

    def look(step: int, model: LocalModel, result: StepResult, seen: Tensors) -> None:
        assert result.loss.item() == pytest.approx(wanted[step - 1], rel=2e-2), step
        for mixture in model.stages[0].mixtures().values():
            assert mixture.load.sum() == NUM_TOKENS * MIXED.n_active

    take_steps(dims, 1, {"param_dtype": torch.bfloat16}, MIXED, look)


@pytest.mark.slow
def test_experts_train_in_bf16(on_ranks) -> None:
    on_ranks(2, _trains_in_bf16, _dims({"dp_shard": 2, "ep": 2}))


FROZEN = frozenset(
    f"layers.1.feed_forward.{name}" for name in ("router.weight", "experts.w1", "experts.w3")
)


def _freezes(dims: ParallelDims) -> None:
    before = plain_model(MIXED)
    begin_unevenly(before)
    initial = dict(before.named_parameters())

    def look(step: int, model: LocalModel, result: StepResult, seen: Tensors) -> None:
        assert not FROZEN & seen.keys()
        own = dict(model.named_parameters())
        for name in FROZEN:
            assert torch.equal(whole(own[name]), initial[name]), name
        first, second = model.stages[0].mixtures().values()
        assert not first.bias.any()  # a frozen router keeps its choice
        assert second.bias.any()

    take_steps(dims, 1, {"frozen": FROZEN}, MIXED, look)


@pytest.mark.slow
def test_frozen_experts_and_routers_stay(on_ranks) -> None:
    on_ranks(2, _freezes, _dims({"dp_shard": 2, "ep": 2}))


def _save(dims: ParallelDims, options: dict, folder: str) -> tuple[Tensors, float]:
    """Whole tensors after two steps, which are saved; and the loss of the third."""
    found: list[Tensors] = []
    losses = []

    def look(step: int, model: LocalModel, result: StepResult, seen: Tensors) -> None:
        losses.append(result.loss.item())
        if step == 2:
            tensors = TrainingTensors(model, optimizers[0], 0).state_dict()
            state = {key: value for key, value in tensors.items() if not key.startswith("rng.")}
            dcp.save(state, checkpoint_id=folder)
            found.append({key: whole(value).clone() for key, value in state.items()})

    optimizers: list[torch.optim.Optimizer] = []
    take_steps(dims, 1, options, MIXED, look, optimizers=optimizers)
    return found[0], losses[2]


def _load(dims: ParallelDims, options: dict, folder: str) -> tuple[Tensors, float]:
    found: list[Tensors] = []
    losses = []

    def load(model: LocalModel, optimizer: torch.optim.Optimizer) -> None:
        tensors = TrainingTensors(model, optimizer, 0)
        every = tensors.state_dict().items()
        state = {key: value for key, value in every if not key.startswith("rng.")}
        dcp.load(state, checkpoint_id=folder)
        tensors.load_state_dict(state)
        for stage in model.stages:
            stage.init_buffers()
        every = tensors.state_dict().items()
        found.append({k: whole(v).clone() for k, v in every if not k.startswith("rng.")})

    def look(step: int, model: LocalModel, result: StepResult, seen: Tensors) -> None:
        losses.append(result.loss.item())

    take_steps(dims, 1, options, MIXED, look, first=3, load=load)
    return found[0], losses[0]


MESHES = {
    "1": {},
    "ep4": {"dp_shard": 4, "ep": 4},
    "tp-ep": {"tp": 2, "ep": 2},
    "fsdp-tp-ep2": {"dp_shard": 2, "tp": 2, "ep": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
}
PAIRS = [("ep4", "tp-ep"), ("tp-ep", "fsdp-tp-ep2"), ("hsdp", "ep4"), ("ep4", "1"), ("1", "tp-ep")]


@pytest.mark.parametrize(("source", "target"), [PAIRS[1], *slow(PAIRS[0], *PAIRS[2:])])
def test_a_checkpoint_goes_on_on_another_mesh(on_ranks, tmp_path, source, target) -> None:
    before, after = _dims(MESHES[source]), _dims(MESHES[target])
    saved, want = on_ranks(before.num_ranks, _save, before, {}, str(tmp_path))[0]
    found, got = on_ranks(after.num_ranks, _load, after, {}, str(tmp_path))[0]
    assert found.keys() == saved.keys()
    assert any(name.endswith("feed_forward.bias") for name in found)
    for name, tensor in saved.items():
        assert torch.equal(found[name], tensor), name
    assert got == pytest.approx(want, rel=1e-5)
