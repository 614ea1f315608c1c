"""Model folders that nest a text model beside a vision tower: they are read as the text model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from meshwright.checkpoint.conversion.hf_folder import (
    check_hf_folder,
    declared_ends,
    find_family,
    read_args,
)
from meshwright.models.families import MODELS
from meshwright.system.errors import ConfigError
from meshwright.system.files import NamedPath, warn_once
from tests.helpers.cli import command, export
from tests.helpers.families import family_of
from tests.helpers.hf import CASES, fill, load_hf, save_checkpoint, words_of_job
from tests.helpers.slow import slow_but

TOWER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}

QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}

NESTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gemma3": (
        "Gemma3",
        {"vision_config": TOWER, "mm_tokens_per_image": 4, "image_token_index": 258},
        "language_model.model.norm.weight",
    ),
    "qwen3_5": (
        "Qwen3_5",
        {"vision_config": QWEN_TOWER, "image_token_id": 258},
        "model.language_model.norm.weight",
    ),
    "mistral3": (
        "Mistral3",
        {"vision_config": {"model_type": "pixtral", **TOWER}, "image_token_index": 258},
        "language_model.model.norm.weight",
    ),
}
"""By the outer model_type: the beginning of its classes' names in transformers, the keys that are
not the text model's, and a name in its files."""


def save_nested(folder: Path, outer: str, case: str) -> transformers.PreTrainedModel:
    """Save a model of transformers' own class for images and text, and return it."""
    kind, options, _ = NESTS[outer]
    args = CASES[case]
    text = family_of(args).hf.write_config(args, 64)
    options = options | {"text_config": text, "tie_word_embeddings": args.tie_embeddings}
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        fill(name, parameter, generator)
    model.save_pretrained(folder, max_shard_size="1GB")
    return model


@pytest.mark.parametrize(
    ("outer", "case"),
    slow_but(
        "gemma3",
        {
            "gemma3": ("gemma3", "gemma3_text-mha-tied-scaled"),
            "gemma3-untied": ("gemma3", "gemma3_text-gqa"),
            "qwen3_5": ("qwen3_5", "qwen3_5_text-gqa"),
            "mistral3": ("mistral3", "mistral-gqa"),
        },
    ),
)
@torch.no_grad()
def test_a_text_model_beside_a_vision_tower_is_read_and_exported(
    outer, case, tmp_path, caplog
) -> None:
    warn_once.cache_clear()
    args, folder = CASES[case], tmp_path / "hf"
    theirs = save_nested(folder, outer, case)
    tokens = torch.arange(2 * 50).view(2, 50) * 7 % 250
    want = theirs(tokens).logits
    stored = load_file(folder / "model.safetensors")
    assert NESTS[outer][2] in stored

    place = NamedPath("model.flavor", folder)
    family = find_family(place, [*MODELS.values()])
    assert family is family_of(args)
    assert read_args(place, family.hf, family.args) == args.resolved
    ours = load_hf(folder, args)
    assert (ours(tokens) - want).abs().max() <= 1e-5 * want.abs().max()
    for prefix in {name.partition(".")[0] for name in stored} - {"language_model", "lm_head"}:
        prefix = {"model": "model.visual"}.get(prefix, prefix)
        names = [name for name in stored if name.startswith(f"{prefix}.")]
        assert f"{len(names)} tensors of {prefix}.*, {names[0]} the first, left out" in caplog.text

    checkpoint = save_checkpoint(tmp_path, ours, args)
    export([str(checkpoint), str(tmp_path / "out"), "--dtype", "float32"])
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["model_type"] == family.hf.model_type
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (again(tokens).logits - want).abs().max() <= 1e-5 * want.abs().max()


def test_check_takes_such_a_folder_and_names_what_is_wrong_in_it(tmp_path, capsys) -> None:
    folder = tmp_path / "hf"
    save_nested(folder, "gemma3", "gemma3_text-tied")
    words = words_of_job(tmp_path, folder, "--checkpoint.initial_load_in_hf=true")

    def refusal() -> str:
        with pytest.raises(ConfigError) as caught:
            command("check")(words)
        return str(caught.value)

    command("check")(words)
    assert "gemma3_text" in capsys.readouterr().out
    file = folder / "model.safetensors"
    stored = load_file(file)
    save_file(stored | {"audio_tower.norm": torch.ones(3)}, file, {"format": "pt"})
    assert "holds audio_tower.norm, for which the model has no place" in refusal()
    name = NESTS["gemma3"][2]
    save_file(stored | {name: torch.ones(3)}, file, {"format": "pt"})
    assert f"{name} in model.safetensors has shape (3,)" in refusal()
    config = json.loads((folder / "config.json").read_text())
    for changes, said in (
        ({"model_type": "llava"}, "model_type is 'llava', not one of"),
        ({"text_config": 3}, "text_config is 3, not a table"),
        (
            {"text_config": {"model_type": "llama"}},
            "text_config.model_type is 'llama', not 'gemma3_text'",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method is 'awq'"),
    ):
        (folder / "config.json").write_text(json.dumps(config | changes))
        assert said in refusal()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"text_config": 3}', "config.json: text_config is 3, not a table"),
        ("[]", "config.json holds no JSON object"),
    ],
)
def test_ends_that_cannot_be_read_are_an_error_with_one_place(text, says, tmp_path) -> None:
    (tmp_path / "config.json").write_text(text)
    place = NamedPath("checkpoint.initial_load_path", tmp_path)
    with pytest.raises(ConfigError) as error:
        declared_ends(place)
    assert str(error.value) == f"checkpoint.initial_load_path = '{tmp_path}': {says}"


PUBLISHED = {
    "gemma3_4b": {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
    },
    "qwen3.5_9b": {
        "model_type": "qwen3_5",
        "text_config": {
            "attn_output_gate": True,
            "eos_token_id": 248044,
            "full_attention_interval": 4,
            "mamba_ssm_dtype": "float32",
            "mlp_only_layers": [],
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
        },
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "qwen3_5", "depth": 27},
    },
}
"""config.json as published, with few of the vision tower's keys; an absent key is the class's
default."""


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_a_published_config_is_the_flavor(flavor, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[flavor]))
    place = NamedPath("model.flavor", tmp_path)
    family = find_family(place, [*MODELS.values()])
    assert read_args(place, family.hf, family.args) == family.flavors[flavor]
    with pytest.raises(ConfigError, match="holds neither model.safetensors nor"):
        check_hf_folder(place, family.hf, family.flavors[flavor])
