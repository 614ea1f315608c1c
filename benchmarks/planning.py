"""Planned peaks beside those of torch's allocator, for every axis, mode and schedule.

    python -m benchmarks.planning [CASE ...]
    python -m benchmarks.planning --published

--published compares step times and memory with figures that others published of jobs on H100s.

Each case is one rank on the CPU, of the small model of tests/helpers/planning.py: planned on fake
tensors, and run with real tensors under the fake process group; the peak is that of steps 1 and 2.
"""

import json
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from meshwright.commands.plan.devices import FRAGMENTED, GIB, Device, estimated, find_device
from meshwright.commands.plan.predict import predict
from meshwright.commands.plan.simulate import plan_job
from meshwright.config.changes import changed
from meshwright.config.loader import load_config
from meshwright.models.loss import SummedLoss
from meshwright.parallelisms import activation_checkpoint
from meshwright.system.processes import in_processes

ROOT = Path(__file__).parents[1]

H100 = find_device("h100")
TORCHTITAN = replace(H100, flops_per_s=886e12, bytes_per_s=2.4e12)
"""Its H100s have 2.4 TB/s and a limit of 500 W, "between SXM and NVL": 886 is on the line from 835
TFLOP/s at 400 W (NVL) to 989 at 700 W (SXM)."""
IBM = replace(H100, network_bytes_per_s=12.5e9)
"""800 Gb/s per node of eight."""
FULL, NONE = "--activation_checkpoint.mode=full", "--activation_checkpoint.mode=none"
TP_8 = "--parallelism.tensor_parallel_degree=8"
PP_16 = (
    "--parallelism.pipeline_parallel_degree=16 --parallelism.pipeline_parallel_stages_per_rank=4 "
    "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"
)


def _mpt(dim: int, layers: int, heads: int, hidden: int) -> str:
    """Return options that give a Llama the matmuls of MPT, whose FFN has two matrices of 4 D."""
    values = {"dim": dim, "n_layers": layers, "n_heads": heads, "n_kv_heads": heads}
    values |= {"hidden_dim": hidden, "vocab_size": 50368}
    words = [f"--model.args.{name}={value}" for name, value in values.items()]
    reduced = "--training.mixed_precision_reduce=bfloat16"
    return " ".join([*words, "--training.seq_len=2048", reduced])


@dataclass(frozen=True)
class Published:
    """A job of others, its tokens/s per GPU, and GiB that their allocator reserved."""

    name: str
    preset: str
    ranks: int
    batches: tuple[int, int]
    """Sequences of a microbatch, and of a step."""
    options: str
    tokens_per_s: float
    gib: float = 0.0
    """0: not published."""
    device: Device = H100
    is_compiled: bool = False
    is_torchtitan: bool = False
    """It recomputes every second matmul, and keeps whole logits."""


def _torchtitan(ranks: int, speed: float, gib: float, *, is_compiled: bool) -> Published:
    name = f"torchtitan, 8B, FSDP {ranks}"
    if is_compiled:
        name += ", compiled"
    batches = (2, 2 * ranks)
    return Published(
        name, "llama3.1_8b", ranks, batches, "", speed, gib, TORCHTITAN, is_compiled, True
    )


PUBLISHED = [
    _torchtitan(8, 5762, 82.4, is_compiled=False),
    _torchtitan(8, 6667, 77.0, is_compiled=True),
    _torchtitan(128, 5605, 67.0, is_compiled=False),
    _torchtitan(128, 6514, 62.0, is_compiled=True),
    Published(
        "torchtitan, 8B, FSDP 8 x TP 8, compiled",
        *("llama3.1_8b", 64, (12, 96), TP_8, 4378, 0, TORCHTITAN, True, True),
    ),
    Published(
        "torchtitan, 70B, FSDP 32 x TP 8, full recomputation, compiled",
        *("llama3.1_70b", 256, (16, 512), f"{TP_8} {FULL}", 597.3, 0, TORCHTITAN, True),
    ),
    Published(
        "Llama 3 paper, 405B, TP 8 x PP 16 x FSDP 64, nothing recomputed",
        *("llama3.1_405b", 8192, (1, 2048), f"{TP_8} {PP_16} {NONE}", 163, 0, H100, True),
    ),
    Published(
        "NeMo AutoModel, 70B, FSDP 32 x CP 2, full recomputation",
        *("llama3.1_70b", 64, (1, 128)),
        *(f"{FULL} --parallelism.context_parallel_degree=2", 866.8),
    ),
    Published(
        "IBM, Llama 2 7B, HSDP 12 x 8, nothing recomputed",
        *("llama2_7b", 96, (2, 192), f"{NONE} --parallelism.data_parallel_replicate_degree=12"),
        *(7500, 0, IBM),
    ),
    Published(
        "IBM, Llama 34B, FSDP 96, full recomputation",
        *("llama2_70b", 96, (2, 192)),
        *(f"{FULL} --model.args.n_layers=48 --model.args.hidden_dim=22016", 1550, 0, IBM),
    ),
    Published(
        "MosaicML, MPT 7B, FSDP 8, nothing recomputed",
        *("llama2_7b", 8, (6, 48), f"{NONE} {_mpt(4096, 32, 32, 10923)}", 10643),
    ),
    Published(
        "MosaicML, MPT 13B, FSDP 64, nothing recomputed",
        *("llama2_7b", 64, (2, 128), f"{NONE} {_mpt(5120, 40, 40, 13653)}", 4800),
    ),
    Published(
        "MosaicML, MPT 30B, FSDP 32, full recomputation",
        *("llama2_7b", 32, (14, 1344), f"{FULL} {_mpt(7168, 48, 56, 19115)}", 2308),
    ),
    Published(
        "MosaicML, MPT 70B, FSDP 64, full recomputation",
        *("llama2_7b", 64, (8, 2048), f"{FULL} {_mpt(8192, 80, 64, 21845)}", 1039),
    ),
]


