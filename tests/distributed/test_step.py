"""The step on several ranks against a loop in plain PyTorch on one.

Each pair of a mesh, a schedule and an option that may disturb each other is here once, on as few
ranks as it takes; `tests/campaigns/random_configs.py` and `meshwright prove --every-mesh` run their
products.
"""

import dataclasses
import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Collection

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group
from torch.distributed.fsdp import CPUOffloadPolicy

from meshwright.models.families.llama import LlamaArgs
from meshwright.models.layers import FeedForward
from meshwright.models.loss import IGNORE, Batch
from meshwright.parallelisms.rules import stages
from meshwright.parallelisms.rules.degrees import ParallelDims
from tests.helpers.fsdp import groups_of
from tests.helpers.job import (
    DEEP,
    GLOBAL_BATCH,
    PP,
    SCHEDULES,
    Job,
    frozen,
    global_batch,
    mesh,
    plain_steps,
)
from tests.helpers.operators import Operators
from tests.helpers.rounding import FIGURES_BOUND, adamw, assert_updated_alike
from tests.helpers.slow import slow
from tests.helpers.tiny import SEQ_LEN, TIED, TINY, parallel_model, plain_model, whole

STEPS = 2
SHAPE = GLOBAL_BATCH, SEQ_LEN


@functools.cache
def reference(
    args: LlamaArgs,
    frozen: Collection[str] = frozenset(),
    max_norm: float = 0.5,
    shape: tuple[int, int] = SHAPE,
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """(loss, gradient norm) of each step, and the weights after the last."""
    model = plain_model(args)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    steps = range(1, STEPS + 1)
    figures = plain_steps(model, adamw(model), steps, max_norm, lambda n: global_batch(n, *shape))
    return figures, {name: parameter.detach() for name, parameter in model.named_parameters()}


@functools.cache
def reference_group_norms(
    args: LlamaArgs, frozen: Collection[str], shape: tuple[int, int]
) -> dict[str, float]:
    """Norm of the first step's gradients in each layer and beside the layers."""
    model = plain_model(args)
    tokens, labels = global_batch(1, *shape)
    F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORE).backward()
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        group = name[: len("layers.0")] if name.startswith("layers.") else name.split(".")[0]
        size = 0.0 if name in frozen else parameter.grad.double().square().sum().item()
        squares[group] = squares.get(group, 0.0) + size
    return {group: size**0.5 for group, size in squares.items()}


def steps_on_mesh(
    dims: ParallelDims,
    num_microbatches: int,
    options: dict,
    args: LlamaArgs = TINY,
    reduce_every_microbatch: bool = False,
    is_early: bool = False,
    shape: tuple[int, int] = SHAPE,
) -> None:
    max_norm, frozen = float("inf") if is_early else 0.5, options.get("frozen", frozenset())
    want_figures, want_weights = reference(args, frozen, max_norm, shape)
    want_norms = reference_group_norms(args, frozen, shape)
    sizes = {"args": args, "num_sequences": shape[0]}
    job = Job(dims, 0, num_microbatches, is_early, **sizes, **options)
    for step, want in enumerate(want_figures, 1):
        result = job.take_step(
            step,
            job.part(Batch(*global_batch(step, *shape))),
            max_norm=max_norm,
            reduce_every_microbatch=reduce_every_microbatch,
            norm_groups=() if is_early else list(want_norms),
        )
        if step == 1 and result.group_norms is not None:
            got_norms = dict(zip(want_norms, result.group_norms.tolist(), strict=True))
            # a small group has a larger part of the rounding than the whole
            assert got_norms == pytest.approx(want_norms, rel=10 * FIGURES_BOUND, abs=1e-7)
        got = (result.loss.item(), result.grad_norm.item())
        assert got == pytest.approx(want, rel=FIGURES_BOUND), f"step {step}: {got}, not {want}"
    if options.get("enable_cpu_offload"):
        for group in groups_of(job.model):
            assert group.offload_policy == CPUOffloadPolicy(pin_memory=False), group
    initial = dict(plain_model(args).named_parameters())
    for name, parameter in job.model.named_parameters():
        weights = whole(parameter), want_weights[name], initial[name]
        if parameter.requires_grad:
            assert_updated_alike(*weights, name, args=args, num_steps=STEPS)
        else:
            assert torch.equal(weights[0], weights[2]), name
    assert job.detector.bad_steps() == []


AXES = {"dp_replicate", "dp_shard", "cp", "tp", "pp"}


