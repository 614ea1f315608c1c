"""Checkpoints of 1.2 GB: what a save costs a step, and how fast it is compared with the disk.

A process for each `checkpoint.async_mode` trains a Llama with the trainer's own parts and saves
again and again. The stall is the time that `save` keeps the step from. The disk is measured in the
same minute: as many bytes in one stream, with fsync, before and after every save.

    python benchmarks/checkpoint.py --saves 5 --folder /a/disk
    python benchmarks/checkpoint.py --saves 2 --layers 1 --dim 64      (a small one)
"""

import argparse
import multiprocessing
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from meshwright.checkpoint.listing import saved_steps
from meshwright.checkpoint.manager import CheckpointManager
from meshwright.checkpoint.manifest import NO_JOB
from meshwright.checkpoint.state import TrainingTensors
from meshwright.config.job_config import Checkpoint
from meshwright.models.decoder import Decoder
from meshwright.models.families.llama import LlamaArgs

BATCH, SEQ_LEN = 1, 128


class Job:
    """A model, its optimizer, and steps as any loop takes them."""

    def __init__(self, args: LlamaArgs) -> None:
        self.model, self.vocab_size = Decoder(args, SEQ_LEN), args.vocab_size
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tensors = TrainingTensors(self.model, self.optimizer, 0)
        self.take_step()

    def take_step(self) -> float:
        """Take one step; return its seconds."""
        start = time.perf_counter()
        tokens = torch.randint(self.vocab_size, (BATCH, SEQ_LEN))
        logits = self.model(tokens, positions=torch.arange(SEQ_LEN))
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def disk_rate(folder: Path, num_bytes: int) -> float:
    """Return the bytes per second that the disk takes in one stream, fsync included."""
    block, file = os.urandom(2**20), folder / "stream"  # some disks are faster with zeros
    start = time.perf_counter()
    with file.open("wb", buffering=0) as out:
        for _ in range(-(-num_bytes // len(block))):
            out.write(block)
        os.fsync(out)
    seconds = time.perf_counter() - start
    file.unlink()
    return num_bytes / seconds


def measure(mode: str, folder: Path, saves: int, args: LlamaArgs) -> None:
    """Save again and again in one mode and print a line; runs in a process of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    job = Job(args)
    size = sum(tensor.nbytes for tensor in job.tensors.state_dict().values())
    step_s = median(job.take_step() for _ in range(5))
    stalls, writes, disk = [], [], []
    config = Checkpoint(enable=True, async_mode=mode, keep_latest_k=1)
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    manager = CheckpointManager(folder / "checkpoint", config)
    with manager:
        manager.prepare_saves(job.tensors)
        for number in range(1, saves + 1):
            disk.append(disk_rate(folder, size))
            start = time.perf_counter()
            manager.save(number, job.tensors, NO_JOB | {"step": number}, False)
            stalls.append(time.perf_counter() - start)
            while number not in saved_steps(folder / "checkpoint"):
                job.take_step()
            writes.append(time.perf_counter() - start)
        disk.append(disk_rate(folder, size))
    with CheckpointManager(folder / "checkpoint", config).open() as found:
        assert found is not None
        start = time.perf_counter()
        manager.load(job.tensors, found)
        load_s = time.perf_counter() - start
    stall_s, rate = median(stalls[1:]), size / median(writes[1:])
    print(
        f"{mode:9} {size / 1e9:.2f} GB, a step {step_s:.3f} s; stall {stall_s:.3f} s = "
        f"{stall_s / step_s:.2f} steps (first {stalls[0]:.3f} s); a save {rate / 1e6:.0f} MB/s, "
        f"ratio to the disk {rate / median(disk):.2f}; load {size / load_s / 1e6:.0f} MB/s",
        flush=True,
    )
    os._exit(0)  # gloo's threads can abort during the interpreter's teardown


def main() -> None:
    """Measure each mode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saves", type=int, default=5, help="at least 2: the first is left out")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    given = parser.parse_args()
    # 98 M parameters by default, 1.2 GB with AdamW's state
    sizes = {"dim": given.dim, "hidden_dim": 8 * given.dim // 3, "n_layers": given.layers}
    args = LlamaArgs(**sizes, n_heads=8, n_kv_heads=8, vocab_size=8192)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        for mode in ("disabled", "thread"):
            process = context.Process(target=measure, args=(mode, Path(name), given.saves, args))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(process.exitcode)


if __name__ == "__main__":
    main()
