"""The plan in every preset's header."""

import re
from pathlib import Path

import pytest

from meshwright.commands.plan.devices import find_device
from meshwright.config.loader import load_config
from scripts.cards import measure, presets, read_cards
from tests.helpers.cli import command as cli
from tests.helpers.needs import skip_without_mesh_of_experts
from tests.helpers.resolved import resolved

PRESETS = dict(presets())
CARDS = read_cards()
TOMLS = Path(__file__).parents[2] / "train_configs"
LEAST_PART = 0.55
"""Of a device's memory that tensors take at the peak: smaller batches cost speed for nothing."""


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_can_run_and_its_header_has_its_plan(path) -> None:
    """`python -m scripts.cards --record NAME` writes it."""
    text, card = path.read_text(), CARDS[path.stem]
    assert f"--world-size {PRESETS[path]} --device h100" in card.command
    assert f"\n#   {card.command}\n" in text
    memory_gib = find_device("h100").memory_gib
    assert card.figures["peak"] < memory_gib
    is_full = card.figures["peak"] > LEAST_PART * memory_gib
    assert is_full != bool(re.search(r"^# Less than 55 % of the device: \w.+\.$", text, re.M))
    words = ["--model.tokenizer_path=bytes", "--metrics.enable_tensorboard=false"]
    config = load_config([str(path), *words])
    if config.parallelism.expert_parallel_degree > 1:
        skip_without_mesh_of_experts()
    made = resolved(config, PRESETS[path])
    assert sum(made.least_bytes.values()) < 0.5 * config.job.device_memory_gib * 2**30


@pytest.mark.slow
def test_a_plan_in_a_header_is_still_the_plan() -> None:
    card = CARDS["llama3_1b"]
    assert measure(card)["peak"] == pytest.approx(card.figures["peak"], abs=0.05)


def test_the_list_of_presets_says_what_each_is_for(capsys, monkeypatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_COLUMNS", "80")
    cli("config")(["--presets"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    lines = out.replace("\n" + " " * 17, " ").splitlines()
    assert len(lines) == len(list(TOMLS.glob("*.toml")))
    assert "llama3_8b        Llama 3 8B: pre-training on C4, 8 GPUs of 80 GB." in lines
    assert all(re.match(r"[\w.]+ +[A-Z].*[^.]\.$", line) for line in lines), out
