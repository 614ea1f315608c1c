"""Blocks and the loss are compiled in the first step, and never again; numbers are the same,
also of packed documents."""

import dataclasses
import logging
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._functorch import config as partitioner
from torch._higher_order_ops import wrap
from torch._inductor import compile_fx

from meshwright.config.parallelism import ActivationCheckpoint
from meshwright.models.args import DecoderArgs
from meshwright.models.families import MODELS
from meshwright.parallelisms import parallelize
from meshwright.parallelisms.activation_checkpoint import MESHES_HAVE_NO_SIZE
from meshwright.parallelisms.cpu_kernels import attention
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.system.modules import has_torch
from tests.distributed.test_step import steps_on_mesh
from tests.helpers.families import small
from tests.helpers.job import DEEP, SCHEDULES, Job, mesh
from tests.helpers.needs import needs_compiler
from tests.helpers.packed import packed, reference
from tests.helpers.rounding import gradient_bound
from tests.helpers.slow import slow, slow_but
from tests.helpers.tiny import TINY, parallel_model, plain_model

FSDP = mesh(dp_shard=2)
TP = mesh(tp=2)
CP = mesh(cp=2)
PP = mesh(pp=2)
INDUCTOR = {"compile_backend": "inductor"}
# what is recomputed is settled before a backend's own part, whose kernels take minutes
AOT = {"compile_backend": "aot_eager"}
WINDOWED = small(MODELS["olmo3"], 131)
"""With layers of two kinds, and a window of several chunks."""
OP, FULL, BUDGET = {"ac_mode": "selective"}, {"ac_mode": "full"}, {"ac_mode": "memory_budget"}
CASES = {
    "fsdp": (FSDP, AOT),
    "tp": (TP, INDUCTOR),
    "tp-op": (TP, AOT | OP),
    "tp-full": (TP, AOT | FULL),
    "tp-budget": (TP, AOT | BUDGET),
    "gather-full": (CP, AOT | FULL),
    "gather-op": (CP, AOT | OP),
    "gather": (CP, INDUCTOR),
    "gather-budget": (CP, AOT | BUDGET),
    "halo-op": (CP, AOT | OP | {"args": WINDOWED}),
    "halo": (CP, INDUCTOR | {"args": WINDOWED}),
    "pp-full": (PP, AOT | FULL | SCHEDULES["1F1B"]),
    "pp-op": (PP, AOT | OP | SCHEDULES["Interleaved1F1B"]),
}
"""Each mesh with two policies of recomputation, and each policy on several meshes."""
EVERYDAY = ("fsdp", "pp-op")
HAS_BUDGET_OF_MESHES = hasattr(partitioner, MESHES_HAVE_NO_SIZE)  # from torch 2.12 or 2.13 on
LOSS = 2  # graphs of the loss, where it is computed


