"""Errors within a stage of a pipeline."""

import pytest
import torch

from meshwright.commands.plan.torch_names import static_pipelines
from meshwright.models.loss import Batch
from meshwright.parallelisms.meshes import build_meshes
from meshwright.parallelisms.rules.degrees import ParallelDims
from tests.helpers import tiny
from tests.helpers.job import DEEP, SCHEDULES
from tests.helpers.tiny import SEQ_LEN, fake_ranks, parallel_model


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
