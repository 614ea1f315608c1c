"""Where the tensors of a rank's part of the model are, and of which type."""

import dataclasses
import functools
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright.config.loader import load_config
from meshwright.config.training import Training
from meshwright.models.decoder import Decoder
from meshwright.parallelisms.local_model import ModelParts, allocate, build_local_model
from meshwright.train import build
from meshwright.train.preflight import preflight
from tests.helpers.tiny import SEQ_LEN, TINY


def test_buffers_may_be_elsewhere_than_parameters() -> None:
    cpu, elsewhere = torch.device("cpu"), torch.device("meta")
    with torch.device("meta"):
        model = Decoder(TINY, SEQ_LEN)
    allocate(model, parameters=cpu, buffers=elsewhere)
    assert {parameter.device for parameter in model.parameters()} == {cpu}
    assert {buffer.device for buffer in model.buffers()} == {elsewhere}
    assert not any("cos" in name for name in model.state_dict())


def one_rank() -> Mock:
    """Meshes with a rank along each axis."""
    meshes = Mock(experts=None, ep=None)
    meshes.pp.get_local_rank.return_value = 0
    for axis in (meshes.pp, meshes.tp, meshes.cp, meshes.world, meshes.fsdp):
        axis.size.return_value = axis.ndim = 1
    return meshes


@pytest.mark.parametrize(
    ("dtype", "param", "reduce"),
    [("float32", "bfloat16", "float32"), ("bfloat16",) * 3, ("bfloat16", "bfloat16", "float32")],
)
def test_every_type_is_the_configs(monkeypatch, dtype, param, reduce) -> None:
    words = ["--job.config_file", "tests/integration/tiny.toml", "--training.dtype", dtype]
    words += ["--training.mixed_precision_param", param]
    words += ["--training.mixed_precision_reduce", reduce, "--training.global_batch_size", "2"]
    words += ["--training.enable_cpu_offload"]  # otherwise one rank may do without FSDP2
    seen = []

    def note(modules: object, *, mp_policy: MixedPrecisionPolicy, **_: object) -> list[Mock]:
        seen.append((mp_policy.param_dtype, mp_policy.reduce_dtype))
        return [Mock()]

    monkeypatch.setattr("torch.distributed.fsdp.fully_shard", note)
    plan = preflight(load_config(words), 1)
    model = build.build_model(plan, one_rank(), torch.device("cpu"))
    assert {*seen} == {(getattr(torch, param), getattr(torch, reduce))}
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}


def test_a_module_in_fp32_is_not_all_whose_names_begin_as_its_own() -> None:
    args = dataclasses.replace(TINY, n_layers=11)
    model = build_local_model(
        functools.partial(Decoder, args, SEQ_LEN),
        lambda stage: None,
        ModelParts([args.module_names], fp32_modules=["layers.1"]),
        meshes=one_rank(),
        training=Training(dtype="bfloat16"),
        schedule="1F1B",
        device=torch.device("cpu"),
    )
    in_fp32 = {n for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert in_fp32 == {n for n in args.table.parameters if n.startswith("layers.1.")}
