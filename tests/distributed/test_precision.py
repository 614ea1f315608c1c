"""One rank in bf16 without FSDP2 has the same numbers as with it; the type in which microbatches
are added up."""

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial

from meshwright.commands.prove.reductions import narrower, watch_reductions
from meshwright.config.parallelism import Parallelism
from meshwright.config.training import Training
from meshwright.models.decoder import Decoder
from meshwright.models.loss import Batch, has_loss
from meshwright.parallelisms.data_parallel import accumulate_in_reduce_dtype, apply_fsdp, compute_in
from meshwright.parallelisms.initialize import initialize
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.rules.degrees import ParallelDims
from tests.helpers.fsdp import groups_of
from tests.helpers.job import GLOBAL_BATCH, Job, global_batch, mesh
from tests.helpers.tiny import MIXED, SEQ_LEN, TIED, TINY, parallel_model, plain_model, whole


def _gradients(model: Decoder, batches: list[Batch]) -> dict[str, torch.Tensor]:
    """Added up over the microbatches."""
    for index, batch in enumerate(batches):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(index == len(batches) - 1)
        model(batch.tokens, batch.labels).backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def _with_fsdp(meshes: Meshes, tie: bool, fp32_modules: tuple[str, ...]) -> Decoder:
    with torch.device("meta"):
        model = Decoder(TIED if tie else TINY, SEQ_LEN)
    apply_fsdp(
        model,
        meshes,
        Training(mixed_precision_param="bfloat16"),
        Parallelism(),
        fp32_modules,
    )
    model.to_empty(device="cpu")
    initialize(model, 0)
    return model


@pytest.mark.parametrize(
    ("tie", "fp32_modules", "ac_mode", "compile_backend"),
    [
        (False, (), "none", None),
        (True, (), "full", None),
        (False, ("tok_embeddings", "layers.0.attention_norm", "output"), "none", None),
        (False, ("layers.1", "norm"), "selective", "eager"),
        (True, (), "none", "eager"),
    ],
)
@pytest.mark.ranks(1)
def test_one_rank_computes_in_bf16_as_fsdp_does(
    tie, fp32_modules, ac_mode, compile_backend
) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(TINY.vocab_size, (4, 2, SEQ_LEN + 1), generator=generator)
    batches = [Batch(part[:, :-1], part[:, 1:], None) for part in tokens]
    local, meshes = parallel_model(
        ParallelDims(dp_replicate=1, dp_shard=1),
        TIED if tie else TINY,
        param_dtype=torch.bfloat16,
        fp32_modules=fp32_modules,
        ac_mode=ac_mode,
        **({"compile_backend": compile_backend} if compile_backend else {}),
    )
    (model,) = local.stages
    assert not isinstance(model, FSDPModule)
    own = _gradients(model, batches)
    expected = _gradients(_with_fsdp(meshes, tie, fp32_modules), batches)
    assert own.keys() == expected.keys()
    for name, gradient in own.items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.ranks(1)