def case(
    num_microbatches: int = 0,
    args: LlamaArgs | None = None,
    every: bool = False,
    early: bool = False,
    shape: tuple[int, int] = SHAPE,
    **others: object,
) -> tuple:
    """Arguments of `steps_on_mesh`: degrees above 1, and options of `parallel_model`."""
    dims = mesh(**{axis: others.pop(axis) for axis in AXES & others.keys()})
    if dims.pp > 1:
        return dims, num_microbatches or 4, others, args or DEEP, every, early, shape
    return dims, num_microbatches or 2, others, args or TINY, every, early, shape


BY_OP = {"ac_mode": "selective", "selective_ac_option": "op"}
EVERY_OTHER = {"ac_mode": "selective", "selective_ac_option": "2"}
ONE, ZBV, INTERLEAVED = (
    {"pp": 2} | SCHEDULES[name] for name in ("1F1B", "ZBVZeroBubble", "Interleaved1F1B")
)
OFFLOAD = {"enable_cpu_offload": True}
LAYERS_8 = dataclasses.replace(DEEP, n_layers=8)
# by 3, 32 rows and 131 leave shards of 11, 11, 10 and 44, 44, 43; five layers stages of 2, 2, 1
BY_3 = dataclasses.replace(DEEP, n_heads=6, n_kv_heads=3, head_dim=10)
BEGIN = frozen("tok_embeddings.*", "layers.0.*")
SCATTERED = frozen("*norm.weight", "*.wq.weight")
END = frozen("layers.2.*", "norm.weight", "output.weight")
ALL_BUT_OUTPUT = frozen("tok_embeddings.*", "layers.*", "norm.weight")
# the first of two stages and a part of the second, or the first three of four
STAGES = frozen("tok_embeddings.*", "layers.[012].*", "layers.3.attention.wq.*", args=DEEP)
LAST_STAGE = frozen("layers.[34].*", "norm.*", "output.*", args=DEEP)
CASES = {
    "4 microbatches": case(4),
    "fsdp, 1 microbatch": case(1, dp_shard=2),
    "fsdp, 4 microbatches": case(4, dp_shard=2),
    "copies": case(dp_replicate=2),
    "tp": case(1, tp=2),
    "fsdp-tp": case(dp_shard=2, tp=2),
    "cp": case(cp=2),
    "cp-fsdp": case(cp=2, dp_shard=2),
    "cp-copies": case(cp=2, dp_replicate=2),
    "cp4": case(cp=4),
    "cp-tp": case(cp=2, tp=2),
    "recomputed": case(dp_shard=2, tp=2, ac_mode="full"),
    "recomputed by op": case(dp_shard=2, tp=2, **BY_OP),
    "never resharded": case(dp_shard=2, reshard_after_forward="never"),
    "chunks of the loss": case(dp_shard=2, tp=2, loss_chunk_tokens=5),
    "gathered ahead, recomputed": case(dp_shard=2, prefetch_layers=9, ac_mode="full"),
    "every microbatch reduced": case(dp_shard=2, every=True),
    "every microbatch reduced, copies": case(dp_replicate=2, every=True),
    "tied-fsdp": case(dp_shard=2, args=TIED),
    **{  # parts of an odd vocabulary
        f"{name}-tp, chunks of {tokens}": case(1, args, tp=2, loss_chunk_tokens=tokens)
        for name, args in {"untied": TINY, "tied": TIED}.items()
        for tokens in (0, 5, 1000)
    },
    **{name: case(pp=2, **options) for name, options in SCHEDULES.items()},
    "pp-cp": case(2, cp=2, **ONE),
    "pp-fsdp": case(dp_shard=2, **INTERLEAVED),
    "pp-tp": case(tp=2, **ZBV),
    "pp, recomputed": case(ac_mode="full", **ONE),
    "pp, every other block recomputed": case(pp=2, **EVERY_OTHER, **SCHEDULES["DualPipeV"]),
    "pp-fsdp, always resharded": case(dp_shard=2, reshard_after_forward="always", **ONE),
    "frozen begin": case(dp_shard=2, **BEGIN),
    "frozen here and there": case(dp_shard=2, **SCATTERED),
    "frozen but for the output": case(dp_shard=2, **ALL_BUT_OUTPUT),
    "frozen end, tp": case(tp=2, **END),
    "frozen stages, Interleaved1F1B": case(**INTERLEAVED, **STAGES),
    "frozen stages, ZBVZeroBubble": case(**ZBV, **STAGES),
    "frozen last stage, 1F1B": case(**ONE, **LAST_STAGE),
    "frozen last stage, ZBVZeroBubble": case(**ZBV, **LAST_STAGE),
    "early, tied": case(early=True, args=TIED),
    "early, fsdp": case(early=True, dp_shard=2),
    "early, ZBVZeroBubble": case(early=True, **ZBV),
    "offloaded": case(**OFFLOAD),
    "offloaded, fsdp": case(dp_shard=2, **OFFLOAD),
    "offloaded, pp": case(2, pp=2, **OFFLOAD),
}
SLOW_CASES = {
    **{f"{axis} 3": case(1, BY_3, shape=(6, 12), **{axis: 3}) for axis in sorted(AXES - {"pp"})},
    "pp 3": case(3, BY_3, shape=(6, SEQ_LEN), pp=3),  # its stages are made for one length
    "hsdp": case(dp_replicate=2, dp_shard=2),
    "copies-tp": case(1, dp_replicate=2, tp=2),
    "every microbatch reduced, tp": case(dp_shard=2, tp=2, every=True),
    "pp-copies": case(2, dp_replicate=2, **ONE),
    "pp-tp, Interleaved1F1B": case(tp=2, **INTERLEAVED),
    "pp-fsdp, ZBVZeroBubble": case(dp_shard=2, **ZBV),
    "pp-tp, recomputed": case(tp=2, ac_mode="full", **ZBV),
    "pp-tp, chunks of the loss": case(tp=2, loss_chunk_tokens=5, **ONE),
    "frozen begin, tp": case(tp=2, **BEGIN),
    "frozen here and there, tp": case(dp_shard=2, tp=2, **SCATTERED),
    "frozen stages, tp": case(tp=2, **ONE, **STAGES),
    "frozen stages, ZBVZeroBubble, fsdp": case(dp_shard=2, **ZBV, **STAGES),
    "early, frozen": case(early=True, dp_shard=2, **frozen("*.wq.*")),
    "early, copies": case(early=True, dp_replicate=2),
    "early, fsdp-tp": case(early=True, dp_shard=2, tp=2),
    "offloaded, fsdp-tp": case(dp_shard=2, tp=2, **OFFLOAD),
    "offloaded, ZBVZeroBubble": case(dp_shard=2, **ZBV, **OFFLOAD),
    **{
        f"{name}, fsdp, {policy}": case(
            pp=2, dp_shard=2, reshard_after_forward=policy, **SCHEDULES[name]
        )
        for name, policy in itertools.product(SCHEDULES, ("always", "never"))
        # refused by check_schedule: torch loses gradients
        if not (stages.SCHEDULES[name].splits_backward and policy == "always")
    },
    # with more than three stages on a rank, torch itself frees a stage between its two passes
    **{
        f"{name}, 4 stages a rank": case(
            pp=2, dp_shard=2, args=LAYERS_8, schedule=name, stages_per_rank=4
        )
        for name in ("Interleaved1F1B", "InterleavedZeroBubble")
    },
}


