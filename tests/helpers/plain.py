"""The plain decoder that `prove` trusts, with the weights of ours."""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from meshwright.commands.prove.plain_decoder import UNCOUNTED, Plain, PlainBatch, Router
from meshwright.config.training import Experts
from meshwright.models.decoder import Decoder, Routing
from meshwright.models.parameter import block_of
from tests.helpers.families import family_of


class Recorded(Routing):
    def __init__(self) -> None:
        self.chosen: dict[int, torch.Tensor] = {}

    def note(self, layer: int, choice: torch.Tensor, gap: object) -> None:
        self.chosen[layer] = choice


MTP_WEIGHT = 0.3


def plain_loss(
    model: Decoder, batch: PlainBatch, routing: Recorded
) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[torch.Tensor]]:
    """Loss, gradients and losses of further tokens of the plain decoder, with our weights."""
    args, mixtures = model.args, model.mixtures()
    weights = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    routers = {
        layer: Router(mixtures[layer].load.double(), mixtures[layer].bias, chosen)
        for layer, chosen in routing.chosen.items()
    }
    plain = Plain(family_of(args).name, dataclasses.asdict(args), torch.ones(batch.tokens.shape[1]))
    loss, further, _ = plain.losses(weights, batch, routers, Experts())
    total = loss + MTP_WEIGHT * torch.stack(further).mean() if further else loss
    total.backward()
    assert all(router.gap < 1e-5 for router in routers.values())
    return loss, {name: weight.grad for name, weight in weights.items()}, further


def some_batch(vocab_size: int, *, with_documents: bool = False) -> PlainBatch:
    torch.manual_seed(1)
    tokens, labels = torch.randint(vocab_size, (2, 3, 32))
    labels[0, 5:] = UNCOUNTED
    documents = torch.zeros(3, 32, dtype=torch.int64)
    if with_documents:
        documents[1, 9:] = 1
        documents[1, 20:] = 2
    return PlainBatch(tokens, labels, torch.ones(3, 32, dtype=torch.bool), documents)


def watch_logits(
    model: Decoder,
    documents: torch.Tensor | None,
    note: Callable[[str, torch.Tensor], None],
) -> list[RemovableHandle]:
    """Have `note` called with a layer and its logits of attention, (B, N, S, S), all of them at
    once; those of keys that a query doesn't see are -inf."""

    def see(layer: str, _: object, inputs: tuple, options: dict) -> None:
        q, k = inputs[:2]
        logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * options["scale"]
        if cap := options["soft_cap"]:
            logits = cap * torch.tanh(logits / cap)
        positions = torch.arange(q.shape[2])
        distance = positions.unsqueeze(1) - positions
        is_seen = (distance >= 0) & (distance < (options["window"] or len(positions)))
        if documents is not None:
            is_seen = is_seen & (documents[0].unsqueeze(1) == documents[0])
        note(layer, logits.detach().masked_fill(~is_seen, -torch.inf))

    return [
        module.register_forward_pre_hook(functools.partial(see, block_of(name)), with_kwargs=True)
        for name, module in model.named_modules()
        if name.endswith(".attention.core")
    ]
