"""Float8 layers on two ranks, emulated, against one; more meshes are in test_prove.py."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from meshwright.commands.prove.bounds import BOUNDS
from meshwright.config.optimizer import Optimizer
from meshwright.config.parallelism import Float8
from meshwright.parallelisms.data_parallel import reset_after_no_grad
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.parallelisms.shared_memory import fsdp_groups
from meshwright.train.optim.average import Average
from meshwright.train.optim.optimizers import build_optimizer
from meshwright.train.optim.registry import OPTIMIZERS
from meshwright.train.optim.update import update
from tests.helpers.job import mesh
from tests.helpers.slow import slow
from tests.helpers.tiny import SEQ_LEN, TINY, parallel_model, whole

ON = Float8(enable=True, emulate=True)
FLOAT8 = {"param_dtype": torch.bfloat16, "float8": ON}
BY_TENSOR = FLOAT8 | {"float8": ON.model_copy(update={"recipe_name": "tensorwise"})}


def train(dims: ParallelDims, options: dict) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and whole gradients of four sequences, one at a time on each rank."""
    torch.compiler.reset()
    local, meshes = parallel_model(dims, **FLOAT8 | options)
    (model,) = local.stages
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(TINY.vocab_size, (4, SEQ_LEN + 1), generator=generator)
    loss = torch.zeros(())
    for part in tokens.chunk(meshes.dp.size())[meshes.dp.get_local_rank()].split(1):
        summed = model(part[:, :-1], part[:, 1:]) / tokens[:, 1:].numel()
        summed.backward()
        loss += summed.detach()
    dist.all_reduce(loss, group=meshes.dp.get_group())
    gradients = {name: whole(p.grad) for name, p in local.named_parameters() if p.grad is not None}
    return loss.item(), gradients


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, {"ac_mode": "selective"}),
        (2, BY_TENSOR | {"ac_mode": "selective"}),
        (1, BY_TENSOR | {"compile_backend": "aot_eager"}),
        *slow(
            (2, {"enable_cpu_offload": True, "frozen": ["layers.1.feed_forward.w1.weight"]}),
            (1, {"compile_backend": "aot_eager"}),
            (2, BY_TENSOR | {"compile_backend": "aot_eager"}),
            (2, BY_TENSOR | {"enable_cpu_offload": True}),
            (4, BY_TENSOR),  # 66 rows: shards of 17 and of 15
        ),
    ],
    ids=str,
)
def test_shards_multiply_the_same_numbers(on_ranks, num_ranks: int, options) -> None:
    alone = {"float8": options.get("float8", ON), "frozen": options.get("frozen", ())}
    (loss, gradients), (want_loss, wanted) = (
        on_ranks(dims.num_ranks, train, dims, used)[0]
        for dims, used in ((mesh(dp_shard=num_ranks), options), (mesh(), alone))
    )
    bounds = BOUNDS["float8 sums"]
    assert loss == pytest.approx(want_loss, rel=bounds.loss)
    assert gradients.keys() == wanted.keys()
    for name, want in wanted.items():
        assert (gradients[name] - want).norm() <= bounds.gradient * want.norm(), name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axes", [{"dp_shard": 2}, *slow({"tp": 2}, {"dp_replicate": 2})], ids=str)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_full_weights_have_one_scale_after_every_update(name: str, axes) -> None:
    local, meshes = parallel_model(mesh(**axes), **BY_TENSOR)
    (model,) = local.stages
    average = Average(local, decay=0.5)
    average.begin()
    config = Optimizer(name=name, lr=0.1)
    stage = meshes.stage.get_group()
    table = TINY.table.parameters
    optimizer = build_optimizer(local.named_parameters(), config, table, stage)
    tokens = torch.arange(SEQ_LEN).unsqueeze(0) % TINY.vocab_size
    shards = dict(local.named_parameters())  # not those that a forward leaves gathered
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "has_one_scale")}
    assert len(layers) == 5 * TINY.n_layers

    @torch.no_grad()
    def check_forward() -> list[float]:
        model(tokens, tokens)
        reset_after_no_grad(local.stages)
        found = []
        for layer_name, layer in layers.items():
            largest = whole(shards[f"{layer_name}.weight"]).abs().max()
            found.append(layer.weight_scale.item())
            assert found[-1] == (448 / largest.double()).float(), layer_name
        return found

    before = check_forward()
    model(tokens, tokens).backward()
    update(optimizer, torch.tensor(False))
    assert all(new != old for new, old in zip(check_forward(), before, strict=True))
    with average.in_place():
        assert check_forward() == before


@pytest.mark.ranks(2)
def test_weights_are_gathered_in_float8_and_measured_once() -> None:
    local, _ = parallel_model(mesh(dp_shard=2), **BY_TENSOR)
    (model,) = local.stages
    tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    counts = []
    for _ in range(2):
        with CommDebugMode() as communication:
            model(tokens, tokens).backward()
        counts.append(communication.get_comm_counts()[torch.ops.c10d.allreduce_])
    assert counts == [1, 0]
    gathered = {
        parameter._param_fqn: {one.dtype for one in parameter.all_gather_outputs}
        for group in fsdp_groups(model)
        for parameter in group.fsdp_params
    }
    float8 = ("wq.weight", "wo.weight", "w1.weight", "w2.weight", "w3.weight")
    for name, types in gathered.items():
        dtype = torch.float8_e4m3fn if name.endswith(float8) else torch.bfloat16
        assert types == {dtype}, name


@pytest.mark.ranks(2)
def test_halves_have_the_scales_of_whole_rows() -> None:
    """Of input and weight for 2 products cut along the sum; of weight and gradient for 3 others."""
    local, _ = parallel_model(mesh(tp=2), **FLOAT8)
    (model,) = local.stages
    tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    with CommDebugMode() as communication:
        model(tokens, tokens).backward()
    count = communication.get_comm_counts()[torch.ops.c10d_functional.all_reduce]
    gradients_of_norms = 2 * TINY.n_layers + 1
    assert count == 10 * TINY.n_layers + gradients_of_norms
