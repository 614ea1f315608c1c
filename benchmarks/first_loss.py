"""First losses, minus the logarithm of the vocabulary, of every family by width and depth.

    python -m benchmarks.first_loss [--widths 64 256 1024 4096] [--layers 2 8 32]

Of a model with an output of its own, and of tied ones: with a last norm of ones, as up to 69d0286a,
the same with a table of 0.02, and with a last norm of both signs, as now. One block is in memory at
a time: a Llama of width 4096 and 32 layers takes 2 GB and a few minutes on two cores.
"""

import argparse
import dataclasses
import math

import torch
import torch.nn.functional as F

from meshwright.models.args import STD, DecoderArgs, ExpertArgs
from meshwright.models.attention import rope_cache
from meshwright.models.decoder import Block
from meshwright.models.delta import DeltaArgs
from meshwright.models.families import MODELS
from meshwright.models.families.deepseek import DeepseekArgs
from meshwright.models.family import Family
from meshwright.models.latent import LatentArgs
from meshwright.models.mixture import Mixture

SEQ_LEN = 256


def sized(family: Family, dim: int, n_layers: int, vocab_size: int) -> DecoderArgs:
    """Return a model of that width, with heads of 64; two of four experts are half as wide as a
    dense FFN."""
    debug = family.flavors["debugmodel"]
    has_experts, n_heads = isinstance(debug, ExpertArgs), max(2, dim // 64)
    # latent attention has keys of its own for each head
    n_kv_heads = n_heads if isinstance(debug, LatentArgs) else max(1, dim // 128)
    experts = {"n_experts": 4, "n_active": 2} if has_experts else {}
    if isinstance(debug, DeepseekArgs):
        experts |= {"n_dense_layers": 0, "n_groups": 1, "n_active_groups": 1}
    if isinstance(debug, DeltaArgs):  # a layer must have softmax attention
        experts["full_every"] = min(debug.full_every, n_layers)
    return dataclasses.replace(
        debug,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=64 if debug.head_dim else None,
        hidden_dim=dim * 4 // 3 if has_experts else dim * 8 // 3,
        vocab_size=vocab_size,
        **experts,
    )


@torch.no_grad()
def first_losses(args: DecoderArgs, starts: list[tuple[float, float | None, bool]]) -> list[float]:
    """Return the losses of random tokens, minus log V, for each std of the embedding, std of the
    output (None: tied), and whether weights of the last norm alternate in sign."""
    torch.manual_seed(0)
    table, dim = args.table, args.dim
    rows, output = torch.randn(2, args.vocab_size, dim)
    tokens = torch.randint(args.vocab_size, (1, SEQ_LEN + 1))
    states = [std * rows[tokens[:, :-1]] for std, _, _ in starts]
    signs = 1.0 - 2.0 * (torch.arange(dim) % 2)
    cos, sin = rope_cache(SEQ_LEN, table.ropes[0]).unbind(0) if table.ropes else (None, None)
    block = Block(table.layers[0])
    for buffer in block.buffers():
        buffer.zero_()
    routing = (None, None) if isinstance(block.feed_forward, Mixture) else ()
    for index in range(args.n_layers):
        for name, parameter in block.named_parameters():
            std = table.parameters[f"layers.{index}.{name}"].std
            parameter.fill_(1.0) if std is None else parameter.normal_(0, std)
        for place, x in enumerate(states):
            out = block(x, cos, sin, None, *routing)
            states[place] = out[0] if routing else out
    losses = []
    for x, (std, of_output, alternates) in zip(states, starts, strict=True):
        weight = std * rows if of_output is None else of_output * output
        norm = signs if alternates else torch.ones(dim)
        logits = F.rms_norm(x, (dim,), norm, table.norm_eps) @ weight.T
        loss = logits.logsumexp(-1).mean() - logits.mean()  # of labels that are drawn at random
        losses.append(loss.item() - math.log(args.vocab_size))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--vocab-size", type=int, default=2048)
    given = parser.parse_args()
    print("| family | width | layers | untied | tied, before | tied, 0.02 | tied, now |")
    print("|---|---|---|---|---|---|---|")
    for name, family in MODELS.items():
        for dim in given.widths:
            for n_layers in given.layers:
                args = sized(family, dim, n_layers, given.vocab_size)
                table = args.table
                std = table.output_std
                tied = [(std, None, False), (STD, None, False), (std, None, True)]
                losses = first_losses(args, [(table.std, std, False), *tied])
                figures = " | ".join(f"{loss:.2f}" for loss in losses)
                print(f"| {name} | {dim} | {n_layers} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