@pytest.mark.parametrize("name", [*CASES, *slow(*SLOW_CASES)])
def test_loss_norms_and_weights_equal_plain_pytorch(on_ranks, name) -> None:
    dims, *others = (CASES | SLOW_CASES)[name]
    on_ranks(dims.num_ranks, steps_on_mesh, dims, *others)


@pytest.mark.ranks(2)
def test_backward_stays_split_where_a_weight_has_one_place_in_the_graph() -> None:
    """Else a stage computes gradients of weights at once, and has nothing to fill waits with."""
    for mtp_depth, is_tied, want in ((0, 1, []), (1, 0, []), (2, 0, [3]), (1, 1, [3])):
        args = dataclasses.replace(DEEP, mtp_depth=mtp_depth, tie_embeddings=bool(is_tied))
        job = Job(PP, num_microbatches=4, args=args, **SCHEDULES["InterleavedZeroBubble"])
        tokens, labels = global_batch(1)
        further = [x.unsqueeze(1).expand(-1, mtp_depth, -1) for x in (tokens, labels)]
        future = dict(zip(("future_tokens", "future_labels"), further, strict=True))
        job.take_step(1, job.part(Batch(tokens, labels, **future if mtp_depth else {})))
        own = job.model.pipeline.schedule._stages
        found = [stage.stage_index for stage in own if stage.dw_builder is not None]
        assert found == (want if dist.get_rank() == 1 else []), (mtp_depth, is_tied)
        assert args.table.uses_copy_again == bool(want)  # the plan asks that


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble"])
@pytest.mark.ranks(2)
def test_a_part_of_the_user_may_have_a_weight_in_two_places(name) -> None:
    """Torch stops there: "Trying to backward through the graph a second time"."""

    def twice(self: FeedForward, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return x

    args = dataclasses.replace(DEEP, n_layers=6)  # no other test has the reference
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeedForward, "forward", twice)
        steps_on_mesh(PP, 4, SCHEDULES[name], args)


