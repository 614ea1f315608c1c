"""torchtitan 0.2.2, its Llama 3 and its trainer, on random tokens.

It was made for GPUs. On a CPU it gets some things here, none of them within a step: the device
type, stand-ins for a module that imports triton, for the monitor of a GPU's memory and for what
sets timeouts, and sums that gloo can reduce.
"""

import os
import sys
import tempfile
import types
from pathlib import Path

import torch

here = Path(__file__).parent
sys.path = [p for p in sys.path if Path(p).resolve() != here]  # this file has torchtitan's name
on_cpu = not torch.cuda.is_available()
if on_cpu:
    torch._utils._get_available_device_type = lambda: "cpu"
    kernels = types.ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None
    sys.modules[kernels.__name__] = kernels
    os.environ |= {"LOCAL_RANK": "0"}
    for key, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(key, value)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")

import torchtitan.protocols.train_spec as specs  # noqa: E402
import torchtitan.train  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components import metrics  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec  # noqa: E402
from torchtitan.models.llama3.model.args import RoPEScalingArgs  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

sys.path.insert(0, str(here))
from workload import LR, Stopwatch, fill, from_command_line, random_tokens  # noqa: E402


class NoMonitor(metrics.DeviceMemoryMonitor):
    """In place of the one that asks a GPU."""

    def __init__(self) -> None:
        self.device_name = "cpu"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        """Nothing is known."""
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        """Nothing to reset."""


class RandomTokens(list):
    """What its trainer asks of a data loader."""

    def state_dict(self) -> dict:
        """Nothing to save."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Nothing to load."""


class WatchedTrainer(Trainer):
    """Notes every step."""

    watch: Stopwatch
    loss: torch.Tensor

    def forward_backward_step(self, **inputs: object) -> torch.Tensor:
        """As it was; the loss is kept."""
        self.loss = super().forward_backward_step(**inputs)
        return self.loss

    def train_step(self, data_iterator: object) -> None:
        """As it was, and a mark."""
        super().train_step(data_iterator)
        self.watch.step(self.loss * torch.distributed.get_world_size())  # by all ranks' tokens


def main() -> None:
    """Train, and print the result."""
    w, watch = from_command_line(), Stopwatch()
    spec = get_train_spec()
    spec.model_args["bench"] = TransformerModelArgs(
        dim=w.dim,
        n_layers=w.n_layers,
        n_heads=w.n_heads,
        n_kv_heads=w.n_kv_heads,
        vocab_size=w.vocab,
        multiple_of=w.hidden_dim,  # it rounds 8/3 D up to a multiple
        rope_theta=500000,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),  # positions as they are
    )
    spec.build_tokenizer_fn = None
    spec.build_dataloader_fn = lambda **_: RandomTokens(
        ({"input": batch[:, :-1]}, batch[:, 1:]) for batch in random_tokens(w, w.steps)
    )
    parallelize = spec.parallelize_fn

    def on_gloo(model: torch.nn.Module, *args: object) -> torch.nn.Module:
        model = parallelize(model, *args)
        for module in model.modules() if on_cpu else ():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    spec.parallelize_fn = on_gloo
    if on_cpu:
        torchtitan.train.dist_utils.set_pg_timeouts = lambda **_: None  # asks for GPUs by number
        metrics.build_device_memory_monitor = NoMonitor
    specs.get_train_spec = lambda name: spec
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "--model.name=llama3",
            "--model.flavor=bench",
            f"--job.dump_folder={folder}",
            f"--training.local_batch_size={w.batch}",
            f"--training.seq_len={w.seq_len}",
            f"--training.steps={w.steps}",
            f"--training.mixed_precision_param={w.dtype}",
            f"--optimizer.lr={LR}",
            "--optimizer.weight_decay=0.0",
            "--optimizer.implementation=fused",
            "--lr_scheduler.warmup_steps=0",
            "--lr_scheduler.total_steps=1000000000",
            "--metrics.log_freq=1",
            "--activation_checkpoint.mode=none",
        ]
        words += ["--compile.enable"] if w.compile else []
        init_logger()
        trainer = WatchedTrainer(ConfigManager().parse_args(words))
        (model,) = trainer.model_parts
        fill(model.named_parameters())
        trainer.watch = watch
        trainer.train()
    watch.report()
    os._exit(0)


if __name__ == "__main__":
    main()
