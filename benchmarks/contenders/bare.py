"""A loop without a framework: fp32 weights, autocast, fused AdamW; FSDP2 above one rank."""

import os

import torch
from plain_llama import build
from torch import nn
from workload import BETAS, LR, Stopwatch, from_command_line, random_tokens


def main() -> None:
    """Train, and print the result."""
    w, watch = from_command_line(), Stopwatch()
    dtype = getattr(torch, w.dtype)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if watch.device.type == "cuda":
        torch.cuda.set_device(rank)
    model = build(w, watch.device)
    if w.ranks > 1:
        import torch.distributed as dist
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        dist.init_process_group()
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True
    )
    if w.compile:
        if w.ranks > 1:
            for block in model.blocks:
                block.compile()
        else:
            model.compile()
    use_autocast = w.ranks == 1 and dtype != torch.float32
    for batch in random_tokens(w, w.steps).to(watch.device):
        with torch.autocast(watch.device.type, dtype, enabled=use_autocast):
            loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss)
    watch.report()
    os._exit(0)  # gloo's threads can abort during the interpreter's teardown


if __name__ == "__main__":
    main()
