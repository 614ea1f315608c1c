"""Muon on meshes: the same bits as one process, given the same gradients."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from meshwright.config.optimizer import Muon, Optimizer
from meshwright.models.decoder import Decoder
from meshwright.models.families.llama import LlamaArgs
from meshwright.parallelisms.shards import local_box, part_of_box
from meshwright.train.optim.optimizers import build_optimizer
from meshwright.train.optim.update import set_learning_rate, update
from tests.helpers.job import mesh
from tests.helpers.slow import slow
from tests.helpers.tiny import MIXED, TINY, parallel_model, plain_model

TABLE = TINY.table.parameters
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
# the second is held back; all but the first are clipped
STEPS = ((False, None), (True, 3.0), (False, 1.5), (False, 1.0))

Case = tuple[dict[str, int], dict[str, object], dict[str, object]]


def config_of(options: dict[str, object]) -> Optimizer:
    return Optimizer(name="muon", lr=0.02, muon=Muon(**options))


def gradients(step: int, args: LlamaArgs) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    table = args.table.parameters
    return {name: torch.randn(one.shape, generator=generator) for name, one in table.items()}


def take_steps(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    numbers: range,
    args: LlamaArgs = TINY,
) -> dict[str, torch.Tensor]:
    """This rank's matrices and their momenta afterwards."""
    for number in numbers:
        skip_update, divisor = STEPS[number]
        given = gradients(number, args)
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            parameter.grad = torch.empty_like(parameter)
            mine, offset = local_box(parameter.grad)
            part = given[name] * (divisor or 1)
            mine.copy_(part_of_box(part, (offset, mine.shape)))
        set_learning_rate(optimizer, 0.02 / (number + 1))
        update(
            optimizer,
            torch.tensor(skip_update),
            None if divisor is None else torch.tensor(divisor),
        )
        optimizer.zero_grad()
    return state_of(model, optimizer, args)


def matrices(args: LlamaArgs) -> list[str]:
    table = args.table.parameters
    return [name for name, one in table.items() if one.role in ("matrix", "experts")]


def state_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, args: LlamaArgs
) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if name in matrices(args) and parameter.requires_grad:
            found[name] = parameter
            found[f"{name}.momentum"] = optimizer.state[parameter]["momentum"]
    return found


def alone(
    options: dict[str, object], args: LlamaArgs = TINY
) -> tuple[Decoder, torch.optim.Optimizer]:
    model, table = plain_model(args), args.table.parameters
    return model, build_optimizer(model.named_parameters(), config_of(options), table)


def _meshes(cases: list[Case]) -> None:
    of_one = dict[str, dict[str, torch.Tensor]]()
    for degrees, options, of_model in cases:
        dims = mesh(**degrees)
        args = MIXED if dims.ep else TINY
        model, meshes = parallel_model(dims, args, microbatches=(dims.pp, 1), **of_model)
        optimizer = build_optimizer(
            model.named_parameters(),
            config_of(options),
            args.table.parameters,
            meshes.stage.get_group(),
        )
        got = take_steps(model, optimizer, range(len(STEPS)), args)
        if (key := str((options, args))) not in of_one:
            of_one[key] = take_steps(*alone(options, args), range(len(STEPS)), args)
        want = of_one[key]
        start = dict(plain_model(args).named_parameters())
        for key, tensor in got.items():
            mine, offset = local_box(tensor)
            theirs = part_of_box(want[key], (offset, mine.shape))
            assert torch.equal(mine, theirs), (degrees, options, key)
            assert isinstance(tensor, DTensor)
        frozen = of_model.get("frozen", ())
        for name in matrices(args):
            assert (name in got) == (name not in frozen) or dims.pp > 1
            assert name in frozen or not torch.equal(want[name], start[name])


FP32 = {"dtype": "float32"}
ON_TWO = [
    *(({axis: 2}, {}, {}) for axis in AXES),
    ({"tp": 2}, FP32 | {"split_heads": True}, {}),
    ({"dp_shard": 2}, FP32 | {"nesterov": False, "lr_scale": "spectral"}, {}),
    ({"dp_shard": 2}, {}, {"enable_cpu_offload": True}),
    ({"dp_shard": 2}, {}, {"frozen": matrices(TINY)[:3]}),
]
PAIRS = (
    *(("dp_shard", "tp"), ("dp_replicate", "dp_shard"), ("dp_replicate", "tp")),
    *(("cp", "tp"), ("pp", "tp"), ("pp", "dp_shard")),
)
ON_FOUR = [
    ({"dp_shard": 4}, {}, {}),
    ({"tp": 2, "dp_shard": 2}, FP32 | {"split_heads": True}, {}),
    *(({one: 2, other: 2}, {}, {}) for one, other in PAIRS),
    ({"pp": 2, "dp_shard": 2}, {}, {"frozen": [n for n in TABLE if "layers.0" in n]}),
    # of models with experts
    ({"dp_shard": 4, "ep": 1}, {}, {}),
    ({"dp_shard": 4, "ep": 2}, {}, {}),  # an expert's matrices on one rank, a stack's on two each
    ({"dp_shard": 4, "ep": 4}, {}, {}),
    ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, {}, {}),
    ({"dp_shard": 2, "tp": 2, "ep": 2}, {}, {}),
    ({"pp": 2, "tp": 2, "ep": 2}, {}, {}),
    ({"cp": 2, "tp": 2, "ep": 4}, {}, {}),
]


@pytest.mark.parametrize(("ranks", "cases"), [(2, ON_TWO), *slow((4, ON_FOUR))])
def test_ranks_update_as_one_to_the_bit(on_ranks, ranks, cases) -> None:
    on_ranks(ranks, _meshes, cases)