@pytest.mark.ranks(2)
def test_an_early_step_leaves_no_gradient_in_memory() -> None:
    job, found = Job(mesh(dp_shard=2), is_early=True), []
    job.optimizer.register_step_pre_hook(
        lambda *_: found.append(sum(p.grad is not None for p in job.model.parameters()))
    )
    job.take_step()
    assert found == [1] * len(list(job.model.parameters()))


@pytest.mark.ranks(2)
def test_async_tensor_parallelism_is_left_to_inductor() -> None:
    """It takes a GPU to see what that makes of it."""
    dims = mesh(tp=2)
    with torch._inductor.config.patch(_micro_pipeline_tp=False):
        _, meshes = parallel_model(dims)
        group = meshes.tp.get_group().group_name
        assert not torch._inductor.config._micro_pipeline_tp
        assert not is_symm_mem_enabled_for_group(group)
        with warnings.catch_warnings(action="error"):
            _, meshes = parallel_model(dims, enable_async_tensor_parallel=True)
        group = meshes.tp.get_group().group_name
        assert torch._inductor.config._micro_pipeline_tp
        if torch.__version__ < (2, 14):  # by 2.15 memory is symmetric unasked, and on GPUs alone
            assert is_symm_mem_enabled_for_group(group)


FP32_MODULES = ("layers.0", "layers.1.attention", "layers.1.ffn_norm", "layers.2.attention.core")
FP32_MODULES += ("layers.2.feed_forward.w2", "norm", "output")


def mixed_reference(args: LlamaArgs, fp32_modules: tuple[str, ...]) -> tuple[float, float]:
    """Loss and gradient norm of a step in bf16 but for `fp32_modules`, in plain PyTorch."""
    model = plain_model(args)
    inside = tuple(f"{name}." for name in fp32_modules)
    for name in fp32_modules:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(
            lambda m, inputs: tuple(x if x is None else x.float() for x in inputs)
        )
        if name != "output":
            module.register_forward_hook(lambda m, inputs, output: output.bfloat16())
    weights = {
        name: weight if name.startswith(inside) else weight.bfloat16()
        for name, weight in model.named_parameters()
    }
    tokens, labels = global_batch(1)
    logits = torch.func.functional_call(model, weights, (tokens,))
    assert logits.dtype == (torch.float32 if "output" in fp32_modules else torch.bfloat16)
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    loss.backward()
    norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters())
    return loss.item(), norm.item()


def _assert_dtype(name: str, dtype: torch.dtype, module: torch.nn.Module, inputs: tuple) -> None:
    assert inputs[0].dtype == dtype, name
    if dist.get_world_size() > 1:  # one rank casts its weights as it uses them
        assert module.weight.dtype == dtype, name


def _step_with_fp32_modules(
    dims: ParallelDims, num_microbatches: int, options: dict, args: LlamaArgs, *_: bool
) -> None:
    # the others multiply by parts of a matrix or of the keys, which bf16 shows
    tolerance = 1e-5 if dims.tp == dims.cp == 1 else 1e-4
    fp32_modules = options.setdefault("fp32_modules", FP32_MODULES)
    job = Job(dims, 0, num_microbatches, args=args, param_dtype=torch.bfloat16, **options)
    inside = tuple(f"{name}." for name in fp32_modules)
    for name, module in job.model.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.RMSNorm):
            dtype = torch.float32 if f"{name}.".startswith(inside) else torch.bfloat16
            module.register_forward_pre_hook(functools.partial(_assert_dtype, name, dtype))
    result = job.take_step(max_norm=0.5)
    got, want = (result.loss.item(), result.grad_norm.item()), mixed_reference(args, fp32_modules)
    assert got[0] == pytest.approx(want[0], rel=tolerance)
    assert got[1] == pytest.approx(want[1], rel=100 * tolerance)