class Graphs:
    """Counts those compiled since it was last asked."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        counters.clear()
        self._seen = 0

    def new(self) -> int:
        before, self._seen = self._seen, counters["stats"]["unique_graphs"]
        return self._seen - before


def graphs_of_compared_steps(dims: ParallelDims, options: dict) -> int:
    """Graphs of all steps, whose figures and weights equal those of plain PyTorch."""
    graphs = Graphs()
    num_microbatches, args = (4, DEEP) if dims.pp > 1 else (2, TINY)
    options = {"args": args} | options
    args = options.pop("args")
    steps_on_mesh(dims, num_microbatches, options, args)
    return graphs.new()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=[
                *([needs_compiler] if INDUCTOR.items() <= options.items() else []),
                *([] if case in EVERYDAY else [pytest.mark.slow]),
            ],
        )
        for case, (_, options) in CASES.items()
    ],
)
def test_one_graph_for_all_blocks_and_the_same_numbers(on_ranks, case) -> None:
    dims, options = CASES[case]
    if options.get("ac_mode") == "memory_budget" and dims.tp > 1 and not HAS_BUDGET_OF_MESHES:
        pytest.skip("torch cannot, and says so")
    kinds = 2 if options.get("args") is WINDOWED else 1
    want = [1 if dims.pp > 1 else kinds + LOSS, kinds + LOSS]  # the last stage has the loss
    assert on_ranks(2, graphs_of_compared_steps, dims, options) == want


def graphs_of_a_step(dims: ParallelDims, args: DecoderArgs) -> int:
    graphs = Graphs()
    Job(dims, args=args, compile_backend="eager").take_step()
    return graphs.new()


OF_FAMILIES = {
    f"{name}-{axis}": (name, dims)
    for name in MODELS
    for axis, dims in (("alone", mesh()), ("tp", TP), ("cp", CP))
}


@pytest.mark.parametrize(("name", "dims"), slow_but("deepseek_v3-tp", OF_FAMILIES))
def test_layers_of_a_kind_share_a_graph_in_every_family(on_ranks, name, dims) -> None:
    """Torch compiles 8 graphs of a block at most, and then stops the job."""
    args = dataclasses.replace(small(MODELS[name], 131), n_layers=8)
    kinds, ranks = len({*args.table.layers}), dims.num_ranks
    assert on_ranks(ranks, graphs_of_a_step, dims, args) == [kinds + LOSS] * ranks


HEADS_OF_16 = dataclasses.replace(TINY, dim=64)

REASON = attention.why_not(16, torch.bfloat16)


@pytest.mark.skipif(REASON != "", reason=REASON)
@pytest.mark.parametrize(("dims", "options"), [(FSDP, AOT | FULL), *slow((TP, AOT | OP))])
@pytest.mark.ranks(2)
def test_attentions_kernel_on_cpus_changes_rounding_alone(dims, options) -> None:
    """Graphs, loss and gradient norm of a step in bf16."""
    found = []
    for kernel in ("auto", "torch"):
        graphs = Graphs()
        job = Job(
            dims, args=HEADS_OF_16, param_dtype=torch.bfloat16, cpu_attention=kernel, **options
        )
        result = job.take_step(1)
        found.append((graphs.new(), float(result.loss), float(result.grad_norm)))
    own, torchs = found
    assert own[0] == torchs[0]
    assert own[1:] != torchs[1:]
    assert own[1:] == pytest.approx(torchs[1:], rel=2e-3)


@pytest.mark.ranks(2)
def test_all_ranks_have_attentions_kernel_or_none() -> None:
    """In a job where all can have it, and where the second rank cannot."""
    for lacking in (None, 1):
        reason = "of a test" if dist.get_rank() == lacking else ""
        with patch.object(attention, "why_not", lambda *_, reason=reason: reason):
            model, _ = parallel_model(FSDP, compile_backend="eager")
        cores = [block.attention.core for block in model.stages[0].layers.values()]
        assert {core.forward is attention.attend for core in cores} == {lacking is None}


def test_torch_gives_no_advice_that_no_key_follows(monkeypatch, caplog) -> None:
    """On the precision of fp32 matmuls on a GPU: torch warns once per process, hence its function
    itself; and on recomputation."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        compile_fx._warn_tf32_disabled.__wrapped__()
        parallelize._compile(
            plain_model(), "eager", ActivationCheckpoint(), has_meshes=False, keeps_casts=False
        )
        compile_fx._warn_tf32_disabled.__wrapped__()
        wrap.log.warning("Detected that context_fn is passed to torch.utils.checkpoint")
        logging.getLogger("torch.utils.cpp_extension").warning("No CUDA runtime is found")
    assert len(seen) == (not has_torch(2, 14))  # which says it in its log of details
    assert not caplog.records


PACKED = {
    "fsdp-op": (mesh(dp_shard=2), AOT | {"ac_mode": "selective"}),
    "tp": (mesh(tp=2), AOT),
    "cp": (mesh(cp=2), AOT),
    "pp": (mesh(pp=2), AOT | SCHEDULES["1F1B"]),
    "cp4": (mesh(cp=4), {}),
    "pp-cp": (mesh(pp=2, cp=2), SCHEDULES["1F1B"]),
    "pp-zbv": (mesh(pp=2), SCHEDULES["ZBVZeroBubble"]),  # which compiled blocks cannot
}
"""Others that are eager: tests/distributed/test_families.py."""

BY_INDUCTOR = pytest.param(mesh(dp_shard=2), INDUCTOR, marks=[needs_compiler, pytest.mark.slow])


@pytest.mark.parametrize(("dims", "options"), [*slow_but("fsdp-op pp-zbv", PACKED), BY_INDUCTOR])
@pytest.mark.ranks("dims")
def test_packed_documents_learn_as_they_do_alone_and_others_are_not_compiled_anew(
    dims, options
) -> None:
    graphs = Graphs()
    args = DEEP if dims.pp > 1 else TINY
    job = Job(dims, 0, 4 if dims.pp > 1 else 2, args=args, **options)
    gradients = job.whole_gradients()
    loss = job.take_step(1, job.part(packed(1))).loss.item()
    want_loss, want_gradients = reference(args)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    for name, gradient in gradients.items():
        want = want_gradients[name]
        error = ((gradient - want).norm() / want.norm()).item()
        assert error <= gradient_bound(args), f"{name}: {error:.1e}"
    first = graphs.new()
    for step in (2, 3):
        job.take_step(step, job.part(packed(step)))
    is_compiled = "compile_backend" in options
    num_of_loss = 2 * any(stage.output is not None for stage in job.model.stages)
    assert (first, graphs.new()) == ((1 + num_of_loss) * is_compiled, 0)
