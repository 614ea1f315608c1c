"""Choices of experts that a mesh records, and others that it is told, against one process in plain
PyTorch."""

import dataclasses
import functools
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.models.decoder import Routing
from meshwright.models.loss import IGNORE, Batch
from meshwright.parallelisms.routing_replay import record_choices, replay_choices, routed
from meshwright.parallelisms.rules.degrees import ParallelDims
from tests.helpers.job import GLOBAL_BATCH, SCHEDULES, Job, mesh
from tests.helpers.rounding import adamw
from tests.helpers.slow import slow_but
from tests.helpers.tiny import MIXED, SEQ_LEN, parallel_model, plain_model

# two layers, and so the first stage of a pipeline, have no experts
ARGS = dataclasses.replace(MIXED, n_layers=4, n_dense_layers=2)


class Told:
    """As `Routing`, of one process that takes the whole batch at once."""

    def __init__(self, choices: dict[int, Tensor] | None = None) -> None:
        self.choices, self.seen = choices, dict[int, Tensor]()

    def given(self, layer: int, num_sequences: int) -> Tensor | None:
        return self.choices and self.choices[layer]

    def note(self, layer: int, choice: Tensor, gap: Tensor | None) -> None:
        self.seen[layer] = choice


@functools.cache
def drawn() -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Tokens, labels, and experts that no router would choose."""
    generator = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(131, (2, GLOBAL_BATCH, SEQ_LEN), generator=generator)
    shape = GLOBAL_BATCH, SEQ_LEN, ARGS.n_experts
    chances = {number: torch.rand(shape, generator=generator) for number in (2, 3)}
    return tokens, labels, {n: c.topk(ARGS.n_active).indices for n, c in chances.items()}


@functools.cache
def reference() -> tuple[list[float], dict[str, Tensor], dict[int, Tensor]]:
    """Losses of a free step and of a told one; the latter's gradients; the former's choices."""
    model = plain_model(ARGS)
    optimizer, losses, routings = adamw(model), [], [Told(), Told(drawn()[2])]
    for model.routing in routings:
        optimizer.zero_grad()
        tokens, labels, _ = drawn()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients, routings[0].seen


def records_and_replays(axes: dict[str, int], num_microbatches: int, options: dict) -> None:
    losses, gradients, chosen = reference()
    tokens, labels, told = drawn()
    dims = mesh(**{"ep": 1} | axes)
    job = Job(dims, 0, num_microbatches, args=ARGS, **{"balance_loss": 0.0} | options)
    model, meshes, seen = job.model, job.meshes, job.whole_gradients()

    def step(number: int) -> float:
        return job.take_step(number, job.part(Batch(tokens, labels))).loss.item()

    with record_choices(model.stages, meshes) as choices:
        assert step(1) == pytest.approx(losses[0], rel=1e-5)
    assert choices.keys() == chosen.keys()
    for number, experts in chosen.items():
        assert torch.equal(choices[number].sort().values, experts.sort().values)
    with replay_choices(model.stages, told, meshes) as replay:
        assert step(2) == pytest.approx(losses[1], rel=1e-5)
    for name, got in seen.items():
        want = gradients[name]
        assert (got - want).norm() <= 1e-4 * want.norm(), name
    mixtures = {n: m for stage in model.stages for n, m in stage.mixtures().items()}
    for number, mixture in mixtures.items():
        assert torch.equal(mixture.load, told[number].flatten().bincount(minlength=8))
    axes = dims.dp * dims.cp * dims.tp
    assert replay.num_tokens == len(mixtures) * GLOBAL_BATCH * SEQ_LEN // axes
    assert replay.num_others >= 0.9 * replay.num_tokens  # 1 of 56 sets is the router's
    assert not mixtures or replay.gap > 1e-3
    assert all(type(stage.routing) is Routing for stage in model.stages)


CASES = {
    "tp-ep-ac": ({"tp": 2, "ep": 2}, 2, {"ac_mode": "full"}),
    "tp-ep-ac-op": ({"tp": 2, "ep": 2}, 1, {"ac_mode": "selective", "selective_ac_option": "op"}),
    "cp-ep": ({"cp": 2, "ep": 2}, 2, {}),
    "pp": ({"pp": 2}, 4, {}),
    "compiled": ({"dp_shard": 2, "ep": 2}, 1, {"compile_backend": "aot_eager"}),
    "cp-tp-ep4": ({"cp": 2, "tp": 2, "ep": 4}, 1, {"ac_mode": "full"}),
    "interleaved": ({"pp": 2, "dp_shard": 2}, 4, SCHEDULES["ZBVZeroBubble"]),
}


@pytest.mark.parametrize(("axes", "num_microbatches", "options"), slow_but("tp-ep-ac pp", CASES))
def test_a_mesh_records_and_replays_as_one_process(
    on_ranks, axes, num_microbatches, options
) -> None:
    ranks = mesh(**axes).num_ranks
    on_ranks(ranks, records_and_replays, axes, num_microbatches, options)


def test_a_step_is_recorded_on_after_a_forward_that_is_not() -> None:
    """As of `layer_stats`, within the step."""
    told, other = Told(), Routing()
    stages = [Mock(routing=told), Mock(routing=other)]
    with routed(stages, Routing()):
        assert not {told, other} & {stage.routing for stage in stages}
    assert [stage.routing for stage in stages] == [told, other]


@pytest.mark.ranks(1)
def test_choices_that_do_not_fit_are_refused() -> None:
    model, meshes = parallel_model(ParallelDims(1, 1), dataclasses.replace(ARGS, n_layers=3))
    tokens, _, told = drawn()
    experts, few = told[2], "choices of [01] sequences, but 2 go through"
    rule = r"choices are \(sequences, S, 3\) int64, .* different experts of 0 to 7"
    for wrong, words in (
        ({}, few),
        ({2: experts[:1]}, few),
        ({2: experts[..., :2]}, rule),
        ({2: experts.float()}, rule),
        ({2: experts + 1}, rule),
        ({2: experts - 1}, rule),
        ({2: experts[..., [0, 1, 0]]}, rule),
    ):
        with (
            pytest.raises(ValueError, match=f"layer 2: {words}"),
            replay_choices(model.stages, wrong, meshes),
        ):
            model.stages[0](tokens[:2])
        assert type(model.stages[0].routing) is Routing