WITH_FP32_MODULES = {
    "one": case(),
    "none": case(dp_shard=2, fp32_modules=()),
    "fsdp": case(dp_shard=2),
    "cp": case(cp=2),
    "fsdp-tp": case(dp_shard=2, tp=2),
    "pp": case(2, args=TINY, pp=2),
    "Interleaved1F1B": case(**INTERLEAVED),
    "ZBVZeroBubble": case(**ZBV),
    "recomputed": case(dp_shard=2, ac_mode="full"),
    "always resharded": case(dp_shard=2, reshard_after_forward="always"),
    "offloaded": case(dp_shard=2, **OFFLOAD),
}


@pytest.mark.parametrize("name", WITH_FP32_MODULES)
def test_fp32_modules_in_a_bf16_model(on_ranks, name) -> None:
    dims, *others = WITH_FP32_MODULES[name]
    on_ranks(dims.num_ranks, _step_with_fp32_modules, dims, *others)


@pytest.mark.ranks(2)
def test_gradients_of_fp32_modules_are_summed_over_tp_in_fp32() -> None:
    dtypes: list[torch.dtype] = []

    def note(name: str, types: object, args: tuple, made: object) -> None:
        if ".reduce_scatter" in name:
            dtypes.append(args[0].dtype)

    for modules in ((), ("output",), ("output", "layers.1.feed_forward")):
        model, _ = parallel_model(mesh(tp=2), param_dtype=torch.bfloat16, fp32_modules=modules)
        loss = model.stages[0](*global_batch(1))
        dtypes.clear()
        with Operators(note):
            loss.backward()
        assert dtypes.count(torch.float32) == len(modules)


FEW = ("layers.0", "layers.1.ffn_norm", "output")


@pytest.mark.parametrize(
    ("dims", "fp32_modules"),
    [*itertools.product([mesh(), mesh(dp_shard=2, tp=2)], [(), FEW]), (mesh(pp=2), ())],
    ids=str,
)
@pytest.mark.ranks("dims")
def test_bf16_master_weights_train_within_their_rounding(dims, fp32_modules) -> None:
    """But for modules in fp32, which keep weights and optimizer state in it."""
    bf16 = torch.bfloat16
    job = Job(dims, 0, 2, param_dtype=bf16, master_dtype=bf16, fp32_modules=fp32_modules)
    for step, want in enumerate(reference(TINY)[0], 1):
        result = job.take_step(step, max_norm=0.5)
        # the 8 bits of a weight after an update of half its size
        assert result.loss.item() == pytest.approx(want[0], rel=5e-3), f"step {step}"
        assert result.grad_norm.item() == pytest.approx(want[1], rel=5e-2), f"step {step}"
    assert result.grad_norm.dtype == result.loss.dtype == torch.float32
    for name, parameter in job.model.named_parameters():
        is_kept = name.startswith(tuple(f"{module}." for module in fp32_modules))
        state = job.optimizer.state[parameter]
        moments = {tensor.dtype for tensor in state.values() if tensor.dim()}
        assert moments | {parameter.dtype} == {torch.float32 if is_kept else bf16}, name
        assert state["step"].dtype == torch.float32
    for stage in job.model.stages:
        assert {buffer.dtype for buffer in stage.buffers()} == {torch.float32}


def _collectives(dims: ParallelDims, of_step: dict[str, bool], options: dict) -> Counter[str]:
    """Those of a step with four microbatches; FSDP2 waits in backward for the last one alone."""
    job, said = Job(dims, fsdp_cpu_backend="gloo", **options), list[bool]()
    root = job.model.stages[0]
    set_is_last = root.set_is_last_backward
    root.set_is_last_backward = lambda is_last: said.append(is_last) or set_is_last(is_last)
    with Operators() as counter:
        job.take_step(1, job.batches(1) * 4, max_norm=0.5, **of_step)
    assert said == [False, False, False, True]
    assert all(group.is_sharded for group in groups_of(job.model))
    return counter.counts


GROUPS = 2 + TINY.n_layers  # embedding, blocks, output
NEVER = {"reshard_after_forward": "never"}


@pytest.mark.parametrize(("replicate", "every"), [(1, False), (1, True), (2, False), (2, True)])
def test_how_often_gradients_are_reduced(on_ranks, replicate, every) -> None:
    dims = mesh(dp_replicate=replicate, dp_shard=2)
    for counts in on_ranks(dims.dp, _collectives, dims, {"reduce_every_microbatch": every}, {}):
        assert counts["c10d._reduce_scatter_base_"] == GROUPS * (4 if every else 1)
        # the number of labels, and the loss with the norm; and copies add up gradients once a step
        assert counts["c10d.allreduce_"] == 2 + (GROUPS if replicate > 1 else 0)


