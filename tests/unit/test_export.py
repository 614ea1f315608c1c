"""Exports: what they copy, that they notice what went wrong, and that they leave nothing half."""

import dataclasses
import importlib.util
import json
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaForCausalLM

from meshwright.checkpoint.conversion import export as exporting
from meshwright.checkpoint.conversion import tokenizer_files
from meshwright.checkpoint.conversion.tokenizer_proof import prove_tokenizer
from meshwright.checkpoint.retention import apply_retention
from meshwright.datasets.tokenizers.kinds import build_tokenizer
from meshwright.models.families.llama import LlamaArgs
from meshwright.models.families.mixtral import MixtralArgs
from meshwright.system.errors import ConfigError
from meshwright.system.files import NamedPath
from tests.helpers.checkpoints import set_manifest
from tests.helpers.cli import check_job, export
from tests.helpers.files import no_room, tree
from tests.helpers.hf import (
    CASES,
    SMALL,
    load_hf,
    random_model,
    save_checkpoint,
    save_transformers,
    tensors_of,
)
from tests.helpers.job import assert_equal
from tests.helpers.tokenizer_files import (
    HARD_TEXTS,
    byte_level_json,
    metaspace_json,
    sentencepiece_model,
)

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
    assert config["transformers_version"] == "4.56.0"
    assert config["max_position_embeddings"] == 128  # 8 times 16
    assert (config["bos_token_id"], config["eos_token_id"]) == (256, 257)
    assert LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16
    modes = {file.stat().st_mode for file in (tmp_path / "out").glob("*.*")}
    assert len(modes) == 1  # whoever may read the config may read the weights
    assert "rounded to bfloat16, to the bit: equal" in capsys.readouterr().out


def test_the_mean_of_a_model_with_experts(tmp_path) -> None:
    """Biases and loads of routers have no mean: those of the model count."""
    experts = MixtralArgs(32, 2, 4, 4, 24, 258, n_experts=4, n_active=2)
    model = load_hf(save_transformers(tmp_path / "hf", experts), experts)
    saved = {f"average.{name}": one for name, one in model.named_parameters()}
    saved |= {f"model.{name}": one for name, one in model.named_buffers()}
    both = torch.nn.Module()
    both.state_dict = lambda: saved  # type: ignore[method-assign,assignment]
    folder = save_checkpoint(tmp_path / "checkpoint", both, experts, prefix="")
    export([str(folder), str(tmp_path / "out"), "--average", "--dtype", "float32"])
    assert_equal(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "hf"))


def test_a_checkpoint_without_an_average_says_so(checkpoint, tmp_path) -> None:
    with pytest.raises(ConfigError, match="the checkpoint has no average\n  fix: leave the aver"):
        export([str(checkpoint), str(tmp_path / "out"), "--average"])