def test_gradients_of_weights_alone_are_added_up_in_fp32() -> None:
    """As a schedule leaves them that computes gradients of weights one after the other, without
    those of inputs between, in which FSDP2 would add them up itself. In bf16, 256 + 1 is 256."""
    # not offloaded, one rank would do without FSDP2
    model, _ = parallel_model(mesh(), param_dtype=torch.bfloat16, enable_cpu_offload=True)
    stage, sums = model.stages[0], set[float]()
    modules = [module for module in stage.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.unshard()
    for value in (256.0, 1.0, 1.0):
        for parameter in stage.parameters():
            (grad,) = torch.autograd.grad(value * parameter.sum(), get_gradient_edge(parameter))
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        accumulate_in_reduce_dtype(stage)
    for parameter in (parameter for group in groups_of(model) for parameter in group.fsdp_params):
        sums |= {*parameter.unsharded_accumulated_grad.flatten().tolist()}
    assert sums == {258.0}


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("args", [TINY, TIED, MIXED], ids=["llama", "tied", "experts"])
@pytest.mark.parametrize(
    ("degrees", "backend"),
    [
        ({"tp": 2}, "auto"),
        ({"dp_shard": 2}, "auto"),
        ({"dp_shard": 2}, "gloo"),
        ({"dp_replicate": 2}, "auto"),
        ({"cp": 2}, "auto"),
    ],
)
@pytest.mark.ranks(2)
def test_gradients_are_summed_over_ranks_in_the_type_to_reduce_in(
    degrees, backend, args, reduce_dtype
) -> None:
    """Also those of norms and routers, which tensor parallelism replicates."""
    local, _ = parallel_model(
        mesh(**degrees),
        args,
        param_dtype=torch.bfloat16,
        reduce_dtype=reduce_dtype,
        fsdp_cpu_backend=backend,
    )
    seen = watch_reductions(local.stages)
    tokens = torch.randint(args.vocab_size, (2, SEQ_LEN))
    local.stages[0](tokens, tokens).backward()
    assert {*seen.values()} == {reduce_dtype}
    assert bool(narrower(seen, torch.float32)) == (reduce_dtype == torch.bfloat16)
    if "tp" in degrees:
        replicated = {name for name, one in args.table.parameters.items() if one.role == "norm"}
        routers = {name for name in args.table.parameters if name.endswith("router.weight")}
        assert seen.keys() >= replicated | routers


@pytest.mark.ranks(2)
def test_a_sum_over_tp_is_rounded_once() -> None:
    """In bf16, 256 + 1 is 256: so a rank's 256 and the other's 1, of a norm."""
    local, meshes = parallel_model(mesh(tp=2), param_dtype=torch.bfloat16)
    (model,) = local.stages
    tokens = torch.randint(TINY.vocab_size, (2, SEQ_LEN))
    model(tokens, tokens)  # FSDP2 gathers, and has unsharded parameters from here on
    value = 256.0 if meshes.tp.get_local_rank() == 0 else 1.0
    (group,) = (group for group in groups_of(local) if group._module_fqn == "layers.1")
    group.unshard()
    group.wait_for_unshard()
    for parameter in group.fsdp_params:
        whole_parameter = parameter.unsharded_param
        placements = [
            Partial() if one.is_replicate() else one for one in whole_parameter.placements
        ]
        # the type in which autograd adds up: up to torch 2.14 bf16, as the parameter has
        dtype = whole_parameter.grad_dtype
        part = torch.full_like(whole_parameter.to_local(), value, dtype=dtype)
        whole_parameter.grad = DTensor.from_local(part, whole_parameter.device_mesh, placements)
    group.post_backward()
    group.finalize_backward()
    norm = model.get_parameter("layers.1.ffn_norm.weight")
    assert {*whole(norm.grad).tolist()} == {257.0}


@pytest.mark.ranks(2)
def test_replicas_of_bf16_weights_add_up_microbatches_in_fp32() -> None:
    """Each microbatch is reduced; FSDP2 adds up before the replicas exchange their sums."""
    types = {"param_dtype": torch.bfloat16, "master_dtype": torch.bfloat16}
    local, _ = parallel_model(mesh(dp_replicate=2), **types)
    (model,) = local.stages
    assert isinstance(model, FSDPModule)
    model.set_requires_all_reduce(False)
    model.set_is_last_backward(False)
    tokens = torch.randint(TINY.vocab_size, (2, SEQ_LEN))
    model(tokens, tokens).backward()
    assert {group._partial_reduce_output.dtype for group in groups_of(local)} == {torch.float32}
    model.set_requires_all_reduce(True)
    model.set_is_last_backward(True)
    model(tokens, tokens).backward()


OF_DENSE = ("tok_embeddings", "layers.0", "layers.1.ffn_norm", "layers.2.feed_forward.w2", "output")
OF_EXPERTS = ("layers.1.feed_forward.router", "layers.2", "norm")
UNIT = 2.0**-24
"""Unit roundoff of fp32: the largest relative error of one rounding."""


@pytest.mark.parametrize("modules", [OF_DENSE, OF_EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize(
    ("dims", "num_microbatches", "every"),
    [
        (mesh(), 4, False),
        (mesh(dp_shard=2), 2, True),
        (mesh(dp_replicate=2), 4, False),
        (mesh(dp_replicate=2), 4, True),
    ],
    ids=str,
)
@pytest.mark.ranks("dims")
def test_gradients_of_fp32_modules_beside_bf16_weights_are_summed_in_fp32(
    dims, num_microbatches, every, modules
) -> None:
    """The n summands are those of a model on one process, which gets one microbatch of one rank at
    a time. Their sum in fp64 differs by less than n roundings of them; in bf16, by 2^16 times as
    much."""
    args, inside = MIXED if modules is OF_EXPERTS else TINY, tuple(f"{one}." for one in modules)
    types = {"param_dtype": torch.bfloat16, "master_dtype": torch.bfloat16}
    job = Job(dims, 0, num_microbatches, args=args, fp32_modules=modules, **types)
    gradients = job.whole_gradients()
    job.take_step(max_norm=torch.inf, reduce_every_microbatch=every)

    model = plain_model(args)
    for name, parameter in model.named_parameters():
        if not name.startswith(inside):
            parameter.data = parameter.data.bfloat16()
    compute_in(model, "bfloat16", modules)
    kept = {name: p for name, p in model.named_parameters() if name.startswith(inside)}
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in kept.items()}
    sizes = {name: torch.zeros_like(total) for name, total in sums.items()}
    tokens, labels = global_batch(1)
    num_labels, num_summands = has_loss(labels).sum(), num_microbatches * dims.dp
    for index in torch.arange(GLOBAL_BATCH).chunk(num_summands):
        model.zero_grad()
        (model(tokens[index], labels[index]) / num_labels).backward()
        for name, parameter in kept.items():
            assert parameter.grad is not None
            sums[name] += parameter.grad
            sizes[name] += parameter.grad.abs()
    for name, total in sums.items():
        assert gradients[name].dtype == torch.float32
        error = (gradients[name] - total).abs()
        assert (error <= num_summands * UNIT * sizes[name]).all(), name
