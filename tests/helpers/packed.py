"""Sequences made of several documents, and what a plain model makes of each document alone."""

import functools

import torch
import torch.nn.functional as F

from meshwright.models.decoder import Decoder
from meshwright.models.families.llama import LlamaArgs
from meshwright.models.loss import IGNORE, Batch
from tests.helpers.tiny import SEQ_LEN, TINY, plain_model

# lengths, by sequence: one token, a whole sequence, ends on and off the cuts of 2 and of 4 cp ranks
LENGTHS = (
    *((16,), (1, 15), (5, 6, 5), (4, 8, 4), (2, 1, 9, 4), (7, 9), (15, 1)),
    (1, 1, 2, 3, 1, 8),
)


def packed(step: int) -> Batch:
    """A global batch, other lengths each step; the last token of a document predicts nothing."""
    generator = torch.Generator().manual_seed(step)
    shape = len(LENGTHS), SEQ_LEN
    tokens = torch.randint(TINY.vocab_size, shape, generator=generator)
    labels = torch.randint(TINY.vocab_size, shape, generator=generator)
    documents = torch.empty(shape, dtype=torch.int32)
    shift = step - 1
    for row, lengths in enumerate(LENGTHS[shift:] + LENGTHS[:shift]):
        number = torch.arange(len(lengths), dtype=torch.int32)
        documents[row] = number.repeat_interleave(torch.tensor(lengths))
        labels[row, torch.tensor(lengths).cumsum(0) - 1] = IGNORE
    labels[1, 3:] = IGNORE  # and as unevenly as documents may
    return Batch(tokens, labels, documents)


def one_by_one(model: Decoder, batch: Batch) -> torch.Tensor:
    """The mean loss over the labels of `batch`, each document being a sequence of its own."""
    assert batch.documents is not None
    total = torch.zeros(())
    for tokens, labels, documents in zip(batch.tokens, batch.labels, batch.documents, strict=True):
        for number in documents.unique():
            own = documents == number
            logits = model(tokens[own].unsqueeze(0)).squeeze(0)
            total += F.cross_entropy(logits, labels[own], ignore_index=IGNORE, reduction="sum")
    return total / (batch.labels != IGNORE).sum()


@functools.cache
def reference(args: LlamaArgs, step: int = 1) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of `packed(step)` by a plain model that sees one document at a time."""
    model = plain_model(args)
    loss = one_by_one(model, packed(step))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients
