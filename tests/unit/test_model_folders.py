"""Which weights a model folder means, whether they are tied, and what is rejected by `check`."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.checkpoint.conversion.initial_load import check_initial
from meshwright.config.job_config import Checkpoint
from meshwright.models.families import MODELS
from meshwright.system import files
from meshwright.system.errors import ConfigError
from meshwright.system.files import NamedPath, is_lfs_pointer
from tests.campaigns.model_folders import EMBEDDING, HEAD, INDEX, POINTER, SINGLE, run
from tests.helpers.cli import command
from tests.helpers.hf import CASES, save_transformers, words_of_job


@pytest.fixture(autouse=True)
def _warn_again() -> None:
    files.warn_once.cache_clear()


@pytest.mark.parametrize("number", range(12))
def test_a_drawn_folder_is_read_by_its_index_and_tensors_or_rejected(number, tmp_path) -> None:
    _, verdict, said = run(49, number, tmp_path)
    assert verdict != "wrong", said


def tied_folder(path: Path, *, says_tied: bool, head: torch.Tensor | None = None) -> Path:
    save_transformers(path, CASES["llama-tied"], max_shard_size="1GB")
    stored = load_file(path / SINGLE)
    if head is not None:
        stored[HEAD] = head if head.shape == stored[EMBEDDING].shape else stored[EMBEDDING] + 1
    save_file(stored, path / SINGLE)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": says_tied}))
    return path


IN_HF = "--checkpoint.initial_load_in_hf=true"


def refusal(tmp_path: Path, folder: Path, *more: str) -> str:
    with pytest.raises(ConfigError) as caught:
        command("check")(words_of_job(tmp_path, folder, IN_HF, *more))
    return str(caught.value)


def test_check_finds_a_head_that_is_missing_and_its_fix_works(tmp_path) -> None:
    folder = tied_folder(tmp_path / "hf", says_tied=False)
    said = refusal(tmp_path, folder)
    assert f"{HEAD}, our output.weight, is in none of its files" in said
    assert "config.json has tie_word_embeddings = false" in said
    assert "fix: set model.args.tie_embeddings = true" in said
    command("check")(words_of_job(tmp_path, folder, IN_HF, "--model.args.tie_embeddings=true"))


def test_another_head_unties_a_model_and_the_user_has_the_last_word(tmp_path, capsys) -> None:
    """transformers 5 unties it too; before, `check` said "can run", and the ranks stopped."""
    folder = tied_folder(tmp_path / "hf", says_tied=True, head=torch.ones(1))
    command("check")(words_of_job(tmp_path, folder, IN_HF))
    said = " ".join(capsys.readouterr().out.split())
    assert f"{HEAD} differs from {EMBEDDING}: the model is untied" in said
    untied = int(said.split(" parameters")[0].split()[-1].replace(",", ""))
    command("check")(words_of_job(tmp_path, folder, IN_HF, "--model.args.tie_embeddings=false"))
    assert f"{untied:,} parameters" in capsys.readouterr().out
    command("check")(words_of_job(tmp_path, folder, IN_HF, "--model.args.tie_embeddings=true"))
    said = " ".join(capsys.readouterr().out.split())
    assert f"{untied - 259 * 32:,} parameters" in said
    assert f"{HEAD} differs from {EMBEDDING}, and isn't read" in said


def test_the_tie_of_a_named_size_is_held_against_the_tensors(tmp_path) -> None:
    folder = tied_folder(tmp_path / "hf", says_tied=True, head=torch.ones(1))
    config = Checkpoint(initial_load_path=str(folder), initial_load_in_hf=True)
    with pytest.raises(
        ConfigError, match="differs from.*\n  fix: set model.args.tie_embeddings = f"
    ):
        check_initial(config, CASES["llama-tied"], MODELS["llama"])
    check_initial(config, CASES["llama-tied"], MODELS["llama"], is_tie_given=True)


def test_a_config_without_weights_is_a_model_to_train_from_scratch(tmp_path) -> None:
    folder = tied_folder(tmp_path / "hf", says_tied=True)
    (folder / SINGLE).unlink()
    command("check")(words_of_job(tmp_path, folder))


def test_a_single_file_that_the_index_does_not_name_is_rejected(tmp_path) -> None:
    folder = save_transformers(tmp_path / "hf")  # shards and their index
    save_transformers(tmp_path / "other", max_shard_size="1GB")
    shutil.copy(tmp_path / "other" / SINGLE, folder)
    said = refusal(tmp_path, folder)
    assert f"holds {SINGLE}, and {INDEX}, which doesn't name it" in said
    assert f"fix: delete {SINGLE} to use the shards that the index names, or {INDEX} to" in said


KINDS = {"jsonl": "json", "parquet": "parquet", "txt": "text", "gz": "json", "npy": "tokens"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.txt", "a.jsonl.gz", "a.npy"])
def test_pointers_of_git_lfs_are_no_data(name, tmp_path) -> None:
    (tmp_path / name).write_text(POINTER)
    given = ["debug_model", f"--training.dataset={KINDS[name.rpartition('.')[2]]}"]
    given += [f"--training.dataset_path={tmp_path / name}", "--validation.enable=false"]
    given += ["--training.max_bad_records=9"] * (name == "a.jsonl")
    with pytest.raises(ConfigError, match=f"{name}.*is a Git LFS pointer.*\n  fix: run `git lfs"):
        command("check")([*given, f"--job.dump_folder={tmp_path / 'out'}"])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_pointers_of_git_lfs_are_no_tokenizers(name, tmp_path) -> None:
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(ConfigError, match="is a Git LFS pointer"):
        command("check")(["debug_model", f"--model.tokenizer_path={tmp_path}"])


def test_init_names_a_pointer_of_git_lfs(tmp_path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(POINTER)
    with pytest.raises(ConfigError, match="0.txt': is a Git LFS pointer"):
        command("init")([tmp_path / "a.toml", "--from", tmp_path])


def test_a_text_about_pointers_is_none(tmp_path) -> None:
    pointer, text = tmp_path / "pointer", tmp_path / "text"
    pointer.write_text(POINTER.replace("\noid", "\next-0-a sha256:00\noid"))
    text.write_text("version https://git-lfs.github.com/spec/v1 is the first line of a pointer\n")
    assert is_lfs_pointer(pointer)
    assert not is_lfs_pointer(text)
    with pytest.raises(ConfigError, match="pointer is a Git LFS pointer"):
        NamedPath("key", tmp_path).read_json("pointer")