@pytest.mark.parametrize(
    ("options", "gathers"),
    [
        # every group for every forward; for every backward all but the embedding, whose gradient
        # needs no weight, and the last block and the output, which are still there
        ({}, 4 * (GROUPS + GROUPS - 3)),
        ({"prefetch_layers": 2}, 4 * (5 + 2)),
        ({"reshard_after_forward": "always"}, 4 * (5 + 4)),
        (frozen("tok_embeddings.*"), 4 * (5 + 2)),
        (NEVER, 5),
        (NEVER | {"prefetch_layers": 2}, 5),
    ],
    ids=["", "ahead", "always", "frozen", "never", "never, ahead"],
)
def test_how_often_parameters_are_gathered(on_ranks, options, gathers) -> None:
    of_step = {"reshard_every_microbatch": not NEVER.items() <= options.items()}
    for counts in on_ranks(2, _collectives, mesh(dp_shard=2), of_step, options):
        assert counts["c10d._allgather_base_"] == gathers


def _gathered_when_blocks_compute(args: LlamaArgs, ahead: int) -> tuple[list[int], list[int]]:
    """All-gathers issued when each block begins forward, and those of backward at its backward."""
    model, _ = parallel_model(
        mesh(dp_shard=2),
        args,
        prefetch_layers=ahead,
        reshard_after_forward="always",
        fsdp_cpu_backend="gloo",
    )
    forward: list[int] = []
    backward: list[int] = []
    tokens, _ = global_batch(1)
    with Operators() as counter:
        gathers = functools.partial(counter.counts.__getitem__, "c10d._allgather_base_")
        for block in model.layers.values():
            # hooks on its first and its last product: hooks on the block could come before FSDP's
            block.attention.wq.register_forward_pre_hook(lambda m, i: forward.append(gathers()))
            block.feed_forward.w2.register_full_backward_pre_hook(
                lambda m, g: backward.append(gathers())
            )
        loss = model.stages[0](tokens).sum()
        before = gathers()
        loss.backward()
    return forward, [count - before for count in backward]


@pytest.mark.parametrize("args", [TINY, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_layers_are_gathered_ahead(on_ranks, ahead, args) -> None:
    # in forward the embedding comes before the blocks; in backward the output, which is still there
    # if it is the embedding. FSDP2's own prefetching waits in forward for the next module, which a
    # GPU's queue makes one ahead
    early, untied = ahead if ahead > 1 else 0, not args.tie_embeddings
    forward = [min(2 + block + early, 6 + untied) for block in range(5)]
    backward = [min(1 + untied + block + ahead, 5 + untied) for block in range(5)]
    args = dataclasses.replace(args, n_layers=5)
    for seen in on_ranks(2, _gathered_when_blocks_compute, args, ahead):
        assert seen == (forward, backward)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch sends gradients to every stage")
@pytest.mark.parametrize(
    ("options", "num_sent"), [({}, 4), (frozen("tok_embeddings.*", "layers.[01].*"), 0)]
)
@pytest.mark.ranks(2)
def test_frozen_stages_are_sent_no_gradients(options, num_sent) -> None:
    """By the second stage of two, in a step with four microbatches."""
    job = Job(mesh(pp=2), 0, 4, **options)
    for step in (1, 2):  # the first is preceded by messages about what there is to send
        with Operators() as counter:
            job.take_step(step, max_norm=0.5)
    assert job.meshes.pp.get_local_rank() == 0 or counter.counts["c10d.send"] == num_sent


@pytest.mark.ranks(2)
def test_a_non_finite_loss_stops_early_updates_and_is_traced_to_its_rank() -> None:
    """Rank 1 meets a label whose loss is infinite at step 2; then all is well again.

    It happens to make every gradient non-finite; what is kept else is not promised.
    """
    job = Job(mesh(dp_shard=2), is_early=True)
    root, detector, weights = job.model.stages[0], job.detector, []
    for step in (1, 2, 3):
        if step == 2 and dist.get_rank() == 1:
            root.register_forward_hook(lambda m, i, logits: logits * float("inf"))
        job.take_step(step, max_norm=float("inf"))
        root._forward_hooks.clear()
        weights.append([*job.weights().values()])
    for after_1, after_2, after_3 in zip(*weights, strict=True):
        assert torch.equal(after_1, after_2)
        assert torch.equal(after_1, after_3)
    bad_steps = [(bad.step, bad.is_finite_here) for bad in detector.bad_steps()]
    assert bad_steps == [(2, dist.get_rank() == 0)]
