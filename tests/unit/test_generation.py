"""Generation: with kept keys and values as without, and as transformers does it."""

import dataclasses
import json
import shutil
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from meshwright.api import saved_models
from meshwright.commands.saved import open_source
from meshwright.models.decoder import Decoder
from meshwright.models.generation import generate, greedy, sampler
from meshwright.system.errors import ConfigError
from meshwright.system.files import NamedPath
from tests.helpers.checkpoints import set_manifest
from tests.helpers.cli import export, generate_text
from tests.helpers.files import flip_bit
from tests.helpers.hf import CASES, SMALL, load_hf, save_checkpoint, save_transformers
from tests.helpers.slow import slow_but
from tests.helpers.tokenizer_files import byte_level_json

FP32 = ["--dtype", "float32"]
PROMPT = "def f(x):"

EVERYDAY = "llama-mha-tied-scaled olmo2-gqa qwen3_moe-dense-first deepseek_v3-gqa"


@pytest.mark.parametrize("args", slow_but(EVERYDAY, {name: [args] for name, args in CASES.items()}))
def test_greedy_equals_transformers(args, tmp_path) -> None:
    model = load_hf(save_transformers(tmp_path / "hf", args), args)
    export([str(save_checkpoint(tmp_path, model, args)), str(tmp_path / "out"), *FP32])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", experts_implementation="eager")
    prompt = [256, *range(40, 52)]
    want = theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        do_sample=False,
        max_new_tokens=50,
        eos_token_id=None,
        pad_token_id=0,
    )
    got = list(generate(model, prompt, max_new_tokens=50, choose=greedy))
    assert prompt + got == want[0].tolist()
    shorter = generate(model, prompt, max_new_tokens=50, choose=greedy, stop={got[20]})
    assert list(shorter) == got[: got.index(got[20]) + 1]


