"""The loss of every token, and the gradient of some of a step's samples, against plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F

from meshwright.models.loss import IGNORE
from meshwright.train.token_losses import norm_of_part, token_losses
from tests.helpers.job import SCHEDULES, Job, global_batch, mesh
from tests.helpers.tiny import plain_model

MESHES = [
    (mesh(dp_shard=2), {}),
    (mesh(dp_replicate=2, tp=2), {}),
    (mesh(dp_shard=2, cp=2), {}),
    (mesh(dp_shard=2, pp=2), SCHEDULES["1F1B"]),
]


def _measured(dims, options, kept: list[int]) -> tuple[torch.Tensor, float, float, bool]:
    job = Job(dims, num_microbatches=2, **options)
    before = job.weights()
    losses = token_losses(job.model, job.batches(1), job.meshes)
    of_kept = norm_of_part(job.trainer, job.batches(1), kept)
    share = norm_of_part(job.trainer, job.batches(1), kept, torch.tensor(100))
    after = job.weights()
    is_same = all(torch.equal(before[name], after[name]) for name in before)
    return losses, of_kept, share, is_same


@pytest.mark.parametrize(("dims", "options"), MESHES, ids=str)
def test_losses_and_norms_are_those_of_plain_pytorch(on_ranks, dims, options) -> None:
    kept = [2, 5, 7]
    tokens, labels = global_batch(1)
    model = plain_model()
    losses = F.cross_entropy(
        model(tokens).transpose(1, 2), labels, ignore_index=IGNORE, reduction="none"
    )
    losses[kept].sum().backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    count = (labels[kept] != IGNORE).sum().item()
    for found, of_kept, share, is_same in on_ranks(dims.num_ranks, _measured, dims, options, kept):
        torch.testing.assert_close(found, losses.detach(), rtol=1e-5, atol=1e-6)
        assert of_kept == pytest.approx(norm / count, rel=1e-5)
        assert share == pytest.approx(norm / 100, rel=1e-5)
        assert is_same