def test_without_transformers_logits_are_not_compared(
    checkpoint, tmp_path, capsys, monkeypatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name)
    )
    export([str(checkpoint), str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert "did not compare logits: transformers is not installed" in said
    assert "tensors with the checkpoint's, rounded to bfloat16, to the bit: equal" in said


def test_a_full_disk_leaves_nothing(checkpoint, tmp_path) -> None:
    with no_room(10_000):
        assert "cannot be written: model.safetensors: " in message(checkpoint, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_the_tokenizer_comes_along(tmp_path) -> None:
    source = tmp_path / "tokenizer"
    source.mkdir()
    file = byte_level_json(source / "tokenizer.json", ["<|begin_of_text|>", "<|end_of_text|>"])
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 2], "top_k": 5}')
    (source / "notes.txt").write_text("not a tokenizer's")
    args = dataclasses.replace(SMALL, vocab_size=402)
    model = load_hf(save_transformers(tmp_path / "hf", args), args)
    checkpoint = save_checkpoint(tmp_path / "checkpoint", model, args, tokenizer_path=str(file))
    export([str(checkpoint), str(tmp_path / "out")])
    copied = ["tokenizer.json", "chat_template.jinja"]
    for name in copied:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    of_model = {"config.json", "generation_config.json", "model.safetensors"}
    assert tree(tmp_path / "out") == {*copied, *of_model, "tokenizer_config.json"}
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == {"eos_token_id": 401, "bos_token_id": 400, "top_k": 5}
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "mine": 1}
    (source / "tokenizer_config.json").write_text(json.dumps(names | {"unk_token": "<none>"}))
    export([str(checkpoint), str(tmp_path / "own")])
    written = json.loads((tmp_path / "own" / "tokenizer_config.json").read_text())
    assert {name: written[name] for name in names} == names
    assert written["pad_token"] == "<|end_of_text|>"
    assert written["model_max_length"] == 64  # of a sequence in training
    assert "unk_token" not in written  # which the vocabulary lacks
    (source / "tokenizer_config.json").unlink()
    export([str(checkpoint), str(tmp_path / "without"), "--without-tokenizer"])
    assert tree(tmp_path / "without") == of_model

    moved = source.rename(tmp_path / "moved")
    assert "fix: name the tokenizer that it was trained with" in message(checkpoint, tmp_path / "b")
    export([str(checkpoint), str(tmp_path / "b"), "--tokenizer", str(moved)])
    assert tree(tmp_path / "b") == tree(tmp_path / "out")
    said = message(checkpoint, tmp_path / "c", "--tokenizer", "bytes")
    assert "--tokenizer = 'bytes': is not what checkpoint" in said
    used = {"bos_token_id": 1, "eos_token_id": 0}  # by files beside it that are not there now
    set_manifest(checkpoint, special_tokens=used)
    said = message(checkpoint, tmp_path / "c", "--tokenizer", str(moved))
    assert "has other special tokens than in the training of" in said
    assert f"not {used}" in said.replace("\n", " ")
    assert not (tmp_path / "c").exists()


def test_what_cannot_be_exported(checkpoint, tmp_path) -> None:
    out = tmp_path / "out"
    assert "no such folder\n  fix: check the path" in message(tmp_path / "nowhere", out)
    assert "holds no checkpoint" in message(tmp_path / "hf", out)
    said = message(checkpoint, out, "--max-shard-size", "5")
    assert "--max-shard-size = '5': is not a file size" in said
    assert "is not a file size" in message(checkpoint, out, "--max-shard-size", "0GB")
    assert "exists already" in message(checkpoint, tmp_path / "hf")
    (tmp_path / "file").touch()
    assert "cannot be written" in message(checkpoint, tmp_path / "file" / "out")
    (shard,) = checkpoint.glob("*.distcp")
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    assert "bytes, but" in message(checkpoint, out)
    shard.unlink()
    assert "is damaged: __0_0.distcp: No such file" in message(checkpoint, out)
    assert not list(tmp_path.glob("out*"))


def test_a_wrong_permutation_is_noticed(checkpoint, tmp_path, monkeypatch) -> None:
    """Even one that our own reader has too, and so would undo."""
    out = tmp_path / "out"
    conversion = "meshwright.checkpoint.conversion"
    monkeypatch.setattr(f"{conversion}.export.halves", lambda tensor, *_: tensor)
    assert "wq.weight differs from the checkpoint" in message(checkpoint, out)
    monkeypatch.setattr(f"{conversion}.readers.pairs", lambda tensor, *_: tensor)
    said = message(checkpoint, out)
    assert "its logits by transformers" in said
    assert not list(tmp_path.glob("out*"))


def test_a_wrong_config_or_another_type_is_noticed(checkpoint, tmp_path, monkeypatch) -> None:
    write, read = exporting._write_json, exporting._read

    def write_wrong(file: Path, content: dict) -> None:
        wrong = {"rope_scaling": None} if file.name == "config.json" else {}
        write(file, content | wrong)

    with monkeypatch.context() as patch:
        patch.setattr(exporting, "_write_json", write_wrong)
        assert "its logits by transformers" in message(checkpoint, tmp_path / "out")

    def read_wide(*given: object) -> dict[str, torch.Tensor]:
        return {name: tensor.float() for name, tensor in read(*given).items()}

    monkeypatch.setattr(exporting, "_read", read_wide)
    said = message(checkpoint, tmp_path / "out", "--dtype", "bfloat16")
    assert "differs from the checkpoint" in said
    assert not list(tmp_path.glob("out*"))


