"""What only a GPU can show, on one: waits, kernels, memory, bits."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshwright.commands.prove.bounds import BOUNDS
from meshwright.config.loader import load_config
from meshwright.models.attention import CausalAttention, repeat_heads
from meshwright.models.delta_net import DeltaCore
from meshwright.models.loss import SummedLoss
from meshwright.parallelisms.context_parallel import (
    attend_in_chunks,
    gradients_in_chunks,
    masked_in_chunks,
)
from meshwright.parallelisms.delta_kernel import recur, why_missing
from meshwright.parallelisms.fused_attention import WIDTHS
from meshwright.parallelisms.meshes import build_meshes
from meshwright.system import hardware
from tests.gpu.launch import run
from tests.helpers.delta_layer import inputs, results, several_documents
from tests.helpers.jobs import ROOT
from tests.helpers.one_rank import OneRank
from tests.helpers.resolved import resolved
from tests.helpers.simulated_gpu.cases import ONE_GPU
from tests.helpers.simulated_gpu.guard import build_guard
from tests.helpers.simulated_gpu.run import simulate

SELECTIVE = ("--activation_checkpoint.mode=selective",)
COMPILED = ("--compile.enable=true",)
PRECISION = "--training.mixed_precision_param"
FP32 = (f"{PRECISION}=float32",)
DOCUMENTS = ("--training.mask_documents=true",)
OFFLOADED = ("--training.enable_cpu_offload=true",)
EXPERTS = ("--model.name=qwen3_moe",)
SINKS = ("--model.name=gpt_oss",)
MUON = ("--optimizer.name=muon",)
EARLY = ("--optimizer.early_step_in_backward=true", "--training.max_norm=inf")
SMALL = (
    f"--job.config_file={ROOT / 'train_configs/debug_model.toml'}",
    "--checkpoint.enable=false",
)
SHORT = ("--training.seq_len=128",)
SEQUENCES = "--training.global_batch_size"


@pytest.fixture(scope="module", autouse=True)
def _process_group(device) -> Iterator[None]:
    backend = "gloo"
    if device.type == "cuda":
        hardware.pick_device(0)
        backend = "cpu:gloo,cuda:nccl"  # some tests train on the CPU, too
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(device: torch.device, *words: str) -> OneRank:
    """A rank that computes in bf16, unless `words` say otherwise."""
    torch._dynamo.reset()
    is_bf16 = not any(word.startswith(PRECISION) for word in words)
    bf16 = [f"{PRECISION}=bfloat16"] * is_bf16
    sequences = [] if any(word.startswith(SEQUENCES) for word in words) else [f"{SEQUENCES}=2"]
    config = load_config([*SMALL, *SHORT, *sequences, *bf16, *words])
    plan = resolved(config, 1)
    rank = OneRank(plan, build_meshes(plan.dims, device.type), device)
    rank.initialize()
    return rank


def losses(device: torch.device, *words: str, steps: int = 4) -> list[float]:
    """Of steps, after the first one's gradient norm: AdamW hides the scale of gradients."""
    rank = build(device, *words)
    results = [rank.step(n, rank.batches(n)) for n in range(1, steps + 1)]
    return [results[0].grad_norm.item(), *(result.loss.item() for result in results)]


MODES = {
    "bf16": (),
    "fp32": FP32,
    "documents": DOCUMENTS,
    "selective": SELECTIVE,
    "compiled": COMPILED,
    "compiled, selective, documents": (*COMPILED, *SELECTIVE, *DOCUMENTS),
    "early": EARLY,
    "4 microbatches": (f"{SEQUENCES}=8",),
    "Muon": MUON,
    "experts": EXPERTS,
    "experts, compiled, selective": (*EXPERTS, *COMPILED, *SELECTIVE),
    "sinks": SINKS,
    "sinks, compiled, documents": (*SINKS, *COMPILED, *DOCUMENTS),
}


