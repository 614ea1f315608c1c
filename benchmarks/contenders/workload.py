"""The workload of benchmarks/throughput.py, and how each contender measures itself.

It imports torch alone: contenders run in environments that lack meshwright.
"""

import argparse
import hashlib
import json
import os
import resource
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

LR, BETAS = 8e-4, (0.9, 0.95)
"""Of AdamW, in every step and without weight decay; gradients are clipped to the norm 1."""
NAMES = {
    "_orig_mod.": "",
    "model.": "",
    "blocks.": "layers.",
    "embedding.": "tok_embeddings.",
    "embed_tokens.": "tok_embeddings.",
    "lm_head.": "output.",
    "attention.": "",
    "self_attn.": "",
    "feed_forward.": "",
    "mlp.": "",
    **{f"{letter}_proj.": f"w{letter}." for letter in "qkvo"},
    "gate_proj.": "w1.",
    "down_proj.": "w2.",
    "up_proj.": "w3.",
}
"""Parts of a parameter's name in some contender, and what they are in all."""


@dataclass(frozen=True)
class Workload:
    """A Llama and how it is trained. Widths are in elements, lengths in tokens."""

    dim: int = 512
    n_layers: int = 8
    n_heads: int = 8
    n_kv_heads: int = 4
    hidden_dim: int = 1408
    vocab: int = 8192
    seq_len: int = 512
    batch: int = 4
    """Sequences of a rank per step."""
    dtype: str = "bfloat16"
    """Of matrix products; weights and optimizer are float32."""
    compile: bool = False
    ranks: int = 1
    steps: int = 12

    @property
    def flops_per_token(self) -> int:
        """6 per weight of a matrix, and the products of causal attention, counted in full."""
        kv = self.dim * self.n_kv_heads // self.n_heads
        attention = 2 * self.dim * (self.dim + kv)
        block = attention + 3 * self.dim * self.hidden_dim
        products = self.n_layers * block + self.dim * self.vocab
        return 6 * products + 12 * self.n_layers * self.dim * self.seq_len


def job_keys(work: Workload, folder: object) -> dict[str, object]:
    """Return the keys of a job of ours that trains it and reports every step."""
    args = ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim")
    return {f"model.args.{name}": getattr(work, name) for name in args} | {
        "job.dump_folder": folder,
        "model.args.vocab_size": work.vocab,
        "training.seq_len": work.seq_len,
        "training.local_batch_size": work.batch,
        "training.steps": work.steps,
        "optimizer.lr": LR,
        "optimizer.weight_decay": 0.0,
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.total_steps": 10**9,
        "training.mixed_precision_param": work.dtype,
        "compile.enable": str(work.compile).lower(),
        "metrics.log_freq": 1,
    }


def from_command_line() -> Workload:
    """Read the fields of `Workload` as flags."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", type=json.loads)
    return Workload(**parser.parse_args().workload)


def to_command_line(workload: Workload) -> str:
    """Return the argument that `from_command_line` reads."""
    return json.dumps(asdict(workload))


def random_tokens(workload: Workload, count: int) -> torch.Tensor:
    """Return (count, batch, seq_len + 1) int64, the same for every contender."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, workload.batch, workload.seq_len + 1)
    return torch.randint(workload.vocab, shape, generator=generator)


@torch.no_grad()
def fill(parameters: Iterable[tuple[str, Tensor]], head: int = 0) -> None:
    """Give each parameter the value of its name: the same for every contender on one device.

    Args:
        head: width of a head, for a model whose rotary pairs are the halves of a head; others
            rotate neighbors, so rows of queries and keys are in another order.
    """
    for name, parameter in parameters:
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little")
        generator = torch.Generator(parameter.device).manual_seed(seed)
        value = torch.empty(parameter.shape, device=parameter.device)
        value.normal_(0.0, 0.02, generator=generator)
        if head and name.endswith(("wq.weight", "wk.weight")):
            pairs = value.view(-1, head // 2, 2, value.shape[1])
            value = pairs.transpose(1, 2).reshape(value.shape)
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        parameter.copy_(value)


class Stopwatch:
    """Notes every step: its loss, its end, and how busy this process and the whole machine have
    been."""

    def __init__(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.marks: list[tuple[float, float, float]] = []
        self.losses: list[float | Tensor] = []

    def step(self, loss: float | Tensor) -> None:
        """Call after each step."""
        self.losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        times = os.times()
        self.marks.append((time.time(), times.user + times.system, machine_busy_s()))

    def report(self) -> None:
        """Print one line for the parent. Each rank prints its own; the parent reads the first's."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_reserved()
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if int(os.environ.get("RANK", "0")) == 0:
            losses = [float(loss) for loss in self.losses]
            result = {"marks": self.marks, "peak_bytes": peak, "losses": losses}
            print("RESULT " + json.dumps(result), flush=True)


def machine_busy_s() -> float:
    """Seconds of CPU time that the machine's cores have worked, or were taken from it, so far."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