def main() -> None:
    if sys.argv[1:] == ["--published"]:
        compare_published()
    else:
        compare_peaks(sys.argv[1:])


def compare_peaks(cases: list[str]) -> None:
    """Print planned and allocated bytes of the cases, or of all."""
    command = [sys.executable, "-m", "tests.helpers.planning", *cases]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    print("| job | planned bytes | allocated bytes | difference | unattributed |")
    print("|---|---|---|---|---|")
    for line in worker.stdout:
        name, found = json.loads(line)
        if "error" in found:
            print(f"| {name} | fails: {found['error'].splitlines()[-1]} |", flush=True)
            continue
        planned, allocated = found["planned"], found["allocated"]
        part = found["by_purpose"]["unattributed"] / planned
        off = planned / allocated - 1
        print(f"| {name} | {planned:,} | {allocated:,} | {off:+.3%} | {part:.2%} |", flush=True)


def compare_published() -> None:
    """Print planned speeds and memory beside published ones. Ratios are planned over published."""
    print("| job | tokens/s per GPU, published | planned | time | GiB | planned | ratio |")
    print("|---|---|---|---|---|---|---|")
    planned = in_processes([(one,) for one in PUBLISHED], plan_published, 2)
    for one, (speed, gib) in zip(PUBLISHED, planned, strict=True):
        ratio = f"{one.tokens_per_s / speed:.2f}"
        memory = f"{one.gib} | {gib:.1f} | {gib / one.gib:.2f}" if one.gib else "| |"
        print(f"| {one.name} | {one.tokens_per_s:g} | {speed:.0f} | {ratio} | {memory} |")


def plan_published(one: Published) -> tuple[float, float]:
    """Return the tokens/s per GPU, and the GiB that the allocator reserves for tensors, with half
    of the most that it loses between blocks."""
    local, batch = one.batches
    words = [f"--training.local_batch_size={local}", f"--training.global_batch_size={batch}"]
    path = ROOT / f"train_configs/{one.preset}.toml"
    config = load_config([f"--job.config_file={path}", *words, *one.options.split()])
    if one.is_torchtitan:
        config = changed(config, {"activation_checkpoint": {"mode": "selective"}})
    job = plan_job(config, one.ranks, is_gpu=True)
    # none of them says that it had cuDNN's attention
    device = estimated(one.device, is_compiled=one.is_compiled, is_shared=True, kernel="flash")
    with ExitStack() as stack:
        patch = mock.patch.object
        if one.is_torchtitan:
            stack.enter_context(patch(activation_checkpoint, "_contexts", _every_second))
        if one.is_torchtitan and job.dims.tp == 1:
            stack.enter_context(patch(SummedLoss, "__call__", _whole_logits))
        found = predict(job, 0, device)
    tokens = job.config.tokens_per_step / one.ranks
    reserved = (1 + 0.5 * FRAGMENTED) * found.peak_bytes
    return tokens / found.seconds, reserved / GIB


def _every_second(names: tuple[str, ...]) -> object:
    """Do as torchtitan's policy: keep the named operators' outputs, but of matmuls every other."""
    saved, counts = activation_checkpoint._operators(names), Counter[bool]()

    def policy(context: Any, operator: Any, *_: object, **__: object) -> CheckpointPolicy:
        is_saved = operator in saved
        if operator is torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            is_saved = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _whole_logits(
    _: SummedLoss, x: Tensor, weight: Tensor, labels: Tensor, loss_weights: None = None
) -> Tensor:
    logits = F.linear(x, weight.to(x.dtype)).flatten(0, 1).float()
    return F.cross_entropy(logits, labels.flatten(), reduction="sum")


if __name__ == "__main__":
    main()
