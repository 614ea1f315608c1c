"""Where the time of a training step goes: every operator of a few steps, by kind.

A job runs as its config says; torch.profiler records steps 4 to 6 of it. On a CPU each operator's
own time is counted, on a GPU its kernels'; what is left of a step is Python, or waiting. The
profiler itself slows a step down by a few percent, most of it Python.

    python benchmarks/step_parts.py --job.config_file train_configs/debug_model.toml
"""

import re
import sys
import tempfile
from collections import defaultdict
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.config.loader import load_config
from meshwright.metrics.records import Record
from meshwright.train.job import run
from meshwright.train.preflight import preflight

FIRST, LAST = 4, 6
KINDS = (  # the first that matches an operator's name
    ("attention", r"scaled_dot_product|flash|fmha|flex_attention|cpu_attention"),
    ("matrix products", r"\b(mm|addmm_?|bmm|linear|mkldnn|_mm)\b|gemm|nvjet|cutlass"),
    ("compiled kernels", r"Torch-Compiled|Compiled(Fx|Function)|cpp_fused|triton_"),
    ("loss", r"log_softmax|nll_loss|cross_entropy"),
    ("optimizer and clipping", r"fused_adam|foreach|multi_tensor|vector_norm|[Oo]ptimizer"),
    ("communication", r"c10d|gloo|nccl|fsdp::(?!split|chunk)|all_reduce"),
    (
        "casts, copies, FSDP2's buffers",
        r"copy_|::to\b|_to_copy|split_with|chunk_cat|fsdp|memcpy|cat\b",
    ),
    ("norm, RoPE, activation, residual", r"mul|add|rms|silu|rsqrt|mean|pow|stack|neg|sub|div|sum"),
    ("embedding", r"embedding|index"),
)


class Watch:
    """A sink that profiles steps `FIRST` to `LAST`."""

    def __init__(self) -> None:
        kinds = [ProfilerActivity.CPU]
        kinds += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self.profile, self.start, self.seconds = profile(activities=kinds), 0.0, 0.0

    def write(self, record: Record) -> None:
        """A step is over."""
        if record["step"] == FIRST - 1:
            self.profile.start()
            self.start = perf_counter()
        if record["step"] == LAST:
            self.seconds = perf_counter() - self.start
            self.profile.stop()

    def close(self) -> None:
        """Nothing to flush."""


def main() -> None:
    """Run the job and print its parts."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*sys.argv[1:], "--job.dump_folder", folder, "--metrics.log_freq", "1"]
        words += ["--training.steps", str(LAST + 1), "--checkpoint.enable", "false"]
        watch = Watch()
        run(preflight(load_config(words), world_size=1), extra_sinks=[watch])
    parts: dict[str, float] = defaultdict(float)
    for event in watch.profile.key_averages():
        own_us = event.self_device_time_total or event.self_cpu_time_total
        found = (kind for kind, pattern in KINDS if re.search(pattern, event.key))
        parts[next(found, "other operators")] += own_us / 1e6
    parts["Python, data, waiting"] = max(0.0, watch.seconds - sum(parts.values()))
    steps = LAST - FIRST + 1
    for kind, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        print(f"{kind:34} {1e3 * seconds / steps:8.1f} ms {100 * seconds / watch.seconds:5.1f} %")
    print(f"{'a step':34} {1e3 * watch.seconds / steps:8.1f} ms")


if __name__ == "__main__":
    main()
