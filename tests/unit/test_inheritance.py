"""What a TOML, or the command line, takes over from the TOML below it."""

import json
import shutil
from pathlib import Path

import pytest

from meshwright.config.fields import all_keys
from meshwright.config.inheritance import OF_FOLDER
from meshwright.config.loader import load_config
from meshwright.config.section import LOCAL_PATH
from meshwright.models.families import MODELS
from meshwright.train.resolve_model import resolve_model
from tests.helpers.cli import command
from tests.helpers.families import small

BASE = """
[model]
name = "llama"
flavor = "debugmodel"
tokenizer_path = "old/tokenizer.json"
bos_token = "<old>"
eos_token = "</old>"
chat_template_path = "old.jinja"
args = { n_layers = 2, tie_embeddings = true }
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A config.json of a Qwen3, in the working directory."""
    monkeypatch.chdir(tmp_path)
    family = MODELS["qwen3"]
    (folder := tmp_path / "folder").mkdir()
    config = family.hf.write_config(small(family, 2048), 64)
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "base.toml").write_text(BASE)
    return folder


def write(text: str) -> str:
    Path("a.toml").write_text(f'extends = "base.toml"\n{text}')
    return "a.toml"


def test_a_folder_is_in_the_place_of_the_inherited_model(folder) -> None:
    """On the command line as in a TOML."""
    child = write('[model]\nflavor = "./folder"')
    for words in ([child], ["base.toml", "--model.flavor=./folder"]):
        model = load_config(words).model
        assert model.tokenizer_path == str(folder)
        given = model.model_fields_set - {"flavor", "tokenizer_path", "args"}
        assert not given, given
        assert model.args == {}
        assert resolve_model(load_config(words))[0].name == "qwen3"
    kept = load_config([write("[model]\nargs.n_layers = 1")]).model
    assert {*OF_FOLDER} <= kept.model_fields_set
    assert kept.args == {"n_layers": 1, "tie_embeddings": True}


def test_what_is_given_beside_the_folder_holds(folder) -> None:
    text = '[model]\nflavor = "./folder"\ntokenizer_path = "bytes"\neos_token = ""\n'
    model = load_config([write(f"{text}args.n_layers = 1")]).model
    assert (model.tokenizer_path, model.eos_token, model.bos_token) == ("bytes", "", None)
    assert model.args == {"n_layers": 1}
    # over a TOML that has the same folder, and a tokenizer of the user's
    Path("base.toml").write_text('model.flavor = "./folder"\nmodel.tokenizer_path = "bytes"')
    assert load_config([write('[model]\nflavor = "./folder"')]).model.tokenizer_path == "bytes"


@pytest.mark.parametrize("in_hf", [True, False])
def test_weights_come_from_the_folder_if_they_are_asked_for(folder, in_hf) -> None:
    text = f"[checkpoint]\ninitial_load_in_hf = {str(in_hf).lower()}\ninitial_load_path = './old'\n"
    Path("base.toml").write_text(BASE + text)
    found = load_config([write('[model]\nflavor = "./folder"')]).checkpoint.initial_load_path
    assert found == str(folder if in_hf else folder.with_name("old"))


def test_check_says_which_tokenizer_and_why(folder, capsys) -> None:
    root = Path(__file__).parents[2]
    shutil.copy(root / "assets" / "tokenizers" / "python_2k.model", folder / "tokenizer.model")
    preset = str(root / "train_configs" / "debug_model.toml")

    def said(text: str, *words: str) -> str:
        Path("a.toml").write_text(text)
        command("check")(["a.toml", "--ngpu", "1", *words])
        return " ".join(capsys.readouterr().out.replace("'", '"').split())

    head = 'extends = "debug_model"\n'
    out = said(f'{head}model.flavor = "./folder"')
    assert 'model.tokenizer_path = "folder", the folder of model.flavor (a.toml:2), not' in out
    assert f"not the one of {preset}:" in out
    assert 'model.flavor = "folder": leaves out what is inherited: model.name' in out
    out = said(head)
    assert "python_2k.model" in out
    assert f"inherited from {preset}" in out
    assert "tokenizer_path" not in said(head, "--model.tokenizer_path=bytes")
    command("check")(["debug_model", "--ngpu", "1"])
    assert "tokenizer_path" not in capsys.readouterr().out


PATHS = [
    key
    for key, field in all_keys()
    if LOCAL_PATH in field.metadata and field.default == "" and key != ("job", "config_file")
]


@pytest.mark.parametrize("key", PATHS, ids=".".join)
def test_an_empty_path_unsets_an_inherited_one(key, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    section, name = key
    Path("base.toml").write_text("[model]\n")
    unset = load_config([write("")])
    Path("base.toml").write_text(f'{section}.{name} = "./there"\n')
    if name != "mix_file":  # which is read
        assert getattr(getattr(load_config([write("")]), section), name) != ""
    for text, words in ((f'{section}.{name} = ""', []), ("", [f"--{section}.{name}="])):
        found = load_config([write(text), *words])
        assert found == unset
        assert getattr(found, section).model_fields_set == getattr(unset, section).model_fields_set


def test_an_empty_tokenizer_path_is_that_of_the_folder(folder) -> None:
    text = '[model]\nflavor = "./folder"\ntokenizer_path = ""'
    assert load_config([write(text)]).model.tokenizer_path == str(folder)


NAMED = {
    "mixture": '[[training.datasets]]\nname = "a"\ndataset = "json"\ndataset_path = "a"\nweight=1',
    "file": '[training]\ndataset = "json"\nmix_file = "mix.txt"',
    "path": '[training]\ndataset = "json"\ndataset_path = "b"',
}


@pytest.mark.parametrize("below", NAMED)
@pytest.mark.parametrize("above", NAMED)
def test_each_way_to_name_data_replaces_the_others(below, above, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mix.txt").write_text("1 c\n")
    Path("base.toml").write_text("[model]\n")
    want = load_config([write(NAMED[above])]).training
    Path("base.toml").write_text(NAMED[below])
    found = load_config([write(NAMED[above])]).training
    assert (found.datasets, found.dataset_path) == (want.datasets, want.dataset_path)
