"""The loss and the metrics of docs/extending.md, on meshes and on one process."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.models.loss import IGNORE, Batch
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.train.metric_table import Metric
from meshwright.train.own_metrics import OwnMetrics, from_limbs, to_limbs
from meshwright.train.trainer import summed
from tests.campaigns.new_user import example
from tests.helpers.job import SCHEDULES, Job, global_batch
from tests.helpers.slow import slow
from tests.helpers.tiny import plain_model

BIG = 2**45 + 1
"""No float of 32 bits has it."""


def own(name: str) -> dict[str, Any]:
    """The tables of an example."""
    module: dict[str, Any] = {}
    exec(example(name), module)
    return module


def tokens_of(parts: Any, options: Any) -> Tensor:
    """Counted tokens, their labels' sum in many bits, and a number below zero."""
    found = torch.zeros(3, dtype=torch.int64)
    for batch in parts.batches:
        kept = batch.labels != IGNORE
        found += torch.stack([kept.sum(), batch.labels[kept].sum() * BIG, -kept.sum()])
    return found


def plain_step() -> tuple[float, dict[str, Tensor]]:
    """One step in plain PyTorch: loss, and the gradients."""
    tokens, labels = global_batch(1)
    model = plain_model()
    logits = model(tokens).flatten(0, 1)
    flat = labels.flatten()
    smoothed = F.cross_entropy(logits, flat, ignore_index=IGNORE, label_smoothing=0.1)
    kept = flat != IGNORE
    loss = smoothed + 1e-4 * logits[kept].logsumexp(-1).square().mean()
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


MESHES = {
    2: [{"tp": 2}],
    4: [{"tp": 2, "dp_shard": 2}, {"pp": 2, "cp": 2}, {"dp_replicate": 2, "tp": 2}],
}


def _compare(degrees: dict[str, int]) -> None:
    dims = ParallelDims(**({"dp_replicate": 1, "dp_shard": 1} | degrees))
    schedule = SCHEDULES["1F1B"] if dims.pp > 1 else {}
    job, module = Job(dims, 0, 2, loss_chunk_tokens=3, **schedule), own("loss")
    loss = partial(module["smooth"], options=module["Options"]())
    for stage in job.model.stages:
        if stage.output is not None:
            stage.output.loss.own = loss
    table = own("metric")["METRICS"] | {"batch": Metric(tokens_of, lambda sums, options: sums[1])}
    metrics = OwnMetrics({})
    metrics._metrics = {name: (metric, None) for name, metric in table.items()}
    gradients, batch = job.whole_gradients(), Batch(*global_batch(1))
    result = job.take_step(1, job.part(batch), own_metrics=metrics)
    want_loss, wanted = plain_step()
    assert result.loss.item() == pytest.approx(want_loss, rel=2e-6), degrees
    for name, got in gradients.items():
        error = (got - wanted[name]).abs().max() / wanted[name].abs().max()
        assert error <= 1e-5, (degrees, name, error)
    kept = batch.labels[batch.labels != IGNORE]
    assert result.figures["batch"].item() == kept.sum().item() * BIG
    zeros = sum((gradient == 0).sum().item() for gradient in wanted.values())
    share = zeros / sum(gradient.numel() for gradient in wanted.values())
    assert result.figures["optim/zero_share"].item() == pytest.approx(share, rel=1e-6)


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [(2, MESHES[2][0]), *slow(*((4, degrees) for degrees in MESHES[4]))],
)
@pytest.mark.ranks("ranks")
def test_a_loss_and_metrics_from_outside_are_those_of_one_process(ranks, degrees) -> None:
    _compare(degrees)
    if ranks == 2:
        rank, values = dist.get_rank(), torch.tensor([BIG, -BIG, -1, 2**62 - 1])
        floats, integers = summed(torch.ones(2), values * (rank + 1) // 2)
        assert floats.tolist() == [2.0, 2.0]
        assert torch.equal(integers, values // 2 + values)


def test_integers_come_back_from_limbs() -> None:
    values = torch.tensor([0, 1, -1, BIG, -BIG, 2**63 - 1, -(2**63)])
    assert torch.equal(from_limbs(to_limbs(values)), values)
    assert torch.equal(from_limbs(4096 * to_limbs(values)), 4096 * values)
