"""Peak memory of a training step of our trainer, by what takes it.

Weights, gradients and optimizer state are counted from the model's table; activations are the
tensors that autograd keeps for backward, each storage once, in blocks and outside of them
(embedding, output, loss); the peak is the process's own, or the GPU allocator's. What is left are
temporaries, copies for communication and the allocator's slack.

    python benchmarks/memory.py --job.config_file train_configs/debug_model.toml --training.steps 3
"""

import json
import sys
import tempfile
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from meshwright import hardware
from meshwright.config.loader import load_config
from meshwright.metrics.record import Record
from meshwright.models.layers.block import Block
from meshwright.preflight import preflight
from meshwright.train import run


class Saved:
    """Counts what autograd keeps; a sink, so that it begins anew with each step."""

    def __init__(self) -> None:
        self.place = "outside blocks"
        self.bytes: dict[str, dict[int, int]] = defaultdict(dict)
        self.of_step: dict[str, int] = {}
        self.peak_gib = 0.0

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor's storage, unless it is a parameter's."""
        whole = tensor if tensor._base is None else tensor._base
        if not (whole.is_leaf and whole.requires_grad):
            storage = tensor.untyped_storage()
            self.bytes[self.place][storage.data_ptr()] = storage.nbytes()
        return tensor

    def enter(self, module: nn.Module, _: object) -> None:
        """Before a module."""
        if isinstance(module, Block):
            self.place = "blocks"

    def leave(self, module: nn.Module, _: object, __: object) -> None:
        """After a module."""
        if isinstance(module, Block):
            self.place = "outside blocks"

    def write(self, record: Record) -> None:
        """A step is over."""
        self.of_step = {place: sum(sizes.values()) for place, sizes in self.bytes.items()}
        self.bytes.clear()
        self.peak_gib = record["memory_gib"]

    def close(self) -> None:
        """Nothing to flush."""


def main() -> None:
    """Train a few steps, and print GiB by part."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*sys.argv[1:], "--job.dump_folder", folder, "--metrics.log_freq", "1"]
        config, _ = load_config([*words, "--checkpoint.enable", "false"])
        plan = preflight(config, world_size=1)
        device = hardware.pick_device(0)
        before = hardware.peak_memory_gib(device)
        saved = Saved()
        register_module_forward_pre_hook(saved.enter)
        register_module_forward_hook(saved.leave)
        with saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            run(plan, extra_sinks=[saved])
    master = getattr(torch, config.training.dtype).itemsize
    parameters = sum(p.numel for p in plan.model_args.table.parameters.values())
    parts: dict[str, Any] = {"before the job": before}
    for name, count in (("weights", 1), ("gradients", 1), ("optimizer", 2)):
        parts[name] = count * master * parameters / 2**30
    parts |= {f"activations, {place}": size / 2**30 for place, size in saved.of_step.items()}
    parts["the rest"] = saved.peak_gib - sum(parts.values())
    parts["peak"] = saved.peak_gib
    for name, gib in parts.items():
        print(f"{name:28} {gib:7.3f} GiB")
    print(json.dumps({"device": hardware.device_name(device), **parts}))


if __name__ == "__main__":
    main()
