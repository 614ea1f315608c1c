"""Jobs on one GPU: their time, memory and MFU by `meshwright plan`, and beside them what they take.

python -m benchmarks.gpu_prediction [JOB ...]        (any CPU)
python -m benchmarks.gpu_prediction --run [JOB ...]          (a GPU: about 40 s a job)
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_speed import LIMIT_S, run_words
from meshwright.commands.plan.devices import (
    FRAGMENTED,
    GIB,
    Device,
    find_device,
    non_tensor_memory,
    rates_of,
    verdict,
)
from meshwright.commands.plan.predict import predict
from meshwright.commands.plan.report import mfu
from meshwright.commands.plan.simulate import plan_job
from meshwright.config.loader import load_config
from meshwright.system.processes import in_processes

COMMON = {
    "training.mixed_precision_param": "bfloat16",
    "compile.enable": "true",
    "lr_scheduler.warmup_steps": 2,
    "checkpoint.enable": "false",
    "validation.enable": "false",
    "metrics.log_freq": 1,
}
NONE, SELECTIVE = (f"--activation_checkpoint.mode={x}" for x in ("none", "selective"))
CUT_8B = f"--model.flavor=llama3_8b --model.args.n_layers=6 {SELECTIVE}"
FLOAT8 = "--float8.enable=true --float8.recipe_name"
AUTORESEARCH = (
    "--model.args.dim=512 --model.args.n_layers=8 --model.args.n_heads=4 --model.args.n_kv_heads=4 "
    f"--model.args.hidden_dim=1408 --model.args.vocab_size=8192 {NONE}"
)
QWEN3 = "--model.name=qwen3_moe --model.flavor=qwen3_30b_a3b --model.args.n_layers=4"


@dataclass(frozen=True)
class Job:
    """One that needs no network and no gated tokenizer: the debug preset's data."""

    seq_len: int
    batch: int
    """Sequences of a microbatch."""
    words: str
    microbatches: int = 1
    measured: tuple[float, float] = (0.0, 0.0)
    """Tokens/s and GiB of benchmarks/results/gpu.md, on an H200; 0: never run."""

    def keys(self) -> dict[str, object]:
        """Return the keys of its config, with those of the debug preset."""
        given = (word.removeprefix("--").split("=", 1) for word in shlex.split(self.words))
        return {
            **COMMON,
            "training.seq_len": self.seq_len,
            "training.local_batch_size": self.batch,
            "training.global_batch_size": self.batch * self.microbatches,
            **dict(given),
        }


