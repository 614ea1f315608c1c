"""The log says what was applied to a model."""

import logging

import pytest
import torch

from meshwright.config.loader import load_config
from meshwright.system.log import logger
from meshwright.train.build import build_model
from meshwright.train.preflight import preflight
from tests.distributed.test_manager import logged
from tests.helpers.tiny import meshes_of


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            "--parallelism.tensor_parallel_degree=2 --parallelism.context_parallel_degree=2 "
            "--compile.enable --compile.backend=aot_eager",
            ["tensor parallelism", "context parallelism", "torch.compile", "FSDP2"],
        ),
        (
            "--parallelism.pipeline_parallel_degree=2 --activation_checkpoint.mode=full "
            "--parallelism.pipeline_parallel_schedule=Interleaved1F1B --model.args.n_layers=4 "
            "--training.mixed_precision_param=bfloat16",
            ["pipeline", "activation checkpointing", "FSDP2"],
        ),
    ],
    ids=["tp-cp", "pp"],
)
@pytest.mark.ranks(4)
def test_each_part_is_in_the_log_once_and_not_per_stage(words, parts) -> None:
    config = load_config(["--job.config_file", "tests/integration/tiny.toml", *words.split()])
    plan = preflight(config, 4)
    level = logger.level
    logger.setLevel(logging.INFO)  # not by patch, which leaves logging's cache of levels
    with logged() as messages:
        build_model(plan, meshes_of(plan.dims, "cpu"), torch.device("cpu"))
    logger.setLevel(level)
    assert [message.split(":")[0] for message in messages] == parts, messages
    computes = f"computes in {config.training.mixed_precision_param}, reduces in float32"
    assert f"parameters cut in 2; {computes}" in messages[-1]
