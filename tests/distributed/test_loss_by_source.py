"""The training loss by source: plain PyTorch's on any mesh, and together the loss of the step; so
are, with loss weights, the loss and its gradients."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from meshwright.models.families.llama import LlamaArgs
from meshwright.models.loss import IGNORE, Batch
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.train.loss_by_source import LossBySource
from tests.distributed.test_validation import evaluation_of
from tests.helpers.job import DEEP, DOCUMENTS, PP, SCHEDULES, global_batch, job_of, mesh
from tests.helpers.rounding import FIGURES_BOUND, gradient_bound
from tests.helpers.slow import slow_but
from tests.helpers.tiny import CPU, TIED, TINY, plain_model

NAMES = ["web", "code", "books", "none in this step"]
SOURCES = torch.tensor([0, 2, 1, 0, 0, 1, 2, 0])
WEIGHTS = torch.tensor([1.0, 0.25, 3.0, 2.0])
MESHES = {
    "one": (mesh(), {}),
    "fsdp": (mesh(dp_shard=2), {}),
    "tied-tp": (mesh(tp=2), {"args": TIED}),
    "cp-chunks": (mesh(cp=2), {"loss_chunk_tokens": 5}),
    "cp-documents": (mesh(cp=2), {"documents": DOCUMENTS}),
    "hsdp": (mesh(dp_shard=2, dp_replicate=2), {}),
    "4-microbatches": (mesh(dp_shard=2), {"num_microbatches": 4}),
    "compiled": (mesh(dp_shard=2), {"compile_backend": "aot_eager"}),
    "1F1B": (PP, SCHEDULES["1F1B"]),
    "Interleaved1F1B": (PP, SCHEDULES["Interleaved1F1B"]),
    "ZBVZeroBubble": (PP, SCHEDULES["ZBVZeroBubble"]),
    "DualPipeV": (PP, SCHEDULES["DualPipeV"]),
    "pp-fsdp-tp": (dataclasses.replace(PP, dp_shard=2, tp=2), SCHEDULES["1F1B"]),
    "pp-cp-tp": (dataclasses.replace(PP, cp=2, tp=2), SCHEDULES["1F1B"]),
}
CASES = {name: (*case, None) for name, case in MESHES.items()}
CASES |= {f"weighted-{name}": (*case, WEIGHTS) for name, case in MESHES.items()}


def args_of(dims: ParallelDims, options: dict) -> LlamaArgs:
    return options.get("args", DEEP if dims.pp > 1 else TINY)


def _steps(dims: ParallelDims, options: dict, weights: torch.Tensor | None) -> tuple:
    """The losses by source and the loss of two steps, after each of which there is a validation;
    and the gradients of the first."""
    job, documents = job_of(dims, {"args": args_of(dims, options)} | options)
    by_source, steps = LossBySource(job.model, NAMES, job.meshes, CPU), []
    seen, gradients = job.whole_gradients(), {}
    for step in (1, 2):
        batches = job.part(Batch(*global_batch(step), documents=documents, sources=SOURCES))
        result = job.take_step(step, batches, by_source=by_source, loss_weights=weights)
        gradients = gradients or dict(seen)
        evaluation_of(job, [Batch(*global_batch(3))])
        steps.append((by_source.figures(), result.loss.item()))
    return steps, gradients


@pytest.mark.parametrize(
    ("dims", "options", "weights"), slow_but("fsdp tied-tp DualPipeV weighted-1F1B", CASES)
)
def test_losses_by_source_and_weighted_gradients_are_plain_pytorch_s(
    on_ranks, dims, options, weights
) -> None:
    args, factors = args_of(dims, options), torch.ones(4) if weights is None else weights
    model, (tokens, labels) = plain_model(args).double(), global_batch(1)
    logits = model(tokens, documents=options.get("documents")).mT
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
    weighted = factors[SOURCES].unsqueeze(1) * (labels != IGNORE)
    wanted = (losses * weighted).sum() / weighted.sum()
    wanted.backward()
    by_source = {
        f"loss/train/{name}": losses[number == SOURCES].sum().item()
        / (labels[number == SOURCES] != IGNORE).sum().item()
        for number, name in enumerate(NAMES[:3])
    }
    results, found = on_ranks(dims.num_ranks, _steps, dims, options, weights), {}
    for steps, gradients in results:
        assert steps == results[0][0]
        found |= gradients
    (figures, loss), _ = steps
    assert figures == pytest.approx(by_source, rel=FIGURES_BOUND)
    assert loss == pytest.approx(wanted.item(), rel=FIGURES_BOUND)
    for step, (figures, loss) in enumerate(steps, 1):
        is_counted = global_batch(step)[1] != IGNORE
        parts = [is_counted[n == SOURCES].sum() * factors[n] for n in range(3)]
        total = sum(figures[f"loss/train/{NAMES[n]}"] * part for n, part in enumerate(parts))
        assert (total / sum(parts)).item() == pytest.approx(loss, rel=1e-6)
    named = dict(model.named_parameters())
    assert found.keys() == named.keys()
    for name, gradient in found.items():
        difference = gradient - named[name].grad
        assert difference.norm() <= gradient_bound(args) * named[name].grad.norm(), name
