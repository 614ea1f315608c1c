"""What a GPU does with a Llama 3 8B cut to 6 layers, a Llama 3.2 1B and a Qwen3 of 30B with experts
cut to 4, and the rates that a plan assumes of it.

Rates: matmuls of the model's shapes, attention by each kernel, memory, launches, copies from the
host. Jobs by `meshwright train`, compiled, at several batch sizes and in float8: MFU, reserved
memory, and from a trace the share of time that the compute stream idles, its longest gaps, and the
kernels. One table, and FOLDER/speed.json, which is written after every part; a part that fails is
an entry, and the next one runs.

    python benchmarks/gpu_speed.py [FOLDER]                (one H200: 40 s a job)
    python benchmarks/gpu_speed.py [FOLDER] --tiny         (tiny sizes, for any machine)
    python benchmarks/gpu_speed.py --jobs "batch 2"
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]
sys.path.append(str(HERE / "contenders"))  # last: one is called transformers
from roofline import WAYS, best_s, timed  # noqa: E402
from workload import Workload, job_keys  # noqa: E402

from meshwright.models.attention import CausalAttention  # noqa: E402
from meshwright.system import hardware  # noqa: E402

LLAMA_8B = Workload(4096, 6, 32, 8, 14336, 128256, 8192, batch=1, compile=True)
LLAMA_1B = Workload(2048, 16, 32, 8, 8192, 128256, 8192, batch=4, compile=True)
QWEN3_30B_A3B = Workload(2048, 4, 32, 4, 6144, 128256, 8192, batch=2, compile=True)
TINY = Workload(64, 2, 4, 2, 128, 2048, 64, batch=1)
WARM_UP = 3
"""First steps, which make memory and compile."""
TRACED = 2
"""Last steps, which are traced and not timed."""
LIMIT_S = 240
"""Of a job."""
BACKENDS = {
    "torch's choice": list(SDPBackend.__members__.values()),
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cuDNN": [SDPBackend.CUDNN_ATTENTION],
}
OF_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events."""
ATTENTION = ("attention", "flash", "fmha", "sdpa", "cudnn")
"""Words in the names of attention's kernels and operators."""
MOST = 12
"""Rows of a list."""