def test_logits_of_nothing_but_zero_are_no_comparison(tmp_path) -> None:
    """Both sides agree that it is 0."""
    model = load_hf(save_transformers(tmp_path / "hf", ARGS), ARGS)
    torch.nn.init.zeros_(model.output.weight)
    checkpoint = save_checkpoint(tmp_path / "checkpoint", model, ARGS)
    assert "logits are all 0" in message(checkpoint, tmp_path / "out")


def test_a_model_that_transformers_does_not_take(tmp_path) -> None:
    """Version 5 wants dim to be a multiple of n_heads, also of heads with a width of their own."""
    args = LlamaArgs(33, 1, 2, 2, 8, 259, head_dim=4)
    checkpoint = save_checkpoint(tmp_path, random_model(args), args)
    said = message(checkpoint, tmp_path / "out")
    assert "cannot load it: " in said
    assert "fix: try a different version of transformers" in said


def test_a_checkpoint_is_kept_while_it_is_exported(checkpoint, tmp_path, monkeypatch) -> None:
    newer = Path(shutil.copytree(checkpoint, checkpoint.with_name("step-6")))
    set_manifest(newer, step=6)
    kept, real = [], exporting._verify

    def retire_then_verify(*of_export: object) -> None:
        kept.extend(apply_retention(checkpoint.parent, 1))
        real(*of_export)

    monkeypatch.setattr(exporting, "_verify", retire_then_verify)
    export([str(checkpoint), str(tmp_path / "out")])
    assert kept == [5]


OF_SENTENCEPIECE = {
    "bpe": {},
    "bpe-default": {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    "bpe-nfkc": {"normalization_rule_name": "nfkc"},
    "bpe-nmt": {"normalization_rule_name": "nmt_nfkc"},
    "bpe-no-prefix": {"add_dummy_prefix": False},
    "unigram": {"model_type": "unigram", "vocab_size": 350, "byte_fallback": True},
    "bpe-symbols": {"user_defined_symbols": ["<sep>", "<b>", "7", "\u2581\u2581"]},
}


def _make_tokenizer(kind: str, folder: Path) -> str:
    folder.mkdir()
    if kind in OF_SENTENCEPIECE:
        file = sentencepiece_model(folder / "tokenizer.model", **OF_SENTENCEPIECE[kind])
    else:
        file = byte_level_json(folder / "tokenizer.json", ["<s>", "</s>"])
    return str(file)


def _save_with(path: str, folder: Path) -> Path:
    """A checkpoint of a small model with the tokenizer at `path`."""
    size = build_tokenizer(path).vocab_size + 3
    args = dataclasses.replace(SMALL, n_layers=1, vocab_size=size)
    model = load_hf(save_transformers(folder / "hf", args), args)
    return save_checkpoint(folder / "checkpoint", model, args, tokenizer_path=path)


@pytest.mark.parametrize("kind", ["bytes", "byte-level", *OF_SENTENCEPIECE])
def test_auto_tokenizer_gives_the_ids_of_training(kind: str, tmp_path: Path, capsys) -> None:
    path = kind if kind == "bytes" else _make_tokenizer(kind, tmp_path / "tokenizer")
    ours, checkpoint = build_tokenizer(path), _save_with(path, tmp_path)
    export([str(checkpoint), str(tmp_path / "out")])
    assert "(AutoTokenizer) with the tokenizer of training: equal" in capsys.readouterr().out
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in (*HARD_TEXTS[1:], " leading", "\n"):
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text), text
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text)), text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    if kind != "byte-level" and ours.bos_id is not None:  # that file says itself what it adds
        assert theirs("a")["input_ids"] == [ours.bos_id, *ours.encode("a")]
    # and ours reads it back: `meshwright generate`, `initial_load_path`
    again = build_tokenizer(str(tmp_path / "out"))
    assert all(again.encode(text) == ours.encode(text) for text in HARD_TEXTS[1:])
    assert (again.bos_id, again.eos_id) == (ours.bos_id, ours.eos_id)
    _check_for_other_loaders(tmp_path / "out", kind)


