"""Model folders of Hugging Face: in, out, and what is wrong with them."""

import json

import pytest
import torch
from transformers import LlamaForCausalLM

from meshwright.cli.export import main as export
from meshwright.models.llama import hf
from tests.helpers.hf import (
    CASES,
    load_hf,
    save_checkpoint,
    save_transformers,
    tensors_of,
    transformers_model,
)


@pytest.mark.parametrize("args", CASES.values(), ids=CASES.keys())
def test_in_and_out_again_is_equal_to_the_bit(args, tmp_path, capsys) -> None:
    theirs = transformers_model(args)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="30KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    ours = load_hf(tmp_path / "hf", args)
    tokens = torch.arange(2 * 50).view(2, 50) * 7 % args.vocab_size
    want = theirs(tokens).logits
    assert (ours(tokens) - want).abs().max() <= 1e-5 * want.abs().max()

    checkpoint = save_checkpoint(tmp_path, ours, args)
    out = tmp_path / "out"
    options = ["--dtype", "float32", "--max-shard-size", "30KB"]
    export([str(checkpoint), str(out), *options])
    assert len(list(out.glob("*.safetensors"))) > 2
    was, now = tensors_of(tmp_path / "hf"), tensors_of(out)
    assert was.keys() == now.keys()
    for name, tensor in was.items():
        assert torch.equal(tensor, now[name]), name
    again = LlamaForCausalLM.from_pretrained(out)
    assert torch.equal(again(tokens).logits, want)
    said = capsys.readouterr().out
    assert f"compared {len(was)} tensors with the checkpoint's to the bit: equal" in said
    assert "compared logits of 256 tokens, in fp32, with transformers" in said


@pytest.mark.parametrize("args", CASES.values(), ids=CASES.keys())
def test_both_spellings_of_the_rotation_are_read(args, tmp_path) -> None:
    wanted = {name: getattr(args, name) for name in hf.read_config(hf.write_config(args, 64))}

    def read(config: dict) -> dict:
        return {name: found.value for name, found in hf.read_config(config).items()}

    assert read(hf.write_config(args, 64)) == wanted  # rope_theta, rope_scaling
    save_transformers(tmp_path, args)
    new = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in new
    assert read(new) == wanted