def test_no_token_makes_cudnn_plan_anew(tmp_path, monkeypatch) -> None:
    """It plans attention for each length of the keys."""
    model, allowed = load_hf(save_transformers(tmp_path)), []
    attend, is_on = F.scaled_dot_product_attention, torch.backends.cuda.cudnn_sdp_enabled

    def look(*args: object, **kwargs: object) -> torch.Tensor:
        allowed.append(is_on())
        return attend(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", look)
    for _ in generate(model, [1, 2, 3], max_new_tokens=2, choose=greedy):
        assert is_on()  # between tokens, as it was
    assert allowed == [False] * 3 * SMALL.n_layers


def test_a_model_is_whole_after_an_interrupt(tmp_path, monkeypatch) -> None:
    model = load_hf(save_transformers(tmp_path / "hf"))
    monkeypatch.setattr(model.norm, "forward", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        next(generate(model, [1, 2, 3], max_new_tokens=1, choose=greedy))
    monkeypatch.undo()
    assert model(torch.tensor([[1, 2, 3]])).shape == (1, 3, SMALL.vocab_size)


def test_sampling_follows_temperature_and_top_p() -> None:
    chance = torch.tensor([0.1, 0.5, 0.15, 0.25])

    def draws(temperature: float, top_p: float, seed: int, number: int) -> torch.Tensor:
        choose = sampler(temperature, top_p, seed)
        return torch.tensor([choose(chance.log()) for _ in range(number)])

    def frequencies(temperature: float, top_p: float) -> torch.Tensor:
        return draws(temperature, top_p, 0, 1000).bincount(minlength=4) / 1000

    def assert_near(got: torch.Tensor, want: list[float]) -> None:  # 4 standard deviations
        torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=0.064)

    assert_near(frequencies(1.0, 1.0), chance.tolist())
    squared = chance.square() / chance.square().sum()
    assert_near(frequencies(0.5, 1.0), squared.tolist())
    assert_near(frequencies(1.0, 0.7), [0, 2 / 3, 0, 1 / 3])
    assert_near(frequencies(1.0, 0.8), [0, 0.5 / 0.9, 0.15 / 0.9, 0.25 / 0.9])
    assert draws(1.0, 1e-6, 0, 200).unique().tolist() == [1]
    for near_zero in (1e-40, 1e-300, 5e-324):
        assert draws(near_zero, 1.0, 0, 50).unique().tolist() == [1]
    first, again, other = (draws(1.0, 1.0, seed, 200) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_command_and_the_api_write_the_same_from_either_folder(tmp_path, capsys) -> None:
    model: Decoder = load_hf(save_transformers(tmp_path / "hf"))
    checkpoint = save_checkpoint(tmp_path / "dump" / "checkpoint", model, SMALL)
    prompt = [256, *PROMPT.encode()]
    new = list(generate(model, prompt, max_new_tokens=40, choose=greedy))
    text = bytes(token for token in new if token < 256).decode("utf-8", errors="replace")

    def said(*arguments: object) -> str:
        generate_text([*map(str, arguments), "--prompt", PROMPT, "--max-new-tokens", "40"])
        return capsys.readouterr().out.removesuffix("\n")

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    absolute = f"[checkpoint]\nfolder = '{checkpoint.parent}'\n"
    for folder in (elsewhere, tmp_path / "dump"):
        (folder / "config.toml").write_text(absolute)
    in_other_words = elsewhere / ".." / "dump"  # its config names the same folder
    for source in (checkpoint, tmp_path / "dump", in_other_words, elsewhere):
        assert said(source) == PROMPT + text
    assert saved_models.generate(*saved_models.load_model(checkpoint), PROMPT, 40) == PROMPT + text
    folder = tmp_path / "hf"
    of_job = shutil.copytree(folder, tmp_path / "dump" / "hf" / "step-4")
    for source in (folder, of_job):
        assert said(source, "--tokenizer", "bytes") == PROMPT + text
    settings = json.loads((folder / "generation_config.json").read_text())
    stop = next(token for token in new[5:] if new.index(token) > 4 and token < 128)
    settings["eos_token_id"] = [257, stop]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    before = bytes(token for token in new[: new.index(stop)] if token < 256)
    cut = said(folder, "--tokenizer", "bytes")
    assert cut == PROMPT + before.decode("utf-8", errors="replace")
    (folder / "generation_config.json").unlink()
    with open_source(NamedPath("FOLDER", folder), "bytes") as source:
        assert source.stop == {257}  # the tokenizer's own
    for source in ([checkpoint], [folder, "--tokenizer", "bytes"]):
        generate_text([*map(str, source), "--prompt", PROMPT, "--max-new-tokens", "60"])
        assert "70 tokens are asked for, and the model was trained on sequences of 64" in (
            capsys.readouterr().err
        )
    drawn = [said(checkpoint, "--temperature", 1, "--top-p", 0.9, "--seed", s) for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_cannot_be_generated_from(tmp_path) -> None:
    folder, bytes_ = save_transformers(tmp_path / "hf"), ("--tokenizer", "bytes")
    (tmp_path / "empty").mkdir()
    other = byte_level_json(tmp_path / "tokenizer.json", ["<s>"])
    gpt2 = shutil.copytree(folder, tmp_path / "gpt2") / "config.json"
    gpt2.write_text(gpt2.read_text().replace('"llama"', '"gpt2"'))
    for words, says in (
        ([tmp_path / "nowhere"], "no such folder"),
        ([tmp_path / "empty"], "holds neither a checkpoint nor config.json"),
        ([folder], "--tokenizer = "),
        ([folder, "--tokenizer", other], "401 tokens, and the model a vocabulary of 259"),
        ([folder, *bytes_, "--top-p", 0], "--top-p = 0.0: must be above 0"),
        ([folder, *bytes_, "--top-p", 0.5], "--top-p = 0.5: has no effect without a temperature"),
        ([folder, *bytes_, "--seed", 3], "--seed = 3: has no effect .*\n  fix: add --temperature"),
        ([folder, *bytes_, "--temperature", -1], "--temperature = -1.0: must be 0"),
        ([folder, *bytes_, "--max-new-tokens", 0], "--max-new-tokens = 0"),
        ([tmp_path / "gpt2", *bytes_], "'gpt2', not one of llama.*\n  fix: write a family"),
    ):
        with pytest.raises(ConfigError, match=says):
            generate_text([*words, "--prompt", "a"])


def test_weights_that_are_no_numbers_are_one_error(tmp_path, capsys) -> None:
    model = load_hf(save_transformers(tmp_path / "hf"))
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    checkpoint = save_checkpoint(tmp_path / "checkpoint", model, SMALL)
    for temperature in ("0", "1"):
        with pytest.raises(ConfigError, match="logits after 4 tokens are not finite"):
            generate_text([str(checkpoint), "--prompt", "abc", "--temperature", temperature])


def test_a_damaged_checkpoint_is_not_generated_from(tmp_path, capsys) -> None:
    model = load_hf(save_transformers(tmp_path / "hf"))
    for step in (5, 10):
        save_checkpoint(tmp_path / "dump" / "checkpoint", model, SMALL, step)
    flip_bit(tmp_path / "dump" / "checkpoint" / "step-10" / "__0_0.distcp", 8 * 50_000)
    words = ["--prompt", "abc", "--max-new-tokens", "2"]
    generate_text([str(tmp_path / "dump"), *words])
    said = capsys.readouterr()
    assert said.out.startswith("abc")  # and nothing else is on stdout
    assert "step-10, which is damaged: the content of __0_0.distcp has changed" in said.err
    with pytest.raises(ConfigError, match="is damaged: the content of __0_0.distcp"):
        generate_text([str(tmp_path / "dump" / "checkpoint" / "step-10"), *words])


def test_forged_dimensions_take_no_memory(tmp_path) -> None:
    model = load_hf(save_transformers(tmp_path / "hf"))
    checkpoint = save_checkpoint(tmp_path / "checkpoint", model, SMALL)
    for dimension, says in (
        ({"hidden_dim": 10**9}, "model_args of .* parameters, but its files have"),
        ({"n_layers": 10**9}, "n_layers = 1000000000: must be at most 10000"),
    ):
        set_manifest(checkpoint, model_args=dataclasses.asdict(SMALL) | dimension)
        with pytest.raises(ConfigError, match=says):
            generate_text([str(checkpoint), "--prompt", "abc"])
