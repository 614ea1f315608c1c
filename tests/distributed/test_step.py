"""The step on several ranks against a loop in plain PyTorch on one."""

import dataclasses
from collections import Counter
from collections.abc import Collection
from fnmatch import fnmatchcase

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.loss import IGNORE
from meshwright.models.llama import LlamaArgs
from meshwright.optim.early_step import EarlyStep
from meshwright.parallelisms.parallel_dims import ParallelDims
from meshwright.step import NEVER, Health, train_step
from tests.helpers.tiny import SEQ_LEN, TIED, TINY, parallel_llama, plain_llama, whole

STEPS, GLOBAL_BATCH = 3, 8


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels are missing very unevenly: a mean of the ranks' means would be far off."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(TINY.vocab_size, (GLOBAL_BATCH, SEQ_LEN), generator=generator)
    labels = torch.randint(TINY.vocab_size, (GLOBAL_BATCH, SEQ_LEN), generator=generator)
    labels[0] = IGNORE
    labels[1, 3:] = IGNORE
    labels[5, ::2] = IGNORE
    return tokens, labels


def adamw(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def reference(
    args: LlamaArgs, frozen: Collection[str] = (), max_norm: float = 0.5
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """(loss, gradient norm) of each step, and the weights after the last."""
    model = plain_llama(args)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    optimizer = adamw(model)
    figures = []
    for step in range(1, STEPS + 1):
        tokens, labels = global_batch(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        figures.append((loss.item(), norm.item()))
    return figures, dict(model.named_parameters())


def steps_on_mesh(
    dims: ParallelDims,
    num_microbatches: int,
    options: dict,
    args: LlamaArgs = TINY,
    is_early: bool = False,
) -> None:
    # inductor adds in another order, and three steps of Adam make more of it
    tolerance = 1e-5 if "compile_backend" in options else 2e-6
    max_norm = float("inf") if is_early else 0.5
    want_figures, want_weights = reference(args, options.get("frozen", ()), max_norm)
    size = GLOBAL_BATCH // (dims.dp * num_microbatches)
    model, meshes = parallel_llama(dims, args, microbatches=(num_microbatches, size), **options)
    optimizer, health = adamw(model), Health.on(torch.device("cpu"))
    early = EarlyStep(optimizer) if is_early else None
    rank = meshes.dp.get_local_rank()
    for step, want in enumerate(want_figures, 1):
        parts = [part.split(size)[rank :: dims.dp] for part in global_batch(step)]
        result = train_step(
            model,
            list(zip(*parts, strict=True)),
            optimizer,
            early,
            step=step,
            max_norm=max_norm,
            meshes=meshes,
            health=health,
        )
        got = (result.loss.item(), result.grad_norm.item())
        assert got == pytest.approx(want, rel=tolerance), f"step {step}: {got}, not {want}"
    for name, parameter in model.named_parameters():
        # Adam divides by the root of tiny numbers, which makes more of rounding; of 3 steps of 1e-2
        difference = (whole(parameter) - want_weights[name]).abs().max().item()
        assert difference <= (30 * tolerance if parameter.requires_grad else 0), name
    assert health.first_bad_step.item() == NEVER


@pytest.mark.parametrize(
    ("replicate", "shard", "tp", "num_microbatches"),
    [
        *[(1, 1, 1, 1), (1, 1, 1, 4), (1, 2, 1, 1), (1, 2, 1, 4), (2, 1, 1, 2), (1, 4, 1, 2)],
        *[(2, 2, 1, 1), (2, 2, 1, 2), (1, 1, 2, 1), (1, 2, 2, 1), (1, 2, 2, 2), (2, 1, 2, 2)],
    ],
)
def test_loss_norm_and_weights_equal_plain_pytorch(
    on_ranks, replicate, shard, tp, num_microbatches
) -> None:
    dims = ParallelDims(dp_replicate=replicate, dp_shard=shard, tp=tp)
    on_ranks(replicate * shard * tp, steps_on_mesh, dims, num_microbatches, {})


@pytest.mark.parametrize("tp", [1, 2], ids=["fsdp", "2d"])
@pytest.mark.parametrize(
    "options",
    [
        {"ac_mode": "full"},
        {"ac_mode": "selective", "selective_ac_option": "op"},
        {"ac_mode": "selective", "selective_ac_option": "2"},
        {"reshard_after_forward": "always"},
        {"reshard_after_forward": "never"},
        {"compile_backend": "inductor"},
        {"compile_backend": "inductor", "ac_mode": "selective"},
        {"compile_backend": "inductor", "ac_mode": "memory_budget"},
        {"compile_backend": "aot_eager", "ac_mode": "memory_budget"},
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_options_do_not_change_the_numbers(on_ranks, options, tp) -> None:
    dims = ParallelDims(dp_replicate=1, dp_shard=2, tp=tp)
    on_ranks(2 * tp, steps_on_mesh, dims, 2, options)


@pytest.mark.parametrize(
    ("replicate", "shard", "cp", "tp"),
    [(1, 1, 2, 1), (1, 2, 2, 1), (1, 1, 4, 1), (1, 1, 2, 2), (2, 1, 2, 1)],
)
def test_context_parallelism(on_ranks, replicate, shard, cp, tp) -> None:
    dims = ParallelDims(dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp)
    on_ranks(replicate * shard * cp * tp, steps_on_mesh, dims, 2, {})


@pytest.mark.parametrize("ac_mode", ["none", "full", "selective", "memory_budget"])
def test_context_parallelism_compiled(on_ranks, ac_mode) -> None:
    options = {"compile_backend": "inductor", "ac_mode": ac_mode}
    on_ranks(2, steps_on_mesh, ParallelDims(dp_replicate=1, dp_shard=1, cp=2), 2, options)


DEEP = dataclasses.replace(TINY, n_layers=5)  # uneven on four stages
SCHEDULES = {
    **{name: {"schedule": name} for name in ("GPipe", "1F1B")},
    **{
        name: {"schedule": name, "stages_per_rank": 2}
        for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    },
}


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
def test_pipeline(on_ranks, options) -> None:
    dims = ParallelDims(dp_replicate=1, dp_shard=1, pp=2)
    on_ranks(2, steps_on_mesh, dims, 4, options, DEEP)


@pytest.mark.parametrize(
    ("replicate", "shard", "cp", "tp"),
    [(1, 2, 1, 1), (2, 1, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)],
    ids=["fsdp", "replicate", "cp", "tp"],
)
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_pipeline_with(on_ranks, schedule, replicate, shard, cp, tp) -> None:
    dims = ParallelDims(dp_replicate=replicate, dp_shard=shard, pp=2, cp=cp, tp=tp)
    on_ranks(4, steps_on_mesh, dims, 2 if schedule == "1F1B" else 4, SCHEDULES[schedule], DEEP)


def frozen(*patterns: str, args: LlamaArgs = TINY) -> dict[str, frozenset[str]]:
    """As the trainer makes it of `model.frozen`."""
    names = args.parameter_names()
    return {"frozen": frozenset(n for n in names if any(fnmatchcase(n, p) for p in patterns))}


@pytest.mark.parametrize(
    ("shard", "tp", "num_microbatches"), [(1, 1, 2), (2, 1, 2), (2, 2, 2)], ids=["1", "fsdp", "2d"]
)
@pytest.mark.parametrize(
    "patterns",
    [
        ["tok_embeddings.*", "layers.0.*"],
        ["*norm.weight", "*.wq.weight"],
        ["layers.2.*", "norm.weight", "output.weight"],
    ],
    ids=["begin", "scattered", "end"],
)
def test_frozen(on_ranks, patterns, shard, tp, num_microbatches) -> None:
    dims = ParallelDims(dp_replicate=1, dp_shard=shard, tp=tp)
    on_ranks(shard * tp, steps_on_mesh, dims, num_microbatches, frozen(*patterns))


@pytest.mark.parametrize(("shard", "tp"), [(1, 1), (2, 1), (1, 2)], ids=["pp", "fsdp", "tp"])
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_frozen_stages(on_ranks, schedule, shard, tp) -> None:
    """The first of two stages and a part of the second, or the first three of four."""
    patterns = ["tok_embeddings.*", "layers.[012].*", "layers.3.attention.wq.*"]
    dims = ParallelDims(dp_replicate=1, dp_shard=shard, pp=2, tp=tp)
    options = SCHEDULES[schedule] | frozen(*patterns, args=DEEP)
    on_ranks(2 * shard * tp, steps_on_mesh, dims, 4, options, DEEP)


def test_a_frozen_last_stage(on_ranks) -> None:
    options = frozen("layers.[34].*", "norm.*", "output.*", args=DEEP)
    dims = ParallelDims(dp_replicate=1, dp_shard=1, pp=2)
    for schedule in ("1F1B", "ZBVZeroBubble"):
        on_ranks(2, steps_on_mesh, dims, 4, SCHEDULES[schedule] | options, DEEP)


EARLY = {
    "1": (ParallelDims(dp_replicate=1, dp_shard=1), {}, TINY),
    "tied": (ParallelDims(dp_replicate=1, dp_shard=1), {}, TIED),
    "fsdp": (ParallelDims(dp_replicate=1, dp_shard=2), {}, TINY),
    "frozen": (ParallelDims(dp_replicate=1, dp_shard=2), frozen("*.wq.*"), TINY),
    "hsdp": (ParallelDims(dp_replicate=2, dp_shard=2), {}, TINY),
    "2d": (ParallelDims(dp_replicate=1, dp_shard=2, tp=2), {}, TINY),
    "pp": (ParallelDims(dp_replicate=1, dp_shard=1, pp=2), SCHEDULES["1F1B"], DEEP),
    "pp-zbv": (ParallelDims(dp_replicate=1, dp_shard=1, pp=2), SCHEDULES["ZBVZeroBubble"], DEEP),
}


@pytest.mark.parametrize(("dims", "options", "args"), EARLY.values(), ids=EARLY)
def test_early_step_in_backward(on_ranks, dims, options, args) -> None:
    num_microbatches = 4 if dims.pp > 1 else 2
    on_ranks(
        dims.dp * dims.tp * dims.pp, steps_on_mesh, dims, num_microbatches, options, args, True
    )


def _most_gradients() -> int:
    """That an update found in memory, itself included."""
    model, meshes = parallel_llama(ParallelDims(dp_replicate=1, dp_shard=2))
    optimizer = adamw(model)
    early, found = EarlyStep(optimizer), []
    optimizer.register_step_pre_hook(
        lambda *_: found.append(sum(p.grad is not None for p in model.parameters()))
    )
    train_step(
        model,
        [tuple(part.chunk(2)[meshes.dp.get_local_rank()] for part in global_batch(1))],
        optimizer,
        early,
        step=1,
        max_norm=float("inf"),
        meshes=meshes,
        health=Health.on(torch.device("cpu")),
    )
    assert len(found) == len(list(model.parameters()))
    return max(found)


def test_an_early_step_leaves_no_gradient_in_memory(on_ranks) -> None:
    assert on_ranks(2, _most_gradients) == [1, 1]


@pytest.mark.parametrize("args", [TINY, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("loss_parallel", [True, False])
def test_output_and_loss_on_parts_of_an_odd_vocabulary(on_ranks, loss_parallel, args) -> None:
    assert args.vocab_size % 2
    dims = ParallelDims(dp_replicate=1, dp_shard=1, tp=2)
    on_ranks(2, steps_on_mesh, dims, 1, {"enable_loss_parallel": loss_parallel}, args)


def test_tied_embeddings_under_fsdp(on_ranks) -> None:
    on_ranks(2, steps_on_mesh, ParallelDims(dp_replicate=1, dp_shard=2), 2, {}, TIED)


def _bf16_loss() -> None:
    model, meshes = parallel_llama(
        ParallelDims(dp_replicate=1, dp_shard=2), param_dtype=torch.bfloat16
    )
    tokens, labels = (part.chunk(2)[meshes.dp.get_local_rank()] for part in global_batch(1))
    seen = []
    hook = model.layers["1"].attention.register_forward_pre_hook(
        lambda module, inputs: seen.extend(tensor.dtype for tensor in inputs)
    )
    assert model.stages[0](tokens).dtype == torch.bfloat16
    assert seen == [torch.bfloat16, torch.float32, torch.float32]  # x, cos, sin
    hook.remove()
    result = train_step(
        model,
        [(tokens, labels)],
        adamw(model),
        step=1,
        max_norm=0.5,
        meshes=meshes,
        health=Health.on(torch.device("cpu")),
    )
    assert result.loss.dtype == torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    want_loss, want_norm = reference(TINY)[0][0]
    assert result.loss.item() == pytest.approx(want_loss, rel=1e-3)
    assert result.grad_norm.item() == pytest.approx(want_norm, rel=1e-2)


def test_bf16_parameters_fp32_master_weights(on_ranks) -> None:
    on_ranks(2, _bf16_loss)


class NoSync(TorchDispatchMode):
    """Fails on what would make the host wait for a device: reading a tensor's value."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read"
        return func(*args, **(kwargs or {}))


def _step_without_sync(is_early: bool) -> None:
    model, meshes = parallel_llama(ParallelDims(dp_replicate=1, dp_shard=2))
    tokens, labels = (part.chunk(2)[meshes.dp.get_local_rank()] for part in global_batch(1))
    optimizer, health = adamw(model), Health.on(torch.device("cpu"))
    early = EarlyStep(optimizer) if is_early else None
    for step in (1, 2):
        with NoSync():
            train_step(
                model,
                [(tokens, labels)] * 2,
                optimizer,
                early,
                step=step,
                max_norm=float("inf") if is_early else 0.5,
                meshes=meshes,
                health=health,
            )


@pytest.mark.parametrize("is_early", [False, True], ids=["late", "early"])
def test_a_step_reads_no_value_from_the_device(on_ranks, is_early) -> None:
    on_ranks(2, _step_without_sync, is_early)


class CountCollectives(TorchDispatchMode):
    """How often each of c10d's operations was called."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _collectives() -> Counter[str]:
    """Those of a step with four microbatches."""
    model, meshes = parallel_llama(ParallelDims(dp_replicate=1, dp_shard=2))
    tokens, labels = (part.chunk(2)[meshes.dp.get_local_rank()] for part in global_batch(1))
    with CountCollectives() as counter:
        train_step(
            model,
            [(tokens, labels)] * 4,
            adamw(model),
            step=1,
            max_norm=0.5,
            meshes=meshes,
            health=Health.on(torch.device("cpu")),
        )
    return counter.counts


def test_gradients_are_reduced_once_a_step(on_ranks) -> None:
    groups = 2 + TINY.n_layers  # embedding, blocks, output
    for counts in on_ranks(2, _collectives):
        assert counts["_reduce_scatter_base_"] == groups
        # every group for every forward, and for every backward but the last block and the output
        assert counts["_allgather_base_"] == 4 * (groups + groups - 2)


def _gradients_sent(options: dict) -> int:
    """By the second stage of two, in a step with four microbatches."""
    dims = ParallelDims(dp_replicate=1, dp_shard=1, pp=2)
    model, meshes = parallel_llama(dims, microbatches=(4, 2), **options)
    for step in (1, 2):  # the first is preceded by messages about what there is to send
        with CountCollectives() as counter:
            train_step(
                model,
                list(zip(*(part.split(2) for part in global_batch(step)), strict=True)),
                adamw(model),
                step=step,
                max_norm=0.5,
                meshes=meshes,
                health=Health.on(torch.device("cpu")),
            )
    return counter.counts["send"] if meshes.pp.get_local_rank() == 1 else 0


def test_frozen_stages_are_sent_no_gradients(on_ranks) -> None:
    assert on_ranks(2, _gradients_sent, {}) == [0, 4]
    assert on_ranks(2, _gradients_sent, frozen("tok_embeddings.*", "layers.[01].*")) == [0, 0]


def _bad_second_step(is_early: bool) -> tuple[int, int]:
    """Rank 1 meets a label whose loss is infinite at step 2; then all is well again."""
    model, meshes = parallel_llama(ParallelDims(dp_replicate=1, dp_shard=2))
    optimizer, health = adamw(model), Health.on(torch.device("cpu"))
    early = EarlyStep(optimizer) if is_early else None
    rank = meshes.dp.get_local_rank()
    weights = []
    for step in (1, 2, 3):
        tokens, labels = (part.chunk(2)[rank] for part in global_batch(step))
        if step == 2 and rank == 1:
            model.stages[0].register_forward_hook(lambda m, i, logits: logits * float("inf"))
        train_step(
            model,
            [(tokens, labels)],
            optimizer,
            early,
            step=step,
            max_norm=float("inf") if is_early else 0.5,
            meshes=meshes,
            health=health,
        )
        model.stages[0]._forward_hooks.clear()
        weights.append([whole(p).clone() for p in model.parameters()])
    for after_1, after_2, after_3 in zip(*weights, strict=True):
        assert torch.equal(after_1, after_2)
        assert torch.equal(after_1, after_3)
    return int(health.first_bad_step), int(health.first_bad_local_step)


@pytest.mark.parametrize("is_early", [False, True], ids=["late", "early"])
def test_a_non_finite_loss_stops_updates_and_is_traced_to_its_rank(on_ranks, is_early) -> None:
    """Early, it happens to make every gradient non-finite; what is kept else is not promised."""
    assert on_ranks(2, _bad_second_step, is_early) == [(2, NEVER), (2, 2)]
