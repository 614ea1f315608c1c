"""The training loss by source: the plain model's on any mesh, and together the loss of the step."""

import dataclasses
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from meshwright.models.families.llama import LlamaArgs
from meshwright.models.loss import IGNORE, Batch
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.train.loss_by_source import LossBySource
from tests.distributed.test_validation import evaluation_of
from tests.helpers.job import DEEP, SCHEDULES, Job, global_batch, mesh
from tests.helpers.slow import slow_but
from tests.helpers.tiny import CPU, TIED, TINY, plain_model

NAMES = ["web", "code", "books", "none in this step"]
SOURCES = torch.tensor([0, 2, 1, 0, 0, 1, 2, 0])
PP = mesh(pp=2)
MESHES = {
    "one": (mesh(), {}),
    "fsdp": (mesh(dp_shard=2), {}),
    "tied-tp": (mesh(tp=2), {"args": TIED}),
    "cp-chunks": (mesh(cp=2), {"loss_chunk_tokens": 5}),
    "hsdp": (mesh(dp_shard=2, dp_replicate=2), {}),
    "1F1B": (PP, SCHEDULES["1F1B"]),
    "Interleaved1F1B": (PP, SCHEDULES["Interleaved1F1B"]),
    "ZBVZeroBubble": (PP, SCHEDULES["ZBVZeroBubble"]),
    "DualPipeV": (PP, SCHEDULES["DualPipeV"]),
    "pp-fsdp-tp": (dataclasses.replace(PP, dp_shard=2, tp=2), SCHEDULES["1F1B"]),
    "pp-cp-tp": (dataclasses.replace(PP, cp=2, tp=2), SCHEDULES["1F1B"]),
}


def args_of(dims: ParallelDims, options: dict) -> LlamaArgs:
    return options.get("args", DEEP if dims.pp > 1 else TINY)


def _steps(dims: ParallelDims, options: dict) -> list[tuple[dict[str, float], float]]:
    """The losses by source and the loss of two steps, after each of which there is a validation."""
    count, steps = 4 if dims.pp > 1 else 2, []
    job = Job(dims, num_microbatches=count, **{"args": args_of(dims, options)} | options)
    by_source = LossBySource(job.model, NAMES, job.meshes, CPU)
    for step in (1, 2):
        batch = Batch(*global_batch(step), sources=SOURCES)
        result = job.take_step(step, job.part(batch), by_source=by_source)
        evaluation_of(job, [Batch(*global_batch(3))])
        steps.append((by_source.figures(), result.loss.item()))
    return steps


def reference(args: LlamaArgs) -> dict[str, float]:
    tokens, labels = global_batch(1)
    logits = plain_model(args).double()(tokens)
    losses = F.cross_entropy(logits.mT, labels, ignore_index=IGNORE, reduction="none").sum(1)
    counts, sums = Counter(), Counter()
    for source, loss, row in zip(SOURCES.tolist(), losses.tolist(), labels, strict=True):
        sums[source] += loss
        counts[source] += int((row != IGNORE).sum())
    return {f"loss/train/{NAMES[n]}": sums[n] / counts[n] for n in sums}


@pytest.mark.parametrize(("dims", "options"), slow_but("fsdp tied-tp DualPipeV", MESHES))
def test_losses_by_source_are_the_plain_model_s_and_add_up(on_ranks, dims, options) -> None:
    results = on_ranks(dims.num_ranks, _steps, dims, options)
    assert all(result == results[0] for result in results)
    assert results[0][0][0] == pytest.approx(reference(args_of(dims, options)), rel=1e-6)
    for step, (figures, loss) in enumerate(results[0], 1):
        _, labels = global_batch(step)
        counts = [int((labels[n == SOURCES] != IGNORE).sum()) for n in range(3)]
        total = sum(figures[f"loss/train/{NAMES[n]}"] * count for n, count in enumerate(counts))
        assert total / sum(counts) == pytest.approx(loss, rel=1e-6)
