"""Every axis of the mesh at degree 3, where rows, layers and heads do not fall into halves."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from meshwright.models.batch import Batch
from meshwright.models.loss import IGNORE
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.train.bad_steps import BadStepDetector
from meshwright.train.trainer import StepOptions, train_step
from tests.helpers.rounding import FIGURES_BOUND, adamw, assert_updated_alike
from tests.helpers.tiny import SEQ_LEN, TINY, parallel_model, plain_model, whole

# 32 rows and 131 leave shards of 11, 11, 10 and 44, 44, 43; five layers stages of 2, 2, 1
ARGS = dataclasses.replace(TINY, n_layers=5, n_heads=6, n_kv_heads=3, head_dim=10)
SEQUENCES, LENGTH, STEPS = 6, 12, 2
CASES = [
    ("dp_replicate", {}),
    ("dp_shard", {}),
    ("cp", {}),
    ("tp", {}),
    ("pp", {"schedule": "1F1B"}),
]


def batch_of(step: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels are missing unevenly."""
    generator = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(
        TINY.vocab_size, (2, SEQUENCES, length), generator=generator
    ).unbind()
    labels[0], labels[1, 3:], labels[5, ::2] = IGNORE, IGNORE, IGNORE
    return tokens, labels


def reference(length: int) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Losses and gradient norms of the steps, and the weights after them, in plain PyTorch."""
    model, figures = plain_model(ARGS), []
    optimizer = adamw(model)
    for step in range(1, STEPS + 1):
        tokens, labels = batch_of(step, length)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        figures.append((loss.item(), norm.item()))
    return figures, dict(model.named_parameters())


def check_axis(axis: str, options: dict[str, str]) -> None:
    # a pipeline's stages are made for one length
    length = SEQ_LEN if axis == "pp" else LENGTH
    dims = ParallelDims(**({"dp_replicate": 1, "dp_shard": 1} | {axis: 3}))
    size = SEQUENCES // dims.dp // (3 if axis == "pp" else 1)
    microbatches = (SEQUENCES // dims.dp // size, size)
    model, meshes = parallel_model(dims, ARGS, microbatches=microbatches, **options)
    optimizer, rank = adamw(model), meshes.dp.get_local_rank()
    detector = BadStepDetector(torch.device("cpu"))
    figures, weights = reference(length)
    for step, want in enumerate(figures, 1):
        parts = (part.split(size)[rank :: dims.dp] for part in batch_of(step, length))
        result = train_step(
            model,
            [*map(Batch, *parts)],
            optimizer,
            step=step,
            options=StepOptions(max_norm=0.5),
            meshes=meshes,
            detector=detector,
        )
        got = (result.loss.item(), result.grad_norm.item())
        assert got == pytest.approx(want, rel=FIGURES_BOUND), f"step {step}: {got}, not {want}"
    initial = dict(plain_model(ARGS).named_parameters())
    for name, parameter in model.named_parameters():
        assert_updated_alike(
            whole(parameter), weights[name], initial[name], name, args=ARGS, num_steps=STEPS
        )


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "options"), CASES, ids=["replicate", "fsdp", "cp", "tp", "pp"])
def test_a_degree_of_three_equals_plain_pytorch(on_ranks, axis, options) -> None:
    on_ranks(3, check_axis, axis, options)
