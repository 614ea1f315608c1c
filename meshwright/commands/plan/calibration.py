"""Measures the devices of this machine, for predictions of step time.

    torchrun --standalone --nproc-per-node N -m meshwright.commands.plan.calibration FILE

Small jobs take steps by the trainer's own functions, and every operator is timed. All ranks measure
at the same time, as they share a machine. Other work comes and goes, so each job runs in several
rounds, and the middle one of its steps counts.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from meshwright.commands.plan import torch_names
from meshwright.commands.plan.rates import Measured, Point, write_rates
from meshwright.commands.plan.simulate import plan_job
from meshwright.commands.plan.trace import SENT, Collective, Operator, Scope, Trace
from meshwright.config.loader import load_config
from meshwright.config.section import BYTES
from meshwright.metrics.peak_flops import peak_of
from meshwright.models.batch import Batch
from meshwright.parallelisms.initialize import initialize
from meshwright.parallelisms.meshes import Meshes, barrier, build_meshes, start_process_group
from meshwright.system import device as hardware
from meshwright.system.machine import count_gpus
from meshwright.train.bad_steps import BadStepDetector
from meshwright.train.trainer import Trainer

# torch 2.13 deprecates the only names that 2.11 has
_all_gather, _reduce_scatter = (
    (dist.all_gather_single, dist.reduce_scatter_single)
    if hasattr(dist, "all_gather_single")
    else (dist.all_gather_into_tensor, dist.reduce_scatter_tensor)
)


DTYPES = ("bfloat16", "float32")


ROUNDS = 5


STEPS = 2
"""Of a job in a round, with clocks."""


SIZES = tuple(1 << power for power in range(14, 27, 3))
"""Bytes of collectives."""


LARGER = 8
"""A GPU's jobs have so many times the tokens."""


@dataclass(frozen=True)
class Job:
    """A model of two layers, and the size of its microbatches."""

    dim: int
    n_heads: int
    vocab_size: int
    seq_len: int
    sequences: int
    microbatches: int = 1
    """Above 1, gradients are added up."""


JOBS = (
    Job(128, 2, 2048, 128, 4),
    Job(256, 4, 4096, 256, 8, microbatches=2),
    Job(384, 6, 2048, 512, 4),
    Job(512, 4, 8192, 256, 12),
    Job(512, 8, 2048, 1024, 2, microbatches=2),
    Job(768, 12, 16384, 512, 4),
    Job(1024, 8, 2048, 2048, 1),
)


class Clock(torch_names.TorchDispatchMode):
    """Within, operators are noted in `trace` and timed."""

    def __init__(self, trace: Trace, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace, self._is_gpu = trace, device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        start = self._now()
        output = func(*args, **(kwargs or {}))
        end, before = self._now(), len(self._trace.entries)
        self._trace.see(func, args, kwargs or {}, output)
        if self._trace.entries[before:] and isinstance(self._trace.entries[-1], Operator):
            self._marks.append((start, end))
        return output

    def seconds(self) -> list[float]:
        """Return the time of each `Operator` of the trace."""
        if not self._is_gpu:
            return [end - start for start, end in self._marks]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in self._marks]


