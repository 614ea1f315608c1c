"""The plain decoder that `prove` trusts, with the weights of ours."""

import dataclasses

import torch

from meshwright.commands.prove.plain_decoder import UNCOUNTED, Plain, PlainBatch, Router
from meshwright.config.training import Experts
from meshwright.models.decoder import Decoder, Routing
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
