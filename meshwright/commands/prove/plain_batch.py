"""A global batch, made from its samples once more, and compared with the trainer's."""

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from meshwright.commands.prove.checked import Checked
from meshwright.commands.prove.plain_decoder import UNCOUNTED, PlainBatch
from meshwright.config.training import Training
from meshwright.datasets.encoding import NO_LOSS, Tokens
from meshwright.datasets.samples import Sample
from meshwright.models.loss import PADDING, Batch

BETWEEN = b"\xff" * 4
"""No token, between documents."""


def read_batch(samples: Sequence[Sample], training: Training, mtp_depth: int) -> PlainBatch:
    """Return the batch.

    A label is the next token. It doesn't count if it isn't to be learned, or if it is the first of
    a document that attention keeps apart. Nor do further tokens count beyond such a document, or
    beyond the sample.
    """
    raw = torch.from_numpy(np.stack([sample.raw for sample in samples]).astype(np.int64))
    flag, length = int(NO_LOSS), raw.shape[1]
    tokens, is_learned = raw & ~flag, (raw & flag) == 0
    lengths = [torch.tensor(sample.lengths) for sample in samples]
    documents = torch.stack([torch.arange(len(n)).repeat_interleave(n) for n in lengths])
    if training.mask_documents:
        is_learned[:, 1:] &= documents[:, 1:] == documents[:, :-1]
    else:
        documents = torch.zeros_like(documents)
    loss_weights = None
    if training.datasets:
        by_source = torch.tensor([float(part.loss_weight) for part in training.datasets])
        loss_weights = by_source.double()[[sample.source for sample in samples]]
    ends = torch.tensor([length - sample.padding for sample in samples]).unsqueeze(1)

    def ahead(places: int) -> PlainBatch:
        at = torch.arange(length - 1) + places
        is_inside = (at < length - 1) & (at < ends)
        at = at.clamp(max=length - 2)
        is_inside = is_inside & (documents[:, at] == documents[:, :-1])
        labels = tokens[:, at + 1].where(is_inside & is_learned[:, at + 1], UNCOUNTED)
        own = tokens[:, at] * is_inside, labels, is_inside, documents[:, :-1]
        return PlainBatch(*own, loss_weights)

    further = [ahead(places) for places in range(1, mtp_depth + 1)]
    return dataclasses.replace(ahead(0), further=further)


def compare_batch(checked: Checked, step: int, batches: Sequence[Batch], plain: PlainBatch) -> None:
    """Compare the trainer's microbatches."""
    tokens = torch.cat([batch.tokens for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    pairs = {
        "tokens": (tokens, plain.tokens),
        "labels": (labels.where(labels >= 0, UNCOUNTED), plain.labels),
        "padding": (labels != PADDING, plain.is_token),
    }
    for depth, ahead in enumerate(plain.further):
        future = [(b.future_tokens, b.future_labels) for b in batches]
        got_tokens, got_labels = (
            torch.cat([part[:, depth] for part in parts if part is not None])
            for parts in zip(*future, strict=True)
        )
        of_depth = f"at depth {depth + 1}"
        pairs |= {
            f"tokens {of_depth}": (got_tokens, ahead.tokens),
            f"labels {of_depth}": (got_labels.where(got_labels >= 0, UNCOUNTED), ahead.labels),
            f"padding {of_depth}": (got_labels != PADDING, ahead.is_token),
        }
    if documents := [batch.documents for batch in batches if batch.documents is not None]:
        pairs["documents"] = torch.cat(documents), plain.documents
    for name, (got, want) in pairs.items():
        if (wrong := (got != want).nonzero()).numel():
            sample, position = wrong[0].tolist()
            place = f"sample {sample} has a different token at position {position}"
            checked.fail(name, [f"of step {step}: {place}"])


def compare_documents(
    checked: Checked, step: int, samples: Sequence[Sample], documents: Sequence[Tokens]
) -> None:
    """Check that each piece of a sample is a part of a document, as it is there."""
    text = BETWEEN.join(document.astype(np.uint32).tobytes() for document in documents)
    for index, sample in enumerate(samples):
        lengths = sample.lengths[:-1] if sample.padding else sample.lengths
        for end, length in zip(accumulate(lengths), lengths, strict=True):
            if sample.raw[end - length : end].astype(np.uint32).tobytes() not in text:
                line = f"of step {step}: a piece of sample {index} is in none of them"
                checked.fail("documents", [line])
