"""muP: what scales with the width, that exports hold it, and that the coordinate check finds wrong
rules."""

import dataclasses
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from meshwright.commands.prove import coordinates
from meshwright.commands.prove.command import _prove_coordinates
from meshwright.commands.prove.coordinates import check_coordinates
from meshwright.config.loader import load_config
from meshwright.models import mup
from meshwright.models.families.llama import LlamaArgs
from meshwright.models.families.qwen2 import Qwen2Args
from meshwright.models.families.qwen3 import Qwen3Args
from meshwright.system.errors import ConfigError
from meshwright.train.optim.registry import settings_of
from tests.helpers.cli import check_job, export
from tests.helpers.hf import random_model, save_checkpoint
from tests.helpers.slow import slow

WIDE = LlamaArgs(128, 2, 4, 2, 256, 258, mup_base_dim=32)


def test_a_width_of_4_times_the_base_has_these_rules() -> None:
    plain = dataclasses.replace(WIDE, mup_base_dim=None).table.parameters
    optimizer = load_config(["--optimizer.weight_decay=0.1"]).optimizer
    for name, parameter in WIDE.table.parameters.items():
        of_matrix = name.startswith("layers.") and parameter.role == "matrix"
        settings = settings_of(name, parameter, optimizer)
        assert settings.lr_scale == (0.25 if of_matrix else 1)
        if of_matrix:
            assert parameter.std == pytest.approx(plain[name].std / 2)
            assert settings.weight_decay * settings.lr_scale == pytest.approx(0.1)
        elif name == "output.weight":
            assert parameter.std == 0.02
        else:
            assert parameter == plain[name]
    assert WIDE.table.output_scale == 0.25
    assert WIDE.table.layers[0].attention.scale == 1 / 32


@pytest.mark.parametrize(
    "args",
    [
        WIDE,
        *slow(
            Qwen2Args(48, 2, 4, 2, 96, 258, mup_base_dim=20),
            Qwen3Args(48, 2, 4, 2, 96, 258, head_dim=16, mup_base_dim=20),
        ),
    ],
)
def test_an_export_is_the_same_function(args, tmp_path, capsys) -> None:
    model = random_model(args)
    save_checkpoint(tmp_path / "dump" / "checkpoint", model, args)
    out = tmp_path / "out"
    export([str(tmp_path / "dump"), str(out), "--dtype=float32"])
    tokens = torch.arange(24).view(2, 12)
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-4, atol=1e-5)


def _mup_job(*words: str) -> list[str]:
    return ["--model.args={mup_base_dim=64}", *words]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (_mup_job("--optimizer.name=muon"), "optimizer.name = 'muon': model.args.mup_base_dim has"),
        (["--model.args={mup_base_dim=0}"], "mup_base_dim = 0: must be positive"),
        (_mup_job("--model.name=qwen3_moe"), "muP has no rule for experts"),
        (_mup_job("--model.name=gemma2"), "mup_base_dim"),
        (
            ["--model.args={mup_base_dim=64, tie_embeddings=true}", "--checkpoint.last_save_in_hf"],
            "muP's factor on logits fits in neither",
        ),
    ],
)
def test_what_mup_does_not_go_with_is_one_error(words, said) -> None:
    with pytest.raises(ConfigError, match=said):
        check_job(words)


def _failures(monkeypatch, widths: tuple[int, ...]) -> list[str]:
    monkeypatch.setattr(coordinates, "WIDTHS", widths)
    config = load_config(["--optimizer.lr=1e-3"])
    args = LlamaArgs(256, 6, 8, 4, 768, 2048, mup_base_dim=256)
    return [one.failure for one in check_coordinates(config, args) if one.failure]


def test_a_model_without_mup_has_no_coordinates(capsys) -> None:
    """The error comes first, and no table's head."""
    config = load_config([])
    with pytest.raises(ConfigError, match="the model doesn't have muP"):
        _prove_coordinates(config, LlamaArgs(256, 6, 8, 4, 768, 2048))
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_mup_keeps_coordinates(monkeypatch) -> None:
    assert _failures(monkeypatch, (64, 128, 256)) == []


WRONG = {
    "rates as without it": ("matrix_lr_scale", 1.0, "change of layers.0"),
    "logits as without it": ("output_scale", 1.0, "decrease of the loss"),
    "first weights as without it": (None, None, "layers.0 at the start"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("field", "value", "named"), WRONG.values(), ids=WRONG)
def test_the_coordinate_check_names_a_wrong_rule(monkeypatch, field, value, named) -> None:
    right = mup.MupArgs.decoder

    def decoder(self, **options):
        spec = right(self, **options)
        if field is not None:
            return dataclasses.replace(spec, **{field: value})
        root = math.sqrt(self.width_ratio)
        layers = [
            dataclasses.replace(
                layer,
                attention=dataclasses.replace(
                    layer.attention,
                    std=layer.attention.std * root,
                    out_std=layer.attention.out_std * root,
                ),
            )
            for layer in spec.layers
        ]
        return dataclasses.replace(spec, layers=tuple(layers))

    monkeypatch.setattr(mup.MupArgs, "decoder", decoder)
    failures = _failures(monkeypatch, (64, 512))
    assert any(line.startswith(named) for line in failures), failures