def stream_use(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how the device was used in a Chrome trace; empty: nothing ran on one.

    The compute stream is the one with the most time in kernels.
    """
    work = [e for e in events if e.get("ph") == "X" and e.get("cat") in OF_DEVICE]
    of_streams, times = Counter[int](), Counter[str]()
    for event in work:
        if event["cat"] == "kernel":
            of_streams[event["args"]["stream"]] += event["dur"]
            times[event["name"]] += event["dur"]
    if not times:
        return {}
    stream = of_streams.most_common(1)[0][0]
    first, *others = sorted(
        (e for e in work if e["args"]["stream"] == stream), key=lambda e: e["ts"]
    )
    gaps, last, end = list[dict[str, Any]](), first, first["ts"] + first["dur"]
    for event in others:
        if event["ts"] > end:
            names = {"after": last["name"][:100], "before": event["name"][:100]}
            gaps.append({"us": event["ts"] - end, **names})
        if event["ts"] + event["dur"] > end:
            last, end = event, event["ts"] + event["dur"]
    window = end - first["ts"]
    return {
        "window_ms": window / 1e3,
        "idle_pct": 100 * sum(gap["us"] for gap in gaps) / window,
        "longest_gaps": sorted(gaps, key=lambda gap: -gap["us"])[:MOST],
        "kernels": [
            {"ms": us / 1e3, "pct": 100 * us / times.total(), "name": name[:160]}
            for name, us in times.most_common(MOST)
        ],
    }


def measure_rates(work: Workload, device: torch.device) -> dict[str, float | str]:
    """Return TFLOP/s of matmuls and of attention, GB/s of copies, and microseconds of a launch."""
    options: dict[str, Any] = {"device": device, "dtype": getattr(torch, work.dtype)}
    found: dict[str, float | str] = {}
    for name, _, flops, seconds in timed(work, device):
        for way, each in zip(WAYS, seconds, strict=True):
            found[f"matmul {name}, {way}, TFLOP/s"] = flops / each / 1e12
    for name in BACKENDS:
        for way, rate in attention_rates(work, name, options).items():
            found[f"attention by {name}, {way}"] = rate
    size = 1 << 28 if device.type == "cuda" else 1 << 20
    source, into = torch.empty(size, device=device), torch.empty(size, device=device)
    copy_s = best_s(lambda: into.copy_(source), device)
    found["memory, GB/s"] = 2 * source.nbytes / copy_s / 1e9
    host = torch.empty(size, pin_memory=device.type == "cuda")
    copy_s = best_s(lambda: into.copy_(host, non_blocking=True), device)
    found["host to device, GB/s"] = host.nbytes / copy_s / 1e9
    x, count = torch.zeros(1, device=device), 500  # in a row, which the device keeps up with
    launches_s = best_s(lambda: [x.add_(1) for _ in range(count)], device)
    found["launch by the host, us"] = launches_s / count * 1e6
    return found


def attention_rates(work: Workload, backend: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return TFLOP/s of causal attention, half of all pairs counted, and the operator that ran."""
    head = work.dim // work.n_heads
    shapes = [(work.batch, n, work.seq_len, head) for n in (work.n_heads, *2 * [work.n_kv_heads])]
    q, k, v = (torch.randn(shape, **options, requires_grad=True) for shape in shapes)
    flops = 4 * work.batch * work.dim * work.seq_len**2 / 2
    core = CausalAttention()

    def forward() -> torch.Tensor:
        return core(q, k, v, scale=head**-0.5)

    try:
        with sdpa_kernel(BACKENDS[backend]):
            output = forward()
            grad = torch.randn_like(output)
            forward_s = best_s(forward, output.device)
            backward_s = best_s(
                lambda: torch.autograd.grad(output, (q, k, v), grad, retain_graph=True),
                output.device,
            )
            with torch.profiler.profile() as profile:
                forward()
    except RuntimeError as error:  # no such kernel for these shapes, or on this device
        return {"not available": str(error).splitlines()[0]}
    names = {event.key for event in profile.key_averages()}
    kinds = sorted(name for name in names if any(word in name.lower() for word in ATTENTION))
    return {
        "forward, TFLOP/s": flops / forward_s / 1e12,
        "backward, TFLOP/s": 2.5 * flops / backward_s / 1e12,  # five matmuls for the forward's two
        "kernels": ", ".join(kinds)[:400],
    }


def job_words(work: Workload, folder: Path, steps: int) -> dict[str, object]:
    """Return the keys of a job whose every step is reported."""
    return job_keys(replace(work, steps=steps), folder) | {
        "training.global_batch_size": work.batch,
        "lr_scheduler.warmup_steps": 2,
        "activation_checkpoint.mode": "selective",
        "checkpoint.enable": "false",
        "validation.enable": "false",
    }


def run_job(
    work: Workload, folder: Path, extra: Mapping[str, object], *, steps: int = 14
) -> dict[str, Any]:
    """Run a job by `meshwright train`; return its figures, or its error."""
    return run_words(job_words(work, folder, steps) | extra, folder, steps=steps)


def run_words(given: Mapping[str, object], folder: Path, *, steps: int) -> dict[str, Any]:
    """Run a job of these keys, whose last steps are traced; return its figures, or its error."""
    words = dict(given) | {
        "job.dump_folder": folder.resolve(),
        "training.steps": steps,
        "profiling.enable_profiling": "true",
        "profiling.profile_freq": steps,
        "profiling.profiler_warmup": 1,
        "profiling.profiler_active": TRACED,
    }
    command = [sys.executable, "-m", "meshwright", "train", "debug_model"]
    command += [f"--{key}={value}" for key, value in words.items()]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"NGPU": "1", "PYTHONPATH": paths}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output.txt").open("w+") as file:
        # at the limit it is killed, and its ranks die with it
        limited = ["timeout", "--signal=KILL", str(LIMIT_S), *command]
        code = subprocess.run(limited, env=env, cwd=ROOT, stdout=file, stderr=file).returncode
        file.seek(0)
        end = file.read().strip()[-1500:]
    if code != 0:
        return {"error": end or f"nothing was printed in {LIMIT_S} s", "exit_code": code}
    return read_job(folder, steps)