@pytest.mark.only_cuda
@pytest.mark.parametrize("mode", MODES)
def test_a_step_never_waits(device, mode: str) -> None:
    rank = build(device, *MODES[mode])
    for number in (1, 2):  # the first compiles, and makes the optimizer's state
        rank.step(number, rank.batches())
    batches = rank.batches()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = rank.step(3, batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert math.isfinite(result.loss.item())


@pytest.mark.parametrize("mode", ["bf16", "fp32"])
def test_attention_takes_a_fused_kernel(device, mode: str) -> None:
    rank = build(device, *MODES[mode])
    with torch.profiler.profile() as profile:
        rank.step(1, rank.batches())
    names = {event.name for event in profile.events() if "scaled_dot_product" in event.name}
    assert not any("math" in name for name in names)
    kinds = ("flash", "cudnn") if mode == "bf16" or device.type == "cpu" else ("efficient",)
    assert any(kind in name for name in names for kind in kinds), names


def test_initial_values_are_those_of_a_cpu(device) -> None:
    ours, theirs = build(device, *FP32).model, build(torch.device("cpu"), *FP32).model
    for (name, got), want in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(got.cpu(), want), name


@pytest.mark.parametrize("mode", MODES)
def test_losses_are_those_of_a_cpu(device, mode: str) -> None:
    """Of flex attention too, whose backward has no CPU to be tried on."""
    tolerance = 1e-4 if mode == "fp32" else 2e-2
    eager = {*MODES[mode], *FP32} - {*COMPILED}  # a word twice is an error
    want = losses(torch.device("cpu"), *eager)
    assert losses(device, *MODES[mode]) == pytest.approx(want, rel=tolerance)


@pytest.mark.only_cuda
@pytest.mark.parametrize("mode", ["bf16", "compiled", "selective"])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_float8_losses_are_those_of_its_emulation(device, recipe: str, mode: str) -> None:
    pytest.importorskip("torchao")
    if not hardware.has_float8(device):
        pytest.skip("this GPU does not multiply in float8")
    words = ("--float8.enable=true", f"--float8.recipe_name={recipe}")
    want = losses(device, *words, "--float8.emulate=true")
    norm, *got = losses(device, *words, *MODES[mode])
    assert norm == pytest.approx(want[0], rel=BOUNDS["float8"].grad_norm)
    assert got == pytest.approx(want[1:], rel=BOUNDS["float8"].loss)


def test_offload_changes_no_number(device) -> None:
    # in fp32: where a CPU's update differs in the last bit, bf16 may round a weight the other way
    got = losses(device, *OFFLOADED, *FP32)
    assert got == pytest.approx(losses(device, *FP32), rel=1e-5)


def test_deterministic_runs_are_equal_to_the_bit(device) -> None:
    fills = torch.utils.deterministic.fill_uninitialized_memory
    hardware.make_deterministic()
    try:
        for words in ((), (*COMPILED, *SELECTIVE, *DOCUMENTS)):
            assert losses(device, *words) == losses(device, *words)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.only_cuda
@pytest.mark.parametrize("case", ONE_GPU)
def test_memory_is_what_the_simulation_says(device, tmp_path: Path, case: str) -> None:
    guard = build_guard(tmp_path)
    if guard is None:
        pytest.skip("needs g++")
    found = simulate(guard, [case])[case]
    assert "error" not in found, found["error"]
    torch._dynamo.reset()
    config = load_config(ONE_GPU[case].words)
    plan = resolved(config, 1)
    rank = OneRank(plan, build_meshes(plan.dims, "cuda"), device)
    rank.initialize()
    growths = []
    for step in (1, 2):
        batches = rank.batches()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        rank.step(step, batches)
        growths.append(torch.cuda.max_memory_allocated() - before)
    # step 1 makes the optimizer's state, and cuBLAS its workspace, 32 MiB on Hopper
    assert growths[0] <= 1.1 * found["first_growth_bytes"] + 64 * 2**20
    assert growths[1] == pytest.approx(found["peak_bytes"] - found["start_bytes"], rel=0.1)


@pytest.mark.parametrize("kernel", [None, "flash", "cudnn"])
@pytest.mark.parametrize("width", [64, 60])
def test_attention_to_gathered_keys_is_that_to_the_whole(device, kernel, width) -> None:
    """Both ranks of a cp axis of 2, one after the other."""
    dtype, tolerance = (torch.float32, 1e-5) if kernel is None else (torch.bfloat16, 1e-2)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 512, width) for heads in (8, 2, 2, 8)]
    q, k, v, grad = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
    whole = [part.double().requires_grad_() for part in (q, k, v)]
    plain = [whole[0], *(repeat_heads(part, 8) for part in whole[1:])]
    scores = plain[0] @ plain[1].transpose(-1, -2) / math.sqrt(width)
    later = torch.ones(512, 512, dtype=torch.bool, device=device).triu(1)
    output = scores.masked_fill(later, -math.inf).softmax(-1) @ plain[2]
    wants = [output, *torch.autograd.grad(output, whole, grad.double())]
    gets = [torch.zeros_like(want) for want in wants]
    scale = width**-0.5
    for chunks in ((0, 3), (1, 2)):
        own = torch.cat([torch.arange(128 * c, 128 * c + 128, device=device) for c in chunks])
        if kernel is not None:
            inputs = [F.pad(x, (0, -width % WIDTHS)) for x in (q[:, :, own], k, v)]
            part, sums = attend_in_chunks(*inputs, chunks, scale, kernel)
            padded = F.pad(grad[:, :, own], (0, -width % WIDTHS))
            gradients = gradients_in_chunks(padded, *inputs, part, sums, chunks, scale, kernel)
        else:
            inputs = [x.clone().requires_grad_() for x in (q[:, :, own], k, v)]
            part = masked_in_chunks(*inputs, None, chunks, scale)
            gradients = torch.autograd.grad(part, inputs, grad[:, :, own])
        gets[0][:, :, own] = part[..., :width].double()
        gets[1][:, :, own] = gradients[0][..., :width].double()
        for got, of_rank in zip(gets[2:], gradients[1:], strict=True):
            got += of_rank[..., :width]
    for name, got, want in zip("oqkv", gets, wants, strict=True):
        assert ((got - want).norm() / want.norm()).item() < tolerance, name