def _check_for_other_loaders(folder: Path, kind: str) -> None:
    """What vLLM (model_executor/models/llama.py, transformers_utils/config.py) and llama.cpp
    (convert_hf_to_gguf.py, LlamaModel and SpecialVocab) look up in a folder."""
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    for key in (
        *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
        *("rms_norm_eps", "rope_theta", "tie_word_embeddings", "torch_dtype", "hidden_act"),
    ):
        assert config[key] is not None, key
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["add_bos_token"] == (settings.get("bos_token") is not None)
    # llama.cpp takes any tokenizer.model for a sentencepiece model, and prefers it
    is_sentencepiece = kind in OF_SENTENCEPIECE
    assert (folder / "tokenizer.model").exists() == is_sentencepiece
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    assert model["type"] == ("Unigram" if kind == "unigram" else "BPE")
    assert max(AutoTokenizer.from_pretrained(folder).get_vocab().values()) < config["vocab_size"]


def test_a_tokenizer_without_an_unknown_token_is_exported(tmp_path: Path, capsys) -> None:
    """Texts with other words are bad records in training, and aren't compared."""
    (folder := tmp_path / "tokenizer").mkdir()
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["</s>"])
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<nope>"}')
    (folder / "config.json").write_text('{"model_type": "llama"}')
    export([str(_save_with(str(folder), tmp_path)), str(tmp_path / "out")])
    assert re.search(r"compared [1-9]\d* ids of transformers", capsys.readouterr().out)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs("b a").input_ids, theirs.eos_token_id) == ([1, 0], 2)


def test_a_tokenizer_of_llama_2s_class_is_exported_as_it_stands(tmp_path: Path) -> None:
    """transformers 5 rebuilds it, with another normalizer: it gives other ids for " "."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    file = metaspace_json(folder / "tokenizer.json", ["<unk>", "<s>", "</s>"])
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True}
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | names))
    checkpoint = _save_with(str(file), tmp_path)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    ours, text = build_tokenizer(str(file)), " a  b"
    rebuilt = AutoTokenizer.from_pretrained(folder)
    assert rebuilt(text, add_special_tokens=False)["input_ids"] != ours.encode(text)
    export([str(checkpoint), str(tmp_path / "out")])
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(text)["input_ids"] == [ours.bos_id, *ours.encode(text)]
    assert (theirs.pad_token, theirs.model_max_length) == ("</s>", 64)
    batch = theirs(["a", "a b c"], padding=True, return_tensors="pt")
    assert set(batch) == {"input_ids", "attention_mask"}  # those that the model takes
    out = LlamaForCausalLM.from_pretrained(tmp_path / "out").generate(**batch, max_new_tokens=2)
    assert out.shape[0] == 2


def test_the_template_of_the_job_is_exported_and_stops_at_its_turns(tmp_path, capsys) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    file = byte_level_json(folder / "tokenizer.json", ["<s>", "</s>", "<|im_end|>"])
    (folder / "tokenizer_config.json").write_text('{"chat_template": "of the tokenizer"}')
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    checkpoint = _save_with(str(file), tmp_path)
    set_manifest(checkpoint, config={"model": {"chat_template_path": str(template)}})
    export([str(checkpoint), str(tmp_path / "out")])
    assert "compared 3 conversations in the chat template: equal" in capsys.readouterr().out
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "out"), build_tokenizer(str(file))
    assert theirs.chat_template == template.read_text()
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == template.read_text()
    stops = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert stops == sorted([ours.eos_id, ours.special_ids["<|im_end|>"]])


def test_a_sentencepiece_model_comes_along_if_it_gives_the_ids(tmp_path: Path) -> None:
    """llama.cpp prefers it to the tokenizer.json beside it."""
    first = _save_with(_make_tokenizer("bpe", tmp_path / "sentencepiece"), tmp_path)
    export([str(first), str(tmp_path / "both")])
    for name, is_kept in (("right", True), ("wrong", False)):
        folder = Path(shutil.copytree(tmp_path / "both", tmp_path / name / "tokenizer"))
        if not is_kept:
            sentencepiece_model(folder / "tokenizer.model", vocab_size=380)
        checkpoint = _save_with(str(folder), tmp_path / name)
        export([str(checkpoint), str(tmp_path / name / "out")])
        assert (tmp_path / name / "out" / "tokenizer.model").exists() == is_kept


def test_a_class_that_transformers_takes_by_the_type_of_the_model_is_replaced(tmp_path) -> None:
    """transformers 5 reads any tokenizer of a qwen2 as Qwen's."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    ours, said = build_tokenizer("bytes"), []
    for name, content in tokenizer_files.tokenizer_files(ours, "bytes", seq_len=8).items():
        (tmp_path / name).write_text(str(content))
    prove_tokenizer(ours, NamedPath("OUT", tmp_path), [257], said.append)
    assert "rebuilds it as Qwen2Tokenizer: tokenization.py keeps it as it stands" in said[0]
    for trusts in (False, True):
        theirs = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=trusts)
        assert theirs("é\n x", add_special_tokens=False)["input_ids"] == ours.encode("é\n x")