def read_job(folder: Path, steps: int) -> dict[str, Any]:
    """Return the figures of a job: medians of the steps that are neither first nor traced."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    steady = range(WARM_UP + 1, steps - TRACED)  # the profiler warms up in the step before
    records = [record for record in lines if record["step"] in steady]
    found: dict[str, Any] = {
        key: median(record[key] for record in records)
        for key in ("time/step_s", "time/wps", "time/tflops", "time/mfu_pct", "memory/peak_gib")
        if all(record.get(key) is not None for record in records)
    }
    (trace,) = folder.glob("profile_traces/*/rank_0.json")
    found["trace"] = str(trace)
    return found | stream_use(json.loads(trace.read_text())["traceEvents"])


def jobs_of(work: Workload) -> dict[str, tuple[Workload, dict[str, str]]]:
    """Return workload and further keys of each job, by name."""
    float8 = {"float8.enable": "true", "float8.emulate": str(work == TINY).lower()}
    jobs = {f"batch {n}": (replace(work, batch=n), dict[str, str]()) for n in (1, 2, 4)}
    jobs["batch 2, float8"] = replace(work, batch=2), float8
    jobs["batch 2, documents"] = replace(work, batch=2), {"training.mask_documents": "true"}
    if work == TINY:
        return jobs | {"experts": (TINY, {"model.name": "qwen3_moe"})}
    experts = {"model.name": "qwen3_moe", "model.flavor": "qwen3_30b_a3b"}
    whole = {"model.flavor": "llama3_1b", "activation_checkpoint.mode": "none"}
    return jobs | {"experts": (QWEN3_30B_A3B, experts), "1B": (LLAMA_1B, whole)}


def show(result: Mapping[str, Any]) -> None:
    """Print the tables: rates, and jobs."""
    name = result["machine"]["device"]
    print(f"\n{name}, torch {result['machine']['torch']}")
    for key, value in result["rates"].items():
        print(f"  {value if isinstance(value, str) else f'{value:10.2f}'}  {key}")
    columns = {
        "time/wps": "tokens/s",
        "time/step_s": "step s",
        "time/mfu_pct": "MFU %",
        "idle_pct": "idle %",
        "memory/peak_gib": "GiB",
    }
    print("".join(f"{title:>12}" for title in columns.values()))
    for job, figures in result.get("jobs", {}).items():
        if "error" in figures:
            print(f"  {job}: FAILED, {figures['error'].splitlines()[-1]}")
            continue
        cells = [f"{figures[key]:12.2f}" if key in figures else f"{'-':>12}" for key in columns]
        print("".join(cells) + f"  {job}")


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("outputs/gpu_speed"))
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, eager")
    every = list(jobs_of(LLAMA_8B))
    parser.add_argument("--jobs", nargs="*", choices=every, default=every, help="default: all")
    given = parser.parse_args()
    device = hardware.pick_device(0)
    work = TINY if given.tiny else LLAMA_8B
    jobs = jobs_of(work)
    given.folder.mkdir(parents=True, exist_ok=True)
    machine = {"device": hardware.device_name(device), "torch": torch.__version__}
    machine |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    result: dict[str, Any] = {"machine": machine, "workload": work.__dict__, "jobs": {}}

    def save() -> None:
        (given.folder / "speed.json").write_text(json.dumps(result, indent=1) + "\n")

    result["rates"] = measure_rates(work, device)
    save()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # for the jobs
    for name in given.jobs:
        print(f"{name} ...", file=sys.stderr, flush=True)
        folder = given.folder / name.replace(", ", "_").replace(" ", "_")
        result["jobs"][name] = run_job(jobs[name][0], folder, jobs[name][1])
        save()
    show(result)
    sys.exit(any("error" in figures for figures in result["jobs"].values()))


if __name__ == "__main__":
    main()
