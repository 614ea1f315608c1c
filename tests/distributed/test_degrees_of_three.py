"""Every axis of the mesh at degree 3, where rows, layers and heads do not fall into halves."""

import dataclasses
import functools

import pytest

from meshwright.models.loss import Batch
from tests.helpers.job import Job, global_batch, mesh, plain_steps
from tests.helpers.rounding import FIGURES_BOUND, adamw, assert_updated_alike
from tests.helpers.tiny import SEQ_LEN, TINY, plain_model, whole

# 32 rows and 131 leave shards of 11, 11, 10 and 44, 44, 43; five layers stages of 2, 2, 1
ARGS = dataclasses.replace(TINY, n_layers=5, n_heads=6, n_kv_heads=3, head_dim=10)
SEQUENCES, LENGTH, STEPS = 6, 12, 2


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "cp", "tp", "pp"])
@pytest.mark.ranks(3)
def test_a_degree_of_three_equals_plain_pytorch(axis: str) -> None:
    # a pipeline's stages are made for one length
    length = SEQ_LEN if axis == "pp" else LENGTH
    batch_of = functools.partial(global_batch, sequences=SEQUENCES, length=length)
    plain = plain_model(ARGS)
    figures = plain_steps(plain, adamw(plain), range(1, STEPS + 1), batch_of=batch_of)
    microbatches = 3 if axis == "pp" else 1
    job = Job(mesh(**{axis: 3}), 0, microbatches, num_sequences=SEQUENCES, args=ARGS)
    for step, want in enumerate(figures, 1):
        result = job.take_step(step, job.part(Batch(*batch_of(step))), max_norm=0.5)
        got = (result.loss.item(), result.grad_norm.item())
        assert got == pytest.approx(want, rel=FIGURES_BOUND), f"step {step}: {got}, not {want}"
    initial, weights = (dict(m.named_parameters()) for m in (plain_model(ARGS), plain))
    for name, parameter in job.model.named_parameters():
        assert_updated_alike(
            whole(parameter), weights[name], initial[name], name, args=ARGS, num_steps=STEPS
        )
