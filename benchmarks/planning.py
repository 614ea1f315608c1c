"""Planned peaks beside those of torch's allocator, for every axis, mode and schedule.

    python -m benchmarks.planning [CASE ...]
    python -m benchmarks.planning --presets [NAME ...]
    python -m benchmarks.planning --depths
    python -m benchmarks.planning --verdicts

--presets plans every preset, or those named, and writes the plan into its header. --depths compares
predictions from two shallow models with simulations of all layers. --verdicts compares "fits" with
real tensors, for jobs whose peaks are around a limit.

Each case is one rank on the CPU, of the small model of tests/helpers/planning.py: planned on fake
tensors, and run with real tensors under the fake process group; the peak is that of step 2.
"""

import datetime
import json
import subprocess
import sys
from dataclasses import replace
from resource import RUSAGE_SELF, getrusage

import torch.distributed as dist

from meshwright.config.loader import load_config
from meshwright.parallelisms.meshes import build_meshes
from meshwright.planning import torch_names
from meshwright.planning.analysis import find_peak
from meshwright.planning.devices import GIB, find_device, overheads, verdict
from meshwright.planning.job import plan_job
from meshwright.planning.predict import in_processes, measure, predict
from meshwright.planning.simulate import Rank, simulate
from tests.helpers.planning import Case
from tests.helpers.presets import ROOT, peak_gib, presets, with_plan

PIPELINE = "--parallelism.pipeline_parallel_degree=4 --training.global_batch_size="
INTERLEAVED = "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"
DEPTHS = (
    ("llama3_8b", 8, ""),
    ("llama3_8b", 64, "--parallelism.tensor_parallel_degree=8"),
    ("llama3_8b", 32, f"{PIPELINE}64"),
    ("llama3.1_70b", 64, f"{PIPELINE}512 {INTERLEAVED}"),
    ("llama2_13b", 16, "--activation_checkpoint.mode=none"),
    ("llama2_70b", 256, ""),
    ("llama3.1_70b", 256, "--parallelism.fsdp_reshard_after_forward=never"),
    ("qwen3_14b", 16, ""),
    ("olmo2_7b", 8, "--activation_checkpoint.selective_ac_option=2"),
    ("llama3_8b", 8, "--parallelism.context_parallel_degree=4"),
)
"""Presets, ranks, and options."""
LIMIT_GIB = 1.4
LARGER = "--model.args.dim=512 --model.args.vocab_size=8192 --training.seq_len=512"
AROUND = {
    "FSDP 2": (Case("dp_shard 2"), (4, 5, 6, 7, 8)),
    "FSDP 2, full": (Case("dp_shard 2", "--activation_checkpoint.mode=full"), (17, 19, 21, 23, 25)),
    "TP 2": (Case("tp 2"), (10, 11, 12, 13, 14)),
    "1F1B": (Case("pp 2", microbatches=4), (4, 5, 6, 7, 8)),
}
"""Jobs, and sequences of a microbatch with which their peaks are around the limit."""


def main() -> None:
    modes = {"--depths": compare_depths, "--verdicts": compare_verdicts}
    if sys.argv[1:2] == ["--presets"]:
        write_presets(sys.argv[2:])
        return
    if sys.argv[1:] and sys.argv[1] in modes:
        modes[sys.argv[1]]()
        return
    words = [sys.executable, "-m", "tests.helpers.planning", *sys.argv[1:]]
    worker = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
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


def write_presets(names: list[str]) -> None:
    today = datetime.date.today().isoformat()
    for path, ranks in presets():
        if names and path.stem not in names:
            continue
        text = path.read_text()
        peak = peak_gib(path, ranks)
        path.write_text(with_plan(path, text, ranks, peak, today))
        print(f"{path.name}: {peak:.1f} GiB on {ranks} ranks", flush=True)


def compare_depths() -> None:
    """Print the peak by two shallow depths and by all layers, of rank 0."""
    print("| job | from two depths, GiB | all layers, GiB | difference |")
    print("|---|---|---|---|")
    for index, found in in_processes(DEPTHS, at_both, 2):
        name, ranks, options = DEPTHS[index]
        predicted, simulated = found
        off = predicted / simulated - 1
        sizes = f"{predicted / GIB:.3f} | {simulated / GIB:.3f}"
        print(f"| {name}, {ranks} ranks {options} | {sizes} | {off:+.4%} |", flush=True)


def at_both(name: str, ranks: int, options: str) -> tuple[int, int]:
    """Return the bytes of a preset's peak, predicted and simulated."""
    path, device = ROOT / f"train_configs/{name}.toml", find_device("h100")
    config, _ = load_config([f"--job.config_file={path}", *options.split()])
    job = plan_job(config, ranks, is_gpu=True)
    predicted = predict(job, ranks, 0, device)
    assert predicted.line is not None
    return predicted.peak_bytes, measure(job, ranks, 0, device, None).peak_bytes


def compare_verdicts() -> None:
    """Print the verdict on a CPU of `LIMIT_GIB`, and the memory of a process with real tensors."""
    tasks = []
    for name, (case, sizes) in AROUND.items():
        for size in sizes:
            options = f"{case.options} {LARGER} --training.local_batch_size={size}"
            tasks.append((f"{name}, {size} sequences", replace(case, options=options)))
    tasks = [(*task, what) for task in tasks for what in ("planned", "resident")]
    print("| job | planned | of the process | verdict |\n|---|---|---|---|")
    found: dict[str, dict[str, int]] = {}
    exceeded = 0
    for _, (name, sizes) in in_processes(tasks, with_real_tensors, 2):
        of_job = found.setdefault(name, {})
        of_job |= sizes
        if len(of_job) < 2:
            continue
        planned, resident = of_job["planned"], of_job["resident"]
        device = replace(find_device("cpu"), memory_gib=LIMIT_GIB)
        word = verdict(device, planned, overheads(device, planned, planned, 1))
        exceeded += word == "fits" and resident > LIMIT_GIB * GIB
        shown = f"{planned / GIB:.3f} | {resident / GIB:.3f}"
        print(f"| {name} | {shown} | {word} |", flush=True)
    print(f"{exceeded} called fits exceed {LIMIT_GIB} GiB")


def with_real_tensors(name: str, case: Case, what: str) -> tuple[str, dict[str, int]]:
    """Return the planned bytes; or the most that a process with real tensors had, Python and torch
    included."""
    plan = case.plan()
    if what == "planned":
        peak = find_peak(simulate(plan, case.world_size, case.rank, is_gpu=False).record)
        return name, {what: peak.num_bytes}
    torch_names.start_fake_process_group(case.rank, case.world_size)
    with torch_names.static_pipelines():
        rank = Rank(plan, build_meshes(plan.dims, "cpu"), None)
        for step in (1, 2):
            rank.step(step, rank.batches(plan.num_microbatches))
    dist.destroy_process_group()
    return name, {what: 1024 * getrusage(RUSAGE_SELF).ru_maxrss}


if __name__ == "__main__":
    main()
