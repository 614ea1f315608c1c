"""Optimizers of the user's own that look at whole matrices and keep a state: on meshes as alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint import listing
from meshwright.checkpoint.on_ranks import AllRanks
from meshwright.checkpoint.reader import restore
from meshwright.checkpoint.state import TrainingTensors
from meshwright.checkpoint.writer import write
from meshwright.config.optimizer import Optimizer
from meshwright.models.decoder import Decoder
from meshwright.parallelisms.shards import local_box, part_of_box
from meshwright.system.errors import ConfigError
from meshwright.train.optim.matrices import OWNED
from meshwright.train.optim.optimizers import build_optimizer, check_state
from meshwright.train.optim.registry import OPTIMIZERS, MatrixWise
from meshwright.train.optim.update import set_learning_rate, update
from tests.campaigns.new_user import example
from tests.helpers.job import mesh
from tests.helpers.slow import slow
from tests.helpers.tiny import MIXED, TINY, parallel_model, plain_model

# the second is held back; the third is clipped
STEPS = ((False, None), (True, 3.0), (False, 1.5), (False, None))
STOP = 2


def soap(
    gradients: Tensor, options: object, state: Mapping[str, Tensor]
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Adam in the eigenbasis of Shampoo's factors, which is found anew at every step.

    Source: Vyas et al. 2024, arXiv:2409.11321, algorithm 3, without its learning rate.
    """
    left = state["left"].lerp(gradients @ gradients.mT, 0.05)
    right = state["right"].lerp(gradients.mT @ gradients, 0.05)
    rows, columns = torch.linalg.eigh(left)[1], torch.linalg.eigh(right)[1]
    mean = state["mean"].lerp(gradients, 0.1)
    squares = state["squares"].lerp((rows.mT @ gradients @ columns).square(), 0.05)
    turned = (rows.mT @ mean @ columns) / (squares.sqrt() + 1e-8)
    new = {"left": left, "right": right, "mean": mean, "squares": squares}
    return rows @ turned @ columns.mT, new


def soap_state(rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    matrix = (rows, columns)
    return {"left": (rows, rows), "right": (columns, columns), "mean": matrix, "squares": matrix}


def lars(matrices: Tensor, options: object, weights: Tensor) -> Tensor:
    """The momentum times the trust ratio of You et al. 2017, arXiv:1708.03888."""
    norms = [one.flatten(1).norm(dim=1).view(-1, 1, 1) for one in (weights, matrices)]
    weights.zero_()  # a copy
    return matrices * (norms[0] / norms[1].clamp(min=1e-12)).to(matrices)


def entry_of(name: str) -> tuple[MatrixWise, Any]:
    """The function and its options: of the docs, or of this test."""
    if name == "soap":
        return MatrixWise(soap, lambda rows, columns, options: 0.2, soap_state), None
    if name == "lars":
        return MatrixWise(lars, lambda rows, columns, options: 1.0, has_weights=True), None
    module: dict[str, Any] = {}
    exec(example("adafactor"), module)
    return module["OPTIMIZERS"]["adafactor"], module["OPTIONS"]["adafactor"]()


def build(name: str, model: Any, args: Any, ranks: Any = None) -> torch.optim.Optimizer:
    OPTIMIZERS[name], options = entry_of(name)
    own = {} if options is None else {name: options}
    try:
        config = Optimizer(name=name, lr=0.02)
        table = args.table.parameters
        return build_optimizer(model.named_parameters(), config, table, ranks, own)
    finally:
        del OPTIMIZERS[name]


def gradient_of(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 1000 + sum(name.encode()))
    return torch.randn(shape, generator=generator)


def take_steps(model: Any, optimizer: torch.optim.Optimizer, args: Any, numbers: range) -> None:
    for number in numbers:
        skip_update, divisor = STEPS[number]
        for name, parameter in model.named_parameters():
            parameter.grad = torch.empty_like(parameter)
            mine, offset = local_box(parameter.grad)
            given = gradient_of(name, args.table.parameters[name].shape, number) * (divisor or 1)
            mine.copy_(part_of_box(given, (offset, mine.shape)))
        set_learning_rate(optimizer, 0.02 / (number + 1))
        scale = None if divisor is None else torch.tensor(divisor)
        update(optimizer, torch.tensor(skip_update), scale)
        optimizer.zero_grad()
        check_state(optimizer, model.named_parameters())


def alone(name: str, args: Any) -> tuple[Decoder, torch.optim.Optimizer]:
    model = plain_model(args)
    optimizer = build(name, model, args)
    take_steps(model, optimizer, args, range(len(STEPS)))
    return model, optimizer


def assert_as_alone(name: str, args: Any, model: Any, optimizer: torch.optim.Optimizer) -> None:
    plain, of_plain = alone(name, args)
    wanted, owned = dict(plain.named_parameters()), 0
    for key, parameter in model.named_parameters():
        mine, offset = local_box(parameter)
        assert torch.equal(mine, part_of_box(wanted[key], (offset, mine.shape))), (name, key)
        for state, value in optimizer.state[parameter].items():
            if state.startswith(OWNED):
                assert torch.equal(value, of_plain.state[wanted[key]][state]), (name, key, state)
                owned += value.numel()
    of_all, total = torch.tensor(owned), 0
    dist.all_reduce(of_all)
    for state in of_plain.state.values():
        total += sum(value.numel() for key, value in state.items() if key.startswith(OWNED))
    assert of_all.item() == total  # each state is on one rank of all


def on_mesh(name: str, degrees: dict[str, int]) -> tuple[Any, torch.optim.Optimizer, Any, Any]:
    dims = mesh(**degrees)
    args = MIXED if dims.ep else TINY
    model, meshes = parallel_model(dims, args, microbatches=(dims.pp, 1))
    return model, build(name, model, args, meshes.stage.get_group()), args, meshes


def _update(cases: list[tuple[str, dict[str, int]]]) -> None:
    for name, degrees in cases:
        model, optimizer, args, _ = on_mesh(name, degrees)
        take_steps(model, optimizer, args, range(len(STEPS)))
        assert_as_alone(name, args, model, optimizer)


def _save(name: str, degrees: dict[str, int], folder: Path) -> None:
    model, optimizer, args, _ = on_mesh(name, degrees)
    take_steps(model, optimizer, args, range(STOP))
    state = TrainingTensors(model, optimizer, dist.get_rank()).state_dict()
    write(state, listing.unfinished_folder(folder, STOP), {}, None, dist.group.WORLD)


def _resume(name: str, degrees: dict[str, int], folder: Path) -> None:
    model, optimizer, args, _ = on_mesh(name, degrees)
    tensors = TrainingTensors(model, optimizer, dist.get_rank())
    saved = listing.step_folder(folder, STOP)
    tensors.load_state_dict(restore(saved, tensors.state_dict(), (), AllRanks(dist.group.WORLD)))
    take_steps(model, optimizer, args, range(STOP, len(STEPS)))
    assert_as_alone(name, args, model, optimizer)


NAMES = ("adafactor", "soap", "lars")
ON_TWO = [
    (name, {axis: 2}) for name in NAMES for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")
]
PAIRS = [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"pp": 2, "dp_shard": 2}]
PAIRS += [{"cp": 2, "tp": 2}, {"dp_shard": 2, "tp": 2, "ep": 2}]
ON_FOUR = [(name, degrees) for name in NAMES for degrees in PAIRS]


