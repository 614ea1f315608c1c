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

FSDP = "FSDP2: parameters cut in {}; computes in {}, reduces in float32; through shared memory"


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            "--parallelism.tensor_parallel_degree=2 --parallelism.context_parallel_degree=2 "
            "--activation_checkpoint.mode=selective --compile.enable --compile.backend=aot_eager",
            [
                "tensor parallelism: matrices, and the sequence between them, cut in 2",
                "context parallelism: sequences cut in 2; keys and values are gathered",
                "activation checkpointing: selective (op)",
                "torch.compile: each block and the loss, by aot_eager",
                FSDP.format(2, "float32"),
            ],
        ),
        (
            "--model.args.n_layers=4 --parallelism.pipeline_parallel_degree=2 "
            "--parallelism.pipeline_parallel_schedule=Interleaved1F1B "
            "--activation_checkpoint.mode=full --training.mixed_precision_param=bfloat16",
            [
                "pipeline: 4 stages on 2 ranks, Interleaved1F1B, 2 microbatches",
                "activation checkpointing: full",  # once, not of each stage
                FSDP.format(2, "bfloat16"),
            ],
        ),
    ],
    ids=["tp-cp", "pp"],
)
@pytest.mark.ranks(4)
def test_each_parallelism_is_in_the_log_once(words, lines) -> None:
    config = load_config(["--job.config_file", "tests/integration/tiny.toml", *words.split()])
    plan = preflight(config, 4)
    level = logger.level
    logger.setLevel(logging.INFO)  # not by patch, which leaves logging's cache of levels
    with logged() as messages:
        build_model(plan, meshes_of(plan.dims, "cpu"), torch.device("cpu"))
    logger.setLevel(level)
    assert messages == lines, messages
