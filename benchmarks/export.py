"""Memory that `meshwright export` takes of a checkpoint of 1.2 GB, above what it has after its
imports: anonymous memory, for files that are mapped can be dropped at any time.

    python benchmarks/export.py --folder /a/disk
"""

import argparse
import json
import multiprocessing
import re
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.checkpoint.conversion.export import Job, export
from meshwright.checkpoint.manager import CheckpointManager
from meshwright.checkpoint.manifest import NO_JOB
from meshwright.checkpoint.state import MODEL
from meshwright.checkpoint.weights import CheckpointWeights
from meshwright.config.job_config import Checkpoint
from meshwright.models.decoder import Decoder
from meshwright.models.families import MODELS
from meshwright.models.families.llama import LlamaArgs
from meshwright.system.files import Place

ARGS = LlamaArgs(dim=1024, n_layers=18, n_heads=16, n_kv_heads=8, hidden_dim=3072, vocab_size=32000)
SEQ_LEN = 512


class Weights:
    """A model's tensors, as a checkpoint has them."""

    def __init__(self, model: Decoder) -> None:
        self._state = {MODEL + name: tensor for name, tensor in model.state_dict().items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All of them."""
        return self._state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """They are not loaded here."""


class AnonymousMemory:
    """The most that this process has had since `begin`, looked at every millisecond."""

    def __init__(self) -> None:
        self.peak = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def now(self) -> int:
        """In bytes."""
        match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert match is not None
        return int(match[1]) * 1024

    def begin(self) -> None:
        """Forget what was."""
        self.peak = self.now()

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, self.now())
            time.sleep(0.001)


def save(folder: Path) -> None:
    """A checkpoint of random weights; runs in a process of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = Decoder(ARGS, SEQ_LEN)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    manager = CheckpointManager(folder, Checkpoint(enable=True))
    manager.save(1, Weights(model), NO_JOB | {"step": 1}, True)


def measure(folder: Path, dtype: torch.dtype) -> None:
    """Export once, and print what it took; runs in a process of its own."""
    import transformers.models.llama.modeling_llama  # noqa: F401 (it compares; not to be counted)

    spec, memory = MODELS["llama"], AnonymousMemory()
    job = Job(
        weights=CheckpointWeights(Place("CHECKPOINT", folder / "step-1")),
        form=spec.hf,
        args=ARGS,
        seq_len=SEQ_LEN,
        dtype=dtype,
        max_shard_bytes=10**9,
        special_tokens={},
        other_files={},
        encode=None,
        texts=(),
    )
    torch.mm(torch.ones(9, 9), torch.ones(9, 9))  # its threads and buffers are not counted either
    with torch.device("meta"):
        size = 4 * sum(parameter.numel() for parameter in Decoder(ARGS, SEQ_LEN).parameters())
    before = memory.now()
    peaks: list[int] = []

    def say(what: str) -> None:
        """It says something after each part of the work."""
        print(f"  {what}")
        peaks.append(memory.peak - before)
        memory.begin()

    memory.begin()
    export(job, folder / str(dtype), say)
    parts = ", ".join(f"{peak / size:.2f}" for peak in peaks)
    print(
        f"{dtype}: peak of each part, in multiples of the model in fp32 ({size:,} bytes): {parts}"
    )


def main() -> None:
    """Save, and export in both types."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None, help="with 4 GB to spare")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        jobs = [(save, (folder,))]
        jobs += [(measure, (folder, dtype)) for dtype in (torch.float32, torch.bfloat16)]
        for function, arguments in jobs:
            process = context.Process(target=function, args=arguments)
            process.start()
            process.join()
            assert process.exitcode == 0
        print(json.dumps({"torch": torch.__version__}))


if __name__ == "__main__":
    main()
