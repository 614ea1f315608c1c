"""Folders with quantized weights, against transformers' own code for them."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from meshwright.checkpoint.conversion.hf_folder import check_hf_folder
from meshwright.checkpoint.conversion.readers import HuggingFaceWeights
from meshwright.models.families import MODELS
from meshwright.system.errors import ConfigError
from meshwright.system.files import NamedPath
from tests.helpers.cli import export
from tests.helpers.families import small
from tests.helpers.hf import load_hf, save_checkpoint, tensors_of, transformers_model

FORM = MODELS["gpt_oss"].hf
ARGS = small(MODELS["gpt_oss"], 259, dim=64, hidden_dim=96, n_layers=2, n_experts=4)
"""Rows of whole blocks of 32, as the format has them."""


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """As OpenAI's files are: experts in 4 bits; and what transformers makes of them."""
    path, generator = tmp_path / "mxfp4", torch.Generator().manual_seed(0)
    transformers_model(ARGS).save_pretrained(path, max_shard_size="1GB")
    stored, wanted = load_file(path / "model.safetensors"), {}
    for name in [name for name in stored if name.endswith("_proj") and "experts" in name]:
        experts, columns, rows = stored.pop(name).shape
        size = experts, rows, columns // 32
        blocks = torch.randint(256, (*size, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(116, 132, size, dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wanted[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    return path, wanted


def test_mxfp4_is_dequantized_as_transformers_does(folder, tmp_path) -> None:
    """And exported in bf16, to the bit, without a word of quantization."""
    path, wanted = folder
    check_hf_folder(NamedPath("folder", path), FORM, ARGS)
    out = tmp_path / "out"
    export([str(save_checkpoint(tmp_path, load_hf(path, ARGS), ARGS)), str(out)])
    written = tensors_of(out)
    assert len(wanted) == 2 * ARGS.n_layers
    for name, values in wanted.items():
        assert written[name].dtype == torch.bfloat16
        assert torch.equal(written[name], values), name
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


def test_a_rank_reads_its_part_of_the_blocks(folder) -> None:
    """Parts begin and end within a block, and within a pair of rows of w1 and w3."""
    path, _ = folder
    weights = HuggingFaceWeights(NamedPath("folder", path), FORM, ARGS)
    for name in ("w1", "w2", "w3", "b3"):
        name = f"layers.1.feed_forward.experts.{name}"
        for number, piece in enumerate(weights.pieces(name)):
            (first, *offset), (count, *shape) = piece.box
            assert (first, count) == (number, 1)  # one expert is in memory at a time
            whole = piece.read(((0, *offset), (1, *shape)))
            for start, length in ((0, 5), (31, 34), (math.prod(shape[:1]) - 3, 3)):
                starts, sizes = [start] + [7] * (len(shape) - 1), [length] + [33] * (len(shape) - 1)
                part = piece.read(((0, *starts), (1, *sizes)))
                cut = tuple(slice(a, a + b) for a, b in zip(starts, sizes, strict=True))
                assert torch.equal(part[0], whole[0][cut]), name


def test_other_quantizations_are_rejected_by_name(folder) -> None:
    path, _ = folder
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "bitsandbytes"
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="is 'bitsandbytes'; can read mxfp4, weights"):
        check_hf_folder(NamedPath("folder", path), FORM, ARGS)


def test_blocks_without_scales_are_a_tensor_that_is_missing(folder) -> None:
    path, _ = folder
    stored = load_file(path / "model.safetensors")
    del stored["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="layers.1.mlp.experts.down_proj, our .*is in none of"):
        check_hf_folder(NamedPath("folder", path), FORM, ARGS)
