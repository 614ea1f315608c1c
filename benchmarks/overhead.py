"""Throughput of the trainer over that of a bare loop: what data, metrics and care cost.

Both train the same Llama (dim 512, 8 layers, sequence 512, fp32, eager) on the same batches with
the same kernels and fused AdamW in one process. The bare loop is what anyone would write around the
model: loss, backward, clip, step; no data loading, no logging, no care. The two alternate step by
step, and each pair gives a ratio; the last line is their median, above 1 if the trainer is the
faster. The trainer's time includes its reports, to the end of their writing.

    python benchmarks/overhead.py --steps 32 --batch 8
    python benchmarks/overhead.py --batch 1 --metrics.grad_norm_by_group=true    (keys of the job)
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from meshwright.config.loader import load_config
from meshwright.datasets.cached_source import CachedSource
from meshwright.datasets.opening import open_data
from meshwright.datasets.samples import CachedSamples
from meshwright.metrics.sinks import Record
from meshwright.models.decoder import Decoder
from meshwright.parallelisms.initialize import initialize
from meshwright.system import hardware
from meshwright.system.log import log_to_console, logger
from meshwright.train.facts import look
from meshwright.train.job import run
from meshwright.train.resolve import ResolvedJob, resolve

SEQ_LEN = 512  # tokens
WARM_UP = 4  # pairs that are not counted
TOKENIZER = Path(__file__).parents[1] / "assets/tokenizers/python_2k.model"


def make_plan(folder: Path, steps: int, batch: int, more: list[str]) -> ResolvedJob:
    """A job as a user would run it: logging every step."""
    dimensions = {"dim": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 4, "hidden_dim": 1536}
    keys = {f"model.args.{name}": value for name, value in dimensions.items()} | {
        "job.dump_folder": folder,
        "model.tokenizer_path": TOKENIZER,
        "training.seq_len": SEQ_LEN,
        "training.local_batch_size": batch,
        "training.steps": steps,
        "training.mixed_precision_param": "float32",
        "metrics.log_freq": 1,
        "compile.enable": "false",  # as the bare loop
    }
    config = load_config([*(f"--{key}={value}" for key, value in keys.items()), *more])
    return resolve(config, look(config, 1))


class BareLoop:
    """A plain training loop, one step per call: the last metrics sink, so that it runs after a step
    of the trainer and its reports."""

    def __init__(self, plan: ResolvedJob, batch: int, steps: int) -> None:
        (source,) = open_data("training", plan.config)
        assert isinstance(source, CachedSource)
        cached = CachedSamples(source.cache, SEQ_LEN + 1, plan.config.training.seed)
        device = hardware.pick_device(0)
        samples = torch.stack(
            [torch.from_numpy(cached.read(index).tokens) for index in range(steps * batch)]
        )
        self.batches = iter(samples.to(device).split(batch))
        self.model = Decoder(plan.model_args, SEQ_LEN).to(device)
        initialize(self.model, seed=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=8e-4, fused=True)
        self.device = device
        self.pairs: list[tuple[float, float]] = []
        """Seconds of the trainer's step with its reports, and of the bare step after it."""
        self.since = time.perf_counter()

    def write(self, record: Record) -> None:
        """Take the step that the trainer has just taken."""
        start = time.perf_counter()
        tokens = next(self.batches)
        labels = tokens[:, 1:]
        (self.model(tokens[:, :-1], labels) / labels.numel()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        now = time.perf_counter()
        self.pairs.append((start - self.since, now - start))
        self.since = now

    def close(self) -> None:
        """Nothing to flush."""


def main() -> None:
    """Train with both, then print what they took and, last, the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    args, more = parser.parse_known_args()
    log_to_console()
    logger.setLevel("WARNING")
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(Path(folder), args.steps, args.batch, more)
        bare = BareLoop(plan, args.batch, args.steps)
        run(plan, extra_sinks=[bare])
    pairs = bare.pairs[WARM_UP:]
    for name, seconds in zip(("trainer", "bare"), zip(*pairs, strict=True), strict=True):
        print(f"{name:8} {args.batch * SEQ_LEN / median(seconds):8.0f} tokens/s")
    print(f"{len(pairs)} pairs on {hardware.device_name(bare.device)}, torch {torch.__version__}")
    print(f"median ratio:\n{median(bare_s / trainer_s for trainer_s, bare_s in pairs):.3f}")


if __name__ == "__main__":
    main()
