"""Checkpoints of 1.2 GB: what a save costs a step, how fast it is
beside the disk, and whether a flipped bit is found.

One process trains a Llama with the trainer's own parts, saving again and again in each
`checkpoint.async_mode`: the stall is what `save` keeps the step from. The disk is measured in the
same minute by `dd` with `conv=fsync`, writing as many bytes, before and after every save. Peak
memory is that of a fresh process for each mode, above what it has before its first save.

    python benchmarks/checkpoint.py --saves 5 --folder /a/disk
    python benchmarks/checkpoint.py --flips 100
"""

import argparse
import json
import multiprocessing
import os
import random
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from io import RawIOBase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.checkpoint import commit
from meshwright.checkpoint.manager import CheckpointManager
from meshwright.checkpoint.manifest import NO_JOB
from meshwright.checkpoint.state import TrainingTensors
from meshwright.config.job_config import Checkpoint
from meshwright.models.decoder import Decoder
from meshwright.models.families.llama import LlamaArgs

ARGS = LlamaArgs(
    dim=768, n_layers=12, n_heads=8, n_kv_heads=8, hidden_dim=2048, vocab_size=8192
)  # 98 M parameters, 1.2 GB with AdamW's state
BATCH, SEQ_LEN = 1, 128
MODES = ("disabled", "thread")


class Job:
    """A model, its optimizer, and steps as any loop takes them."""

    def __init__(self) -> None:
        self.model = Decoder(ARGS, SEQ_LEN)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tensors = TrainingTensors(self.model, self.optimizer, 0)
        self.take_step()

    def take_step(self) -> float:
        """One step; its seconds."""
        start = time.perf_counter()
        tokens = torch.randint(ARGS.vocab_size, (BATCH, SEQ_LEN))
        logits = self.model(tokens, positions=torch.arange(SEQ_LEN))
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.state_dict().values())


def start_alone() -> None:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def dd(folder: Path, num_bytes: int) -> float:
    """Bytes a second that the disk takes in one stream, fsync included.

    Random ones, from a file that the page cache holds: some disks are quicker with zeros.
    """
    source, file = folder / "random", folder / "dd"
    if not source.exists():
        with open(source, "wb") as out:
            for _ in range(-(-num_bytes // 2**20)):
                out.write(os.urandom(2**20))
    start = time.perf_counter()
    command = ["dd", f"if={source}", f"of={file}", "bs=1M", "conv=fsync"]
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - start
    file.unlink()
    return num_bytes / seconds


def peak_bytes(pid: int | str = "self") -> int:
    """The most memory that a process has had since `forget_peak`."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def forget_peak() -> None:
    """Begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(mode: str, folder: Path, saves: int, results: Any) -> None:
    """Save again and again in one mode; runs in a process of its own."""
    start_alone()
    job = Job()
    steps = [job.take_step() for _ in range(5)]
    figures: dict[str, Any] = {"mode": mode, "bytes": job.num_bytes}
    figures["step_s"] = statistics.median(steps)
    stalls, writes, rates, during = [], [], [], []
    config = Checkpoint(enable=True, async_mode=mode, keep_latest_k=1)
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    manager = CheckpointManager(folder / "checkpoint", config)
    before = peak_bytes_now()
    forget_peak()
    with manager:
        manager.prepare_saves(job.tensors)
        while manager.is_writing:
            job.take_step()
        for number in range(1, saves + 1):
            rates.append(dd(folder, figures["bytes"]))
            start = time.perf_counter()
            manager.save(number, job.tensors, NO_JOB | {"step": number}, False)
            stalls.append(time.perf_counter() - start)
            while manager.is_writing:
                during.append(job.take_step())
            writes.append(time.perf_counter() - start)
        rates.append(dd(folder, figures["bytes"]))
        figures["extra_memory"] = (peak_bytes() - before) / figures["bytes"]
    figures |= {"first_stall_s": stalls[0], "stall_s": statistics.median(stalls[1:])}
    figures |= {"write_s": statistics.median(writes[1:]), "disk": statistics.median(rates)}
    figures["step_during_s"] = statistics.median(during) if during else None
    start = time.perf_counter()
    found = CheckpointManager(folder / "checkpoint", config).select_and_verify()
    figures["verify_s"] = time.perf_counter() - start
    assert found is not None
    start = time.perf_counter()
    manager.load(job.tensors, found)
    figures["load_s"] = time.perf_counter() - start
    results.put(figures)
    results.close()
    results.join_thread()
    os._exit(0)


def peak_bytes_now() -> int:
    """Memory of this process."""
    match = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def report(figures: dict[str, Any], sync_stall: float) -> None:
    """One line for a mode."""
    size, step = figures["bytes"], figures["step_s"]
    rate = size / figures["write_s"]
    print(
        f"{figures['mode']:9} stall {figures['stall_s']:.3f} s = {figures['stall_s'] / step:.2f} "
        f"steps, {100 * figures['stall_s'] / sync_stall:.1f} % of the synchronous one "
        f"(first {figures['first_stall_s']:.3f} s); whole save {figures['write_s']:.2f} s = "
        f"{rate / 1e6:.0f} MB/s, disk {figures['disk'] / 1e6:.0f} MB/s, "
        f"ratio {rate / figures['disk']:.2f}; step {step:.3f} s, meanwhile "
        f"{figures['step_during_s'] or float('nan'):.3f} s; extra memory "
        f"{figures['extra_memory']:.2f} x the state; verify {figures['verify_s']:.2f} s, "
        f"load {figures['load_s']:.2f} s = {size / figures['load_s'] / 1e6:.0f} MB/s"
    )


def flip(folder: Path, flips: int) -> None:
    """Flip bits, one at a time, and count how many are found."""
    start_alone()
    job = Job()
    config = Checkpoint(enable=True)
    manager = CheckpointManager(folder / "checkpoint", config)
    manager.save(1, job.tensors, NO_JOB | {"step": 1}, False)
    checkpoint = commit.step_folder(folder / "checkpoint", 1)

    def is_whole() -> bool:
        try:
            return manager.select_and_verify() is not None
        except commit.ConfigError:
            return False

    rng, found, names = random.Random(0), 0, sorted(p.name for p in checkpoint.iterdir())
    alarms = sum(not is_whole() for _ in range(10))
    for _ in range(flips):
        path = checkpoint / rng.choice(names)
        with open(path, "r+b", buffering=0) as file:
            position, bit = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)
            flip_bit(file, position, bit)
            found += not is_whole()
            flip_bit(file, position, bit)
    print(f"{flips} single bits flipped in {', '.join(names)}: {found} found")
    print(f"10 loads of the intact checkpoint: {alarms} false alarms")


def flip_bit(file: RawIOBase, position: int, bit: int) -> None:
    """Change one bit; do it again to undo it."""
    file.seek(position)
    (byte,) = file.read(1) or b""
    file.seek(position)
    file.write(bytes([byte ^ bit]))


def in_a_process(function: Callable[..., None], *arguments: Any) -> dict[str, Any]:
    """What it puts into the queue it is given last."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=function, args=(*arguments, results))
    process.start()
    figures: dict[str, Any] = results.get(timeout=120)
    process.join()
    return figures


def main() -> None:
    """Measure, or flip."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--flips", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        if args.flips:
            flip(Path(name), args.flips)
            return
        sync_stall = 0.0
        for mode in MODES:
            figures = in_a_process(measure, mode, Path(name), args.saves)
            sync_stall = sync_stall or figures["stall_s"]
            report(figures, sync_stall)
        print(json.dumps({"bytes": figures["bytes"], "torch": torch.__version__}))


if __name__ == "__main__":
    main()
