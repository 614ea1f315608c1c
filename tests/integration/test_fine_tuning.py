"""The preset for fine-tuning, by its own commands, from a folder that transformers wrote."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshwright.checkpoint.index import read_saved_tensors
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.reader import CheckpointWeights
from meshwright.commands.main import run as run_command
from meshwright.datasets.tokenizers.kinds import build_tokenizer
from meshwright.system.errors import ConfigError
from meshwright.system.files import NamedPath
from meshwright.system.modules import code_of
from tests.campaigns.new_user import example
from tests.helpers.hf import SMALL, save_transformers, tensors_of
from tests.helpers.jobs import ROOT, losses, train_alone
from tests.helpers.tokenizer_files import byte_level_json

PRESET = ROOT / "train_configs" / "fine_tune.toml"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_model(folder: Path) -> Path:
    """A small model with its tokenizer and chat template."""
    file = byte_level_json(folder / "tokenizer.json", ["<s>", "</s>"])
    vocab_size = build_tokenizer(str(file)).vocab_size
    model = save_transformers(folder / "model", dataclasses.replace(SMALL, vocab_size=vocab_size))
    file.rename(model / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    settings |= {"bos_token": "<s>", "eos_token": "</s>"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def make_rows(path: Path) -> Path:
    turns = [{"from": "human", "value": "what is {}?"}, {"from": "gpt", "value": "it is {}"}]
    rows = [
        {"conversations": [turn | {"value": turn["value"].format(i)} for turn in turns]}
        for i in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(keys: dict[str, object]) -> list[str]:
    return [f"--{key}={value}" for key, value in keys.items()]


def test_from_a_folder_to_a_folder(tmp_path: Path) -> None:
    model, rows = make_model(tmp_path), make_rows(tmp_path / "rows.jsonl")
    (tmp_path / "mine.py").write_text(example("sink"))
    keys: dict[str, object] = {
        "model.flavor": model,
        "training.dataset_path": rows,
        "training.dataset_format": "sharegpt",
        "training.seq_len": 64,
        "training.global_batch_size": 2,
        "training.token_cache_folder": tmp_path / "cache",
        "training.steps": 2,
        "checkpoint.last_save_model_only": True,
        "checkpoint.enable_first_step_checkpoint": True,
        "metrics.enable_tensorboard": False,
        "metrics.log_freq": 1,
        "experimental.custom_import": tmp_path / "mine.py",
    }
    dump = tmp_path / "dump"
    done = train_alone(dump, *words(keys), config=PRESET)
    assert f"initial weights from {model}" in done.stdout
    assert losses(dump).keys() == {1, 2}
    assert len((dump / "losses.csv").read_text().split()) == 2  # the user's sink
    own_code = read_manifest(dump / "checkpoint" / "step-1").get("own_code")
    assert own_code == code_of(str(tmp_path / "mine.py"))

    whole, last = (
        read_saved_tensors(NamedPath("", dump / "checkpoint" / f"step-{step}")) for step in (1, 2)
    )
    assert any(name.startswith("optimizer.") for name in whole)
    assert {name.partition(".")[0] for name in last} == {"model"}
    assert {tensor.dtype for tensor in last.values()} == {"bfloat16"}

    exported = AutoModelForCausalLM.from_pretrained(dump / "hf" / "step-2")
    assert exported.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(dump / "hf" / "step-2")
    turns = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "user: hi</s>"
    saved = CheckpointWeights(NamedPath("", dump / "checkpoint" / "step-2"))
    ours = saved.read("tok_embeddings.weight")
    theirs = tensors_of(dump / "hf" / "step-2")["model.embed_tokens.weight"]
    assert torch.equal(ours, theirs)
    assert not torch.equal(theirs, tensors_of(model)["model.embed_tokens.weight"].bfloat16())

    check = ["check", str(PRESET), "--ngpu", "1", "--job.dump_folder", str(dump)]
    run_command([*check, *words(keys)])  # there is nothing to do
    keys["training.steps"] = 3
    with pytest.raises(ConfigError, match=r"step-2 holds the weights only"):
        run_command([*check, *words(keys)])
    keys["checkpoint.exclude_from_loading"] = '["optimizer"]'
    run_command([*check, *words(keys)])
