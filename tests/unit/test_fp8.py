"""Folders with weights in blocks of FP8, as DeepSeek-V3's and Kimi K2's are."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from meshwright.checkpoint.conversion.hf_folder import check_hf_folder
from meshwright.checkpoint.conversion.readers import HuggingFaceWeights
from meshwright.models.families import MODELS
from meshwright.system.errors import ConfigError
from meshwright.system.files import NamedPath
from tests.helpers.cli import export
from tests.helpers.families import small
from tests.helpers.hf import load_hf, save_checkpoint, tensors_of, transformers_model

FORM = MODELS["deepseek_v3"].hf

ARGS = small(
    MODELS["deepseek_v3"],
    259,
    dim=256,
    n_layers=2,
    hidden_dim=384,
    expert_dim=128,
    q_lora_rank=200,
    kv_lora_rank=128,
)
"""Most matrices are whole blocks of 128 rows and columns; of kv_a_proj the last has 4 rows."""


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """As DeepSeek's files are: projections in 8 bits; and products of their blocks and scales."""
    path, generator, wanted = tmp_path / "fp8", torch.Generator().manual_seed(0), {}
    transformers_model(ARGS).save_pretrained(path, max_shard_size="1GB")
    stored = load_file(path / "model.safetensors")
    for name in [name for name in stored if "_proj" in name]:
        rows, columns = stored[name].shape
        grid = -(-rows // 128), -(-columns // 128)
        scales = torch.rand(grid, generator=generator) * 1e-2
        stored[name] = stored[name].to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        wanted[name] = stored[name].float() * spread
        if rows % 128 == columns % 128 == 0:  # transformers has no blocks with fewer
            theirs = Fp8Dequantize(None)._dequantize_one(stored[name], scales)
            assert torch.equal(wanted[name], theirs)
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    (path / "config.json").write_text(json.dumps(config))
    return path, wanted


def test_blocks_of_fp8_are_dequantized_as_transformers_does(folder, tmp_path) -> None:
    """On load in fp32, and exported in bf16, to the bit, without a word of quantization."""
    path, wanted = folder
    check_hf_folder(NamedPath("folder", path), FORM, ARGS)
    model = load_hf(path, ARGS)
    for ours, theirs in {
        "layers.0.feed_forward.w2.weight": wanted["model.layers.0.mlp.down_proj.weight"],
        "layers.1.feed_forward.experts.w3": torch.stack(
            [wanted[f"model.layers.1.mlp.experts.{n}.up_proj.weight"] for n in range(8)]
        ),
    }.items():
        assert torch.equal(model.get_parameter(ours), theirs), ours
    out = tmp_path / "out"
    export([str(save_checkpoint(tmp_path, model, ARGS)), str(out)])
    written = tensors_of(out)
    for name, values in wanted.items():
        assert written[name].dtype == torch.bfloat16
        assert torch.equal(written[name], values.bfloat16()), name
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert not [name for name in written if name.endswith("_scale_inv")]


def test_a_rank_reads_its_part_of_the_blocks_of_fp8(folder) -> None:
    path, wanted = folder
    weights = HuggingFaceWeights(NamedPath("folder", path), FORM, ARGS)
    (piece,) = weights.pieces("layers.1.attention.wkv_a.weight")
    whole = wanted["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]
    for start, end in ((0, 5), (120, 132), (127, 129), (131, 132)):
        for first, last in ((0, 256), (100, 200), (127, 129)):
            part = piece.read(((start, first), (end - start, last - first)))
            assert torch.equal(part, whole[start:end, first:last])


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("weight_block_size", [64, 64], r"\[64, 64\]; can read \[128, 128\] alone"),
        ("fmt", "e5m2", "'e5m2'; can read 'e4m3' alone"),
        ("quant_method", "awq", "'awq'; can read fp8, weights"),
    ],
)
def test_other_formats_are_rejected_by_key(folder, key, value, shown) -> None:
    path, _ = folder
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"][key] = value
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=rf"{key} is .*{value if key != 'weight_block_size' else 64}"
    ):
        check_hf_folder(NamedPath("folder", path), FORM, ARGS)


def test_scales_of_another_shape_are_no_blocks_of_fp8(folder) -> None:
    path, _ = folder
    stored = load_file(path / "model.safetensors")
    stored["model.layers.0.mlp.down_proj.weight_scale_inv"] = torch.ones(2, 2)
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="down_proj.weight .* is of type F8_E4M3, not F32"):
        check_hf_folder(NamedPath("folder", path), FORM, ARGS)
