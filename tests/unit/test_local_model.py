"""Where the tensors of a rank's part of the model are, and of which type."""

import dataclasses
import functools
from typing import Any
from unittest.mock import Mock

import torch

from meshwright import build
from meshwright.config.loader import load_config
from meshwright.models.decoder import Decoder
from meshwright.parallelisms.local_model import allocate, build_local_model
from meshwright.preflight import preflight
from tests.helpers.tiny import SEQ_LEN, TINY


def test_buffers_may_be_elsewhere_than_parameters() -> None:
    cpu, elsewhere = torch.device("cpu"), torch.device("meta")
    with torch.device("meta"):
        model = Decoder(TINY, SEQ_LEN)
    allocate(model, parameters=cpu, buffers=elsewhere)
    assert {parameter.device for parameter in model.parameters()} == {cpu}
    assert {buffer.device for buffer in model.buffers()} == {elsewhere}
    assert not any("cos" in name for name in model.state_dict())


def test_every_type_is_the_configs(monkeypatch) -> None:
    words = ["--job.config_file", "tests/integration/tiny.toml", "--training.dtype", "float32"]
    words += ["--training.mixed_precision_param", "bfloat16"]
    words += ["--training.mixed_precision_reduce", "float32"]
    given: dict[str, Any] = {}

    def note(model: object, apply: Any, stages: object, **options: object) -> None:
        given.update(options | apply.keywords)

    monkeypatch.setattr(build, "build_local_model", note)
    build.build_model(preflight(load_config(words)[0], 1), None, torch.device("cpu"))
    assert (given["dtype"], given["param_dtype"]) == (torch.bfloat16, torch.bfloat16)
    assert (given["reduce_dtype"], given["master_dtype"]) == (torch.float32, torch.float32)


def test_a_module_in_fp32_is_not_all_whose_names_begin_as_its_own() -> None:
    args = dataclasses.replace(TINY, n_layers=11)
    meshes = Mock()
    meshes.pp.get_local_rank.return_value, meshes.pp.size.return_value = 0, 1
    model = build_local_model(
        functools.partial(Decoder, args, SEQ_LEN),
        lambda stage: None,
        [args.module_names],
        meshes=meshes,
        schedule="1F1B",
        num_microbatches=1,
        activation_shape=(1, SEQ_LEN, args.dim),
        dtype=torch.bfloat16,
        master_dtype=torch.bfloat16,
        fp32_modules=["layers.1"],
        device=torch.device("cpu"),
    )
    in_fp32 = {n for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert in_fp32 == {n for n in args.table.parameters if n.startswith("layers.1.")}