def test_check_says_that_a_tokenizer_cannot_be_exported(tmp_path: Path) -> None:
    """Sentencepiece has an order of places among pairs of one score, and a tokenizer.json none."""
    file = Path(_make_tokenizer("bpe", tmp_path / "tokenizer"))
    assert not tokenizer_files.why_not_exported(build_tokenizer(str(file)))
    model = ModelProto.FromString(file.read_bytes())
    for piece in model.pieces:
        piece.score = 0.0
    file.write_bytes(model.SerializeToString())
    why = tokenizer_files.why_not_exported(build_tokenizer(str(file)))
    assert why.startswith("a tokenizer.json made of it gives other ids for ")
    words = [
        "debug_model",
        "--model.tokenizer_path",
        str(file),
        "--checkpoint.last_save_in_hf=true",
    ]
    with pytest.raises(ConfigError, match="checkpoint.last_save_in_hf = true: would fail: a token"):
        check_job([*words, "--ngpu=1"])


def test_a_tokenizer_with_other_ids_is_refused(tmp_path, monkeypatch) -> None:
    """As transformers 5.23 makes of a bare sentencepiece model, and a mistake of ours could."""
    checkpoint = _save_with(_make_tokenizer("bpe", tmp_path / "tokenizer"), tmp_path)
    real = tokenizer_files.tokenizer_files

    def wrong(*given: object, **options: object) -> dict[str, Path | str]:
        files = real(*given, **options)
        content = json.loads(files["tokenizer.json"])
        del content["normalizer"]["normalizers"][0]  # the space in front of a text
        return files | {"tokenizer.json": json.dumps(content)}

    monkeypatch.setattr(tokenizer_files, "tokenizer_files", wrong)
    said = message(checkpoint, tmp_path / "out")
    assert "(AutoTokenizer) gives other ids for" in said
    assert "fix: export without it (--without-tokenizer)" in said
    assert not list(tmp_path.glob("out*"))


def test_code_that_a_tokenizer_names_is_not_offered_to_be_run(tmp_path, monkeypatch) -> None:
    """transformers asks on a terminal, in the middle of an export."""
    path = _make_tokenizer("byte-level", tmp_path / "tokenizer")
    names = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", None]}}
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))
    monkeypatch.setattr("builtins.input", (ask := Mock(return_value="y")))
    export([str(_save_with(path, tmp_path)), str(tmp_path / "out")])
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"  # tokenizer.json as it stands
    assert "auto_map" not in settings
    assert not ask.called