def _whole(flavor: str, tokens: int, mode: str) -> dict[str, Job]:
    words = f"--model.flavor={flavor} {mode}"
    name = flavor.removeprefix("llama3_").upper()
    return {
        f"Llama 3.2 {name}, S {length}": Job(length, tokens // length, words)
        for length in (2048, 4096, 8192)
    }


JOBS = {
    "8B cut to 6 layers": Job(8192, 2, CUT_8B, measured=(46409, 41.7)),
    "8B cut to 6 layers, float8 rowwise": Job(
        8192, 2, f"{CUT_8B} {FLOAT8}=rowwise", measured=(49256, 50.7)
    ),
    "8B cut to 6 layers, float8 tensorwise": Job(8192, 2, f"{CUT_8B} {FLOAT8}=tensorwise"),
    "8B cut to 6 layers, one sequence, nothing recomputed": Job(
        8192, 1, CUT_8B.replace(SELECTIVE, NONE)
    ),
    "8B cut to 6 layers, 4 microbatches": Job(8192, 2, CUT_8B, 4),
    **_whole("llama3_1b", 32768, NONE),
    "Llama 3.2 1B, S 8192, float8 tensorwise": Job(
        8192, 4, f"--model.flavor=llama3_1b {NONE} {FLOAT8}=tensorwise"
    ),
    **_whole("llama3_3b", 16384, SELECTIVE),
    "30B-A3B cut to 4 layers": Job(8192, 2, f"{QWEN3} {SELECTIVE}", measured=(88922, 47.5)),
    "30B-A3B cut to 4 layers, 4 microbatches": Job(8192, 2, f"{QWEN3} {SELECTIVE}", 4),
    "OLMoE 1B-7B, S 4096": Job(
        4096, 4, f"--model.name=olmoe --model.flavor=olmoe_1b_7b {SELECTIVE}"
    ),
    "Llama 3 8B whole, all in bf16": Job(
        8192, 1, f"--model.flavor=llama3_8b --training.dtype=bfloat16 {SELECTIVE}"
    ),
    "34M shape like autoresearch's": Job(2048, 128, AUTORESEARCH, 2),
}
JOBS["Llama 3.2 1B, S 8192"] = Job(8192, 4, JOBS["Llama 3.2 1B, S 8192"].words, 1, (57590, 55.3))

DEVICES = "h200", "h100"


@dataclass(frozen=True)
class Prediction:
    """Of one job on one device."""

    tokens_per_s: float
    seconds: float
    mfu: float
    """In percent, of all pairs of attention."""
    mfu_half: float
    gib: float
    """As the allocator reserves: of tensors, and half of the most that it loses between blocks."""
    verdict: str

    def cells(self) -> str:
        """Return the row's part."""
        if self.verdict == "does not fit":
            return f"- | - | - | {self.gib:.1f}, does not fit"
        tight = ", tight" if self.verdict == "tight" else ""
        utilized = f"{self.mfu:.1f} % ({self.mfu_half:.1f} %)"
        time = f"{self.tokens_per_s:,.0f} | {self.seconds:.3f} | {utilized}"
        return f"{time} | {self.gib:.1f}{tight}"


def command_words(keys: Mapping[str, object]) -> list[str]:
    """Return keys as options."""
    return [f"--{key}={value}" for key, value in keys.items()]


def plan_one(name: str, device: Device) -> Prediction:
    """Return the prediction of a job; for its own process."""
    config = load_config(["debug_model", *command_words(JOBS[name].keys())])
    job = plan_job(config, 1, is_gpu=True)
    rates = rates_of(job, device)
    found = predict(job, 0, rates)
    modelled = non_tensor_memory(job, rates, found.peak_bytes, found.num_groups, found.most)
    return Prediction(
        config.tokens_per_step / found.seconds,
        found.seconds,
        100 * mfu(job, device, found.seconds),
        100 * mfu(job, device, found.seconds, is_causal=True),
        (1 + 0.5 * FRAGMENTED) * found.peak_bytes / GIB,
        verdict(rates, found.peak_bytes, modelled),
    )


def show(names: Sequence[str]) -> None:
    """Print the table of predictions."""
    tasks = [(name, find_device(word)) for word in DEVICES for name in names]
    found = dict(zip(tasks, in_processes(tasks, plan_one, 2, "planned jobs"), strict=True))
    for word in DEVICES:
        device = find_device(word)
        print(f"\n## {device.name}\n")
        print("| job | tokens a step | tokens/s | step, s | MFU | GiB |")
        print("|---|---|---|---|---|---|")
        for name in names:
            job = JOBS[name]
            tokens = job.seq_len * job.batch * job.microbatches
            print(f"| {name} | {tokens:,} | {found[name, device].cells()} |")
    device = find_device("h200")
    print("\n## Planned, and measured before\n")
    print("| job | tokens/s, planned | measured | ratio | GiB, planned | measured | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        speed, gib = JOBS[name].measured
        if speed:
            one = found[name, device]
            speeds = f"{one.tokens_per_s:,.0f} | {speed:,.0f} | {one.tokens_per_s / speed:.2f}"
            print(f"| {name} | {speeds} | {one.gib:.1f} | {gib} | {one.gib / gib:.2f} |")


def run(names: Sequence[str], word: str, folder: Path) -> int:
    """Run the jobs on this GPU, and print each beside its prediction; return how many failed."""
    print("| job | tokens/s | planned | ratio | GiB | planned | ratio |")
    print("|---|---|---|---|---|---|---|", flush=True)
    failed = 0
    for name in names:
        planned = plan_one(name, find_device(word))
        own = folder / name.replace(", ", "_").replace(" ", "_")
        found = run_words(JOBS[name].keys(), own, steps=14)
        if "error" in found:
            failed += 1
            print(f"| {name} | fails: {found['error'].splitlines()[-1]} |", flush=True)
            continue
        speed, gib = found["time/wps"], found["memory/peak_gib"]
        speeds = f"{speed:,.0f} | {planned.tokens_per_s:,.0f} | {planned.tokens_per_s / speed:.2f}"
        sizes = f"{gib:.1f} | {planned.gib:.1f} | {planned.gib / gib:.2f}"
        print(f"| {name} | {speeds} | {sizes} |", flush=True)
    return failed


def main() -> None:
    """Predict, or run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--run", action="store_true", help=f"run them; {LIMIT_S} s at most for each"
    )
    parser.add_argument("--folder", type=Path, default=Path("outputs/gpu_prediction"))
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="default: all")
    given = parser.parse_args()
    if unknown := set(given.jobs) - set(JOBS):
        parser.error(f"no such job: {', '.join(sorted(unknown))}; choose from: {'; '.join(JOBS)}")
    names = given.jobs or list(JOBS)
    if given.run:
        if not torch.cuda.is_available():
            parser.error("--run needs a GPU, and torch sees none")
        gpu = torch.cuda.get_device_name()
        word = next((word for word in DEVICES if word.upper() in gpu), None)
        if word is None:
            parser.error(f"{gpu} has no predictions: --run needs an H100 or an H200")
        sys.exit(run(names, word, given.folder) > 0)
    show(names)


if __name__ == "__main__":
    main()