@pytest.mark.parametrize(("ranks", "cases"), [(2, ON_TWO), *slow((4, ON_FOUR))])
def test_ranks_update_as_one_to_the_bit(on_ranks, ranks: int, cases) -> None:
    on_ranks(ranks, _update, cases)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("before", "after"),
    [({"dp_shard": 2}, {"tp": 2}), ({"tp": 2}, {"dp_replicate": 2}), ({"pp": 2}, {"dp_shard": 2})],
)
def test_a_state_is_resumed_on_another_mesh(on_ranks, tmp_path, name, before, after) -> None:
    on_ranks(2, _save, name, before, tmp_path)
    on_ranks(2, _resume, name, after, tmp_path)


def test_adafactor_is_torchs() -> None:
    """With weights from zero on, which have the smallest scale at first."""
    (ours, options), generator = entry_of("adafactor"), torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(6, 10))
    theirs = torch.optim.Adafactor([weight], lr=1e-2, weight_decay=0.0)
    assert ours.state is not None
    state = {key: torch.zeros(1, *shape) for key, shape in ours.state(6, 10).items()}
    for _ in range(4):
        gradient = torch.randn(6, 10, generator=generator)
        before, weight.grad = weight.detach().clone(), gradient.clone()
        theirs.step()
        wanted = (before - weight.detach()) / 1e-2
        own = (gradient.unsqueeze(0), options, state, before.unsqueeze(0))
        updates, state = ours.direction(*own)
        torch.testing.assert_close(updates[0], wanted, rtol=1e-4, atol=1e-6)


def test_a_function_that_breaks_its_word_is_named() -> None:
    model = plain_model(TINY)
    OPTIMIZERS["wrong"] = MatrixWise(
        lambda g, options, state: (g, {"row": state["row"].sum()}),
        lambda rows, columns, options: 1.0,
        lambda rows, columns: {"row": (rows,)},
    )
    try:
        config = Optimizer(name="wrong", lr=0.02)
        optimizer = build_optimizer(model.named_parameters(), config, TINY.table.parameters)
        with pytest.raises(ConfigError, match=r"returns state 'row' with shape \(\), and \(1"):
            take_steps(model, optimizer, TINY, range(1))
    finally:
        del OPTIMIZERS["wrong"]