class Runner:
    """One job on this rank, again and again.

    Attributes:
        timed: seconds of each operator, of every step with clocks.
        plain: seconds of steps without clocks.
        entries: of a step.
    """

    def __init__(self, job: Job, dtype: str, device: torch.device) -> None:
        self._job, self._dtype, self._device = job, dtype, device
        self.entries: list[Operator | Collective] = []
        self.timed: list[list[float]] = []
        self.plain: list[float] = []

    def run(self) -> None:
        """Build the job, and take some steps."""
        ranks, device = dist.get_world_size(), self._device
        plan = plan_job(load_config(_words(self._job, self._dtype, device)), ranks, is_gpu=False)
        meshes = build_meshes(plan.dims, device.type)
        trainer = Trainer(plan, meshes, device)
        for stage in trainer.model.stages:
            initialize(stage, plan.config.training.seed)
        detector = BadStepDetector(device, plan.config.bad_steps)
        shape = (plan.config.training.local_batch_size, self._job.seq_len)
        tokens = torch.randint(self._job.vocab_size, shape)
        batches = [Batch(tokens, tokens.roll(-1, 1), None).send(device)] * self._job.microbatches

        def step(number: int) -> None:
            trainer.step(number, batches, detector)

        step(1)  # makes the optimizer's state
        self.plain.append(seconds_of(partial(step, 2), device))
        for number in range(3, 3 + STEPS):
            self._time(partial(step, number), meshes)

    def _time(self, step: Callable[[], None], meshes: Meshes) -> None:
        trace = Trace(meshes)
        trace.scope = Scope(trace.see)
        if self._device.type == "cuda":
            # The host, slow beside a clock, works ahead: otherwise clocks count its time. Private;
            # gone: AttributeError, and the calibration ends.
            torch.cuda._sleep(2_000_000_000)
        with Clock(trace, self._device) as clock:
            step()
        self.entries = trace.entries
        self.timed.append(clock.seconds())

    @property
    def seconds(self) -> list[float]:
        """Of each operator, in the middle one of all steps."""
        return sorted(self.timed, key=sum)[(len(self.timed) - 1) // 2]

    def points(self) -> dict[tuple[str, int, int], list[float]]:
        """Return the seconds of operators, by kind, bytes and FLOPs."""
        found: dict[tuple[str, int, int], list[float]] = {}
        operators = [entry for entry in self.entries if isinstance(entry, Operator)]
        for one, seconds in zip(operators, self.seconds, strict=True):
            kind = f"{one.name} {one.dtype}"
            found.setdefault((kind, rounded(one.num_bytes), rounded(one.flops)), []).append(seconds)
        return found


def rounded(count: int) -> int:
    """Return `count` with two digits: operators that differ by a few bytes are one point."""
    return int(float(f"{count:.1e}"))


def _words(job: Job, dtype: str, device: torch.device) -> list[str]:
    ranks = dist.get_world_size()
    size = job.sequences * (LARGER if device.type == "cuda" else 1)
    values = {
        "model.tokenizer_path": BYTES,
        "model.args.dim": job.dim,
        "model.args.n_layers": 2,
        "model.args.n_heads": job.n_heads,
        "model.args.n_kv_heads": job.n_heads,
        "model.args.vocab_size": job.vocab_size,
        "training.seq_len": job.seq_len,
        "training.local_batch_size": size,
        "training.global_batch_size": size * ranks * job.microbatches,
        "training.mixed_precision_param": dtype,
        "parallelism.data_parallel_shard_degree": ranks,
    }
    return [f"--{key}={value}" for key, value in values.items()]


def seconds_of(function: Callable[[], object], device: torch.device) -> float:
    """Return the time of a call, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def time_collectives(device: torch.device) -> dict[str, list[tuple[float, float]]]:
    """Return (bytes that a rank sends, seconds) of each kind over all ranks, the median of ten."""
    ranks, found = dist.get_world_size(), dict[str, list[tuple[float, float]]]()
    if ranks == 1:
        return found
    for size in SIZES:
        whole = torch.zeros(size // 4 // ranks * ranks, device=device)
        part = whole.chunk(ranks)[0].clone()
        calls: dict[str, Callable[[], object]] = {
            "all_gather": partial(_all_gather, whole, part),
            "reduce_scatter": partial(_reduce_scatter, part, whole),
            "all_reduce": partial(dist.all_reduce, whole),
        }
        for kind, call in calls.items():
            taken = []
            for _ in range(10):
                barrier()
                taken.append(seconds_of(call, device))
            sent = whole.nbytes * SENT[kind](ranks)
            found.setdefault(kind, []).append((sent, median(taken)))
    return found


def measure(device: torch.device) -> Measured:
    """Return the rates of this machine. Collective."""
    runners = [Runner(job, dtype, device) for job in JOBS for dtype in DTYPES]
    rounds = [runner for _ in range(ROUNDS) for runner in runners]
    is_first = dist.get_rank() == 0
    for runner in tqdm(rounds, desc="measured", disable=None if is_first else True):
        runner.run()
    operators: dict[str, list[Point]] = {}
    found: dict[tuple[str, int, int], list[float]] = {}
    for runner in runners:
        for key, seconds in runner.points().items():
            found.setdefault(key, []).extend(seconds)
    for (kind, num_bytes, flops), seconds in sorted(found.items()):
        # at least a nanosecond: clocks of a GPU may see no time between them
        mean = float(f"{max(sum(seconds) / len(seconds), 1e-9):.4g}")
        operators.setdefault(kind, []).append((num_bytes, flops, mean))
    ranks, today = dist.get_world_size(), datetime.date.today().isoformat()
    threads = "" if device.type == "cuda" else f", threads of each: {torch.get_num_threads()}"
    name = hardware.device_name(device)
    rates = Measured(
        source=f"measured on {name}, ranks: {ranks}{threads}, torch {torch.__version__}, {today}",
        device=name,
        peak={dtype: _peak(device, getattr(torch, dtype)) for dtype in DTYPES},
        link=0.0,
        network=0.0,
        is_gpu=device.type == "cuda",
        ranks=ranks,
        host_s=0.0,
        operators=operators,
        collectives=time_collectives(device),
    )
    return _with_host(rates, runners[0])


def _peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return FLOP/s by the data sheet, or the best of three square matmuls."""
    if peak := peak_of(device, dtype):
        return peak.flops_per_s
    n = 1024 if device.type == "cpu" else 8192
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        a @ b
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        taken.append(time.perf_counter() - start)
    return 2 * n**3 / min(taken)


def _with_host(rates: Measured, smallest: Runner) -> Measured:
    """Fill in links, and the host's time: the rest of the smallest job's step."""
    collectives = [entry for entry in smallest.entries if isinstance(entry, Collective)]
    waited = sum(rates.collective_seconds(entry, 1 << 30) for entry in collectives)
    rest = median(smallest.plain) - sum(smallest.seconds) - waited
    host_s = max(0.0, rest) / len(smallest.seconds)
    # the highest: a search needs a bound, and middle sizes may be faster than the largest
    widths = [sent / seconds for curve in rates.collectives.values() for sent, seconds in curve]
    return replace(rates, link=max(widths, default=0.0), host_s=host_s)


def main() -> None:
    """Measure on this rank; the first writes the file."""
    device = hardware.pick_device(int(os.environ.get("LOCAL_RANK", "0")), count_gpus())
    start_process_group(device, timeout_s=600)
    rates = measure(device)
    if dist.get_rank() == 0:
        write_rates(rates, Path(sys.argv[1]))
    barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads abort some ranks during interpreter teardown


if __name__ == "__main__":
    main()