@pytest.mark.only_cuda
@pytest.mark.parametrize("has_documents", [False, True])
def test_fla_gives_what_chunks_give(device, has_documents: bool) -> None:
    if reason := why_missing():
        pytest.skip(reason)
    given = [x.to(device) for x in inputs(torch.bfloat16)]
    documents = several_documents().to(device) if has_documents else None
    for got, want in zip(
        results(recur, given, documents), results(DeltaCore(), given, documents), strict=True
    ):
        assert (got - want).abs().max() <= 2e-2 * want.abs().max()


def test_fp32_attention_of_grouped_heads_is_right(device) -> None:
    q, k, v = (torch.randn(1, heads, 128, 64, device=device) for heads in (8, 2, 2))
    got = CausalAttention()(q, k, v, scale=q.shape[-1] ** -0.5)
    want = CausalAttention()(
        q.cpu().double(), k.cpu().double(), v.cpu().double(), scale=q.shape[-1] ** -0.5
    )
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-4)


def test_a_loss_is_scaled_by_the_number_of_labels_in_fp32(device) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 13, 8, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight, labels = torch.randn(37, 8, device=device), torch.randint(37, (2, 13), device=device)
    loss = SummedLoss()
    whole, share = (
        torch.autograd.grad(loss(x, weight, labels) * factor, x)[0] for factor in (1, 1 / 11)
    )
    assert torch.equal(share, (whole.float() * (1 / 11)).bfloat16())


@pytest.mark.parametrize("mode", ["disabled", "thread"])
def test_a_resume_goes_on_to_the_bit(tmp_path: Path, mode: str) -> None:
    words = ["--training.deterministic=true", f"--checkpoint.async_mode={mode}"]
    whole = run(tmp_path, 1, *words)
    assert run(tmp_path, 1, *words, "--checkpoint.load_step=15") == whole
    assert len(whole) == 20
