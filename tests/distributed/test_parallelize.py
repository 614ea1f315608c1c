"""The log says what was applied to a model, which is the same bit by bit however it is sharded:
also with copies, a tied output, or in bf16."""

import logging

import pytest
import torch

from meshwright.config.loader import load_config
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.system.log import logger
from meshwright.train.build import build_model
from tests.distributed.test_manager import logged
from tests.helpers.job import mesh
from tests.helpers.resolved import resolved
from tests.helpers.slow import slow
from tests.helpers.tiny import TIED, TINY, meshes_of, parallel_model, plain_model, whole


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
    plan = resolved(config, 4)
    level = logger.level
    logger.setLevel(logging.INFO)  # not by patch, which leaves logging's cache of levels
    with logged() as messages:
        build_model(plan, meshes_of(plan.dims, "cpu"), torch.device("cpu"))
    logger.setLevel(level)
    assert [message.split(":")[0] for message in messages] == parts, messages
    computes = f"computes in {config.training.mixed_precision_param}, reduces in float32"
    assert f"parameters sharded over 2 ranks; {computes}" in messages[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("dims", "args"),
    [
        *((mesh(1, 2, tp=2), TINY), (mesh(2), TIED), (mesh(tp=2), TIED), (mesh(pp=2), TINY)),
        *slow((mesh(dp_shard=4), TIED), (mesh(2, 2), TINY), (mesh(2, cp=2), TINY)),
    ],
    ids=str,
)
@pytest.mark.ranks("dims")
def test_initial_weights_do_not_depend_on_the_mesh(dims: ParallelDims, args, dtype) -> None:
    """In bf16 they are those in fp32, rounded."""
    sharded, _ = parallel_model(
        dims, args, param_dtype=dtype, master_dtype=dtype, microbatches=(dims.pp, 1)
    )
    plain = plain_model(args)
    wanted = dict(plain.named_parameters())
    for name, got in sharded.named_parameters():
        assert got.dtype == dtype
        assert torch.equal(whole(got), wanted[name].to(dtype)), name
    for stage in sharded.stages:
        for (name, want), got in zip(plain.named_buffers(), stage.buffers(), strict=True):
            assert torch.equal(got, want), name
    held = {*dict(sharded.named_parameters())}
    assert held == {*wanted} or dims.pp > 1
