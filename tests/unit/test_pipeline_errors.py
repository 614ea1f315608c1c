"""Errors within a stage of a pipeline, and what backward in two passes can't take."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from meshwright.commands.plan.torch_names import static_pipelines
from meshwright.models.families import MODELS
from meshwright.models.loss import Batch
from meshwright.parallelisms.local_model import keep_modules
from meshwright.parallelisms.meshes import build_meshes
from meshwright.parallelisms.pipeline import meets_weight_again
from meshwright.parallelisms.rules.degrees import ParallelDims
from tests.helpers import tiny
from tests.helpers.families import small
from tests.helpers.job import DEEP, SCHEDULES
from tests.helpers.tiny import SEQ_LEN, fake_ranks, parallel_model, plain_model


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_an_error_within_a_stage_is_raised_as_it_is(schedule: str, monkeypatch) -> None:
    """torch wraps it, and nobody would see that memory has run out, or that a rank hangs."""

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("none is left")

    monkeypatch.setattr(tiny, "meshes_of", build_meshes)  # which are of no use to other tests
    options = SCHEDULES[schedule] | {"microbatches": (2, 1), "fsdp_cpu_backend": "gloo"}
    with fake_ranks(2), static_pipelines():
        model, _ = parallel_model(ParallelDims(dp_replicate=1, dp_shard=1, pp=2), DEEP, **options)
        next(iter(model.stages[0].layers.values())).register_forward_pre_hook(fail)
        tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
        one = torch.ones((), dtype=torch.int64)
        with pytest.raises(torch.OutOfMemoryError, match="none is left") as raised:
            model.pipeline.run([Batch(tokens, tokens)] * 2, torch.arange(SEQ_LEN), one)
    assert "tage 0" in "".join(raised.value.__notes__)


A, B = (nn.Parameter(torch.eye(4)) for _ in range(2))


@pytest.mark.parametrize(
    ("forward", "want"),
    [
        (lambda x: x @ A @ B, False),
        (lambda x: x @ A @ A, True),
        (lambda x: x + (x @ A @ B) @ A, True),
        (lambda x: x @ A + (x @ A) * (x @ B), False),  # next to each other
        (lambda x: x @ (A * A), False),  # before the weight meets the input
        (lambda x: torch.cat([x @ B, A[:2]]) @ A[:2].T, True),  # looked up, and for logits
        (lambda x: x.detach() @ A @ A, False),  # no stage before it
    ],
)
def test_a_weight_is_met_again_on_the_way_back(
    forward: Callable[[Tensor], Tensor], want: bool
) -> None:
    x = torch.ones(4, 4, requires_grad=True)
    assert meets_weight_again(forward(x).grad_fn, [A, B]) == want


@pytest.mark.parametrize("name", MODELS)
def test_no_family_has_a_weight_in_two_places_of_a_stage(name: str) -> None:
    """Then its schedules would have nothing to fill waits with."""
    args = small(MODELS[name], vocab_size=131)
    model = plain_model(args)
    layers = [f"layers.{number}" for number in range(args.n_layers)]
    copy = ["tok_embeddings"] if args.tie_embeddings else []
    keep_modules(model, [*copy, *layers, "norm", "output"])
    model.has_copy = args.tie_embeddings
    x = torch.randn(1, SEQ_LEN, args.dim, requires_grad=True)
    loss = model(x, torch.zeros(1, SEQ_LEN, dtype=torch.int64))
    assert not meets_weight_again(loss.grad_fn, model.parameters())
