"""Exports: what they copy, that they notice what went wrong, and that they leave nothing half."""

import dataclasses
import importlib.util
import json
import pickle
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

import meshwright.checkpoint.export
import meshwright.checkpoint.hf_write
from meshwright.cli.export import main as export
from meshwright.datasets.tokenizers import build_tokenizer
from meshwright.errors import ConfigError
from tests.helpers.checkpoints import Trap
from tests.helpers.files import tree
from tests.helpers.hf import (
    CASES,
    SMALL,
    load_hf,
    save_checkpoint,
    save_transformers,
    tensors_of,
)
from tests.helpers.tokenizer_files import byte_level_json

ARGS = CASES["llama-scaled"]


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    model = load_hf(save_transformers(tmp_path / "hf", ARGS), ARGS)
    return save_checkpoint(tmp_path / "dump" / "checkpoint", model, ARGS)


def message(*arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        export([*map(str, arguments)])
    return str(caught.value)


def test_bfloat16_is_the_checkpoint_rounded(checkpoint, tmp_path, capsys) -> None:
    export([str(tmp_path / "dump"), str(tmp_path / "out")])
    was, now = tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "out")
    for name, tensor in was.items():
        assert now[name].dtype == torch.bfloat16
        assert torch.equal(now[name], tensor.bfloat16()), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert config["max_position_embeddings"] == 128  # 8 times 16
    assert (config["bos_token_id"], config["eos_token_id"]) == (256, 257)
    assert LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16
    assert "rounded to torch.bfloat16, to the bit: equal" in capsys.readouterr().out


def test_without_transformers_our_own_reader_compares(
    checkpoint, tmp_path, capsys, monkeypatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name)
    )
    export([str(checkpoint), str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert "with meshwright's own reader (transformers is not installed): largest diff" in said


def test_the_tokenizer_comes_along(tmp_path) -> None:
    source = tmp_path / "tokenizer"
    source.mkdir()
    file = byte_level_json(source / "tokenizer.json", ["<|begin_of_text|>", "<|end_of_text|>"])
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (source / "notes.txt").write_text("not a tokenizer's")
    args = dataclasses.replace(SMALL, vocab_size=402)
    model = load_hf(save_transformers(tmp_path / "hf", args), args)
    checkpoint = save_checkpoint(tmp_path / "checkpoint", model, args, tokenizer_path=str(file))
    export([str(checkpoint), str(tmp_path / "out")])
    copied = ["tokenizer.json", "chat_template.jinja", "generation_config.json"]
    for name in copied:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    weights = {"config.json", "model.safetensors"}
    assert tree(tmp_path / "out") == {*copied, *weights}
    text = "def f(x): return x"
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = theirs(text, add_special_tokens=False)["input_ids"]
    assert ids == build_tokenizer(str(file)).encode(text)

    moved = source.rename(tmp_path / "moved")
    assert "fix: name the tokenizer that it was trained with" in message(checkpoint, tmp_path / "b")
    export([str(checkpoint), str(tmp_path / "b"), "--tokenizer", str(moved)])
    assert tree(tmp_path / "b") == tree(tmp_path / "out")
    said = message(checkpoint, tmp_path / "c", "--tokenizer", "bytes")
    assert "--tokenizer = 'bytes': is not what checkpoint" in said
    assert not (tmp_path / "c").exists()


def test_what_cannot_be_exported(checkpoint, tmp_path) -> None:
    out = tmp_path / "out"
    assert "holds no checkpoint" in message(tmp_path / "nowhere", out)
    assert "holds no checkpoint" in message(tmp_path / "hf", out)
    assert "--max-shard-size = '5': is no size" in message(checkpoint, out, "--max-shard-size", "5")
    assert "must be positive" in message(checkpoint, out, "--max-shard-size", "0GB")
    assert "exists already" in message(checkpoint, tmp_path / "hf")
    (tmp_path / "file").touch()
    assert "cannot be written" in message(checkpoint, tmp_path / "file" / "out")
    (shard,) = checkpoint.glob("*.distcp")
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    assert "cannot be read" in message(checkpoint, out)
    shard.unlink()
    assert "cannot be read" in message(checkpoint, out)
    assert not list(tmp_path.glob("out*"))


def test_a_checkpoint_that_would_run_code_is_refused(checkpoint, tmp_path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "trap_was_run")))
    said = message(checkpoint, tmp_path / "out")
    assert "cannot be read: it names" in said
    assert "which is no data" in said
    assert not (tmp_path / "trap_was_run").exists()


def test_a_wrong_permutation_is_noticed(checkpoint, tmp_path, monkeypatch) -> None:
    """Even one that our own reader has too, and so would undo."""
    out = tmp_path / "out"
    monkeypatch.setattr(meshwright.checkpoint.hf_write, "halves", lambda tensor, head_dim: tensor)
    assert "wq.weight is not what the checkpoint holds" in message(checkpoint, out)
    monkeypatch.setattr("meshwright.checkpoint.hf_read.pairs", lambda tensor, head_dim: tensor)
    said = message(checkpoint, out)
    assert "its logits by transformers" in said
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_scaling", None),
        ("rope_theta", 10000.0),
        ("rms_norm_eps", 1e-3),
    ],
)
def test_a_wrong_config_is_noticed(checkpoint, tmp_path, monkeypatch, key, value) -> None:
    write = meshwright.checkpoint.export._write_json

    def write_wrong(file: Path, content: dict) -> None:
        write(file, content | {key: value} if file.name == "config.json" else content)

    monkeypatch.setattr(meshwright.checkpoint.export, "_write_json", write_wrong)
    assert "its logits by transformers" in message(checkpoint, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_what_a_killed_export_left_does_not_matter(checkpoint, tmp_path) -> None:
    left = tmp_path / "out.unfinished"
    left.mkdir()
    (left / "model-00009-of-00009.safetensors").write_bytes(b"half")
    export([str(checkpoint), str(tmp_path / "out")])
    assert tree(tmp_path / "out") == {"config.json", "generation_config.json", "model.safetensors"}
    assert not left.exists()
