"""With loss weights, the loss and its gradients are plain PyTorch's on any mesh, and the losses by
source add up to the loss."""

import pytest
import torch
import torch.nn.functional as F

from meshwright.models.loss import IGNORE, Batch
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.train.loss_by_source import LossBySource
from tests.distributed.test_loss_by_source import MESHES, NAMES, SOURCES, args_of
from tests.helpers.job import Job, global_batch, mesh
from tests.helpers.rounding import FIGURES_BOUND, gradient_bound
from tests.helpers.slow import slow_but
from tests.helpers.tiny import CPU, SEQ_LEN, plain_model

WEIGHTS = torch.tensor([1.0, 0.25, 3.0, 2.0])
DOCUMENTS = torch.arange(SEQ_LEN, dtype=torch.int32).div(5, rounding_mode="floor").expand(8, -1)
CASES = MESHES | {
    "4-microbatches": (mesh(dp_shard=2), {"num_microbatches": 4}),
    "cp-documents": (mesh(cp=2), {"documents": DOCUMENTS}),
    "compiled": (mesh(dp_shard=2), {"compile_backend": "aot_eager"}),
}


def _step(dims: ParallelDims, options: dict) -> tuple:
    """The loss of a step, its losses by source, and the gradients of its update."""
    options = {
        "args": args_of(dims, options),
        "num_microbatches": 4 if dims.pp > 1 else 1,
    } | options
    documents = options.pop("documents", None)
    job = Job(dims, **options)
    gradients = job.whole_gradients()
    by_source = LossBySource(job.model, NAMES, job.meshes, CPU)
    batch = Batch(*global_batch(1), documents=documents, sources=SOURCES)
    result = job.take_step(1, job.part(batch), by_source=by_source, loss_weights=WEIGHTS)
    return result.loss.item(), by_source.figures(), gradients


@pytest.mark.parametrize(("dims", "options"), slow_but("1F1B", CASES))
def test_losses_and_gradients_are_weighted_as_plain_pytorch_s(on_ranks, dims, options) -> None:
    args, (tokens, labels) = args_of(dims, options), global_batch(1)
    model = plain_model(args)
    logits = model(tokens, documents=options.get("documents")).mT
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
    weights = WEIGHTS[SOURCES].unsqueeze(1) * (labels != IGNORE)
    want = (losses * weights).sum() / weights.sum()
    want.backward()
    counts = {
        f"loss/train/{name}": int((labels[number == SOURCES] != IGNORE).sum())
        for number, name in enumerate(NAMES)
    }
    factors = dict(zip(counts, WEIGHTS.tolist(), strict=True))

    results = on_ranks(dims.num_ranks, _step, dims, options)
    found = {}
    for loss, by_source, gradients in results:
        assert loss == pytest.approx(want.item(), rel=FIGURES_BOUND)
        parts = {name: factors[name] * counts[name] for name in by_source}
        total = sum(by_source[name] * part for name, part in parts.items())
        assert total / sum(parts.values()) == pytest.approx(loss, rel=1e-6)
        found |= gradients
    named = dict(model.named_parameters())
    assert found.keys() == named.keys()
    for name, gradient in found.items():
        difference = gradient - named[name].grad
        assert difference.norm() <= gradient_bound(args) * named[name].grad.norm(), name
