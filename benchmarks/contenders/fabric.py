"""Lightning Fabric around the plain Llama: mixed precision; FSDP is not for CPUs, so DDP there."""

import os

import torch
from lightning_fabric import Fabric
from plain_llama import build
from workload import BETAS, LR, Stopwatch, from_command_line, random_tokens


def main() -> None:
    """Train, and print the result."""
    w, watch = from_command_line(), Stopwatch()
    strategy = "auto" if w.ranks == 1 else "ddp" if watch.device.type == "cpu" else "fsdp"
    precision = "bf16-mixed" if w.dtype == "bfloat16" else "32-true"
    fabric = Fabric(
        accelerator=watch.device.type, devices=w.ranks, strategy=strategy, precision=precision
    )
    fabric.launch()
    model = build(w, watch.device)
    if w.compile:
        model = torch.compile(model)
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(
        torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True)
    )
    for batch in fabric.to_device(random_tokens(w, w.steps)):
        loss = model(batch[:, :-1], batch[:, 1:])
        fabric.backward(loss)
        # by norm it refuses fused optimizers, which it cannot unscale
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss)
    watch.report()
    os._exit(0)


if __name__ == "__main__":
    main()
