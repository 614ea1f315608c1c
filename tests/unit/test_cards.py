"""Figures in pages and presets come from cards, and each has one."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from scripts import cards
from scripts.cards import Card, filled, hash_of, measure, read_cards

ROOT = Path(__file__).parents[2]
CARDS = read_cards()
GENERATED = {"config_reference.md", "commands.md"}
PAGES = [
    "README.md",
    *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.name not in GENERATED),
    *(f"train_configs/{path.name}" for path in (ROOT / "train_configs").glob("*.toml")),
]
FIGURE = re.compile(
    r"(?<![\w.,])\d[\d.,]*\s"
    r"(?:[GM]i?B|ms|s|seconds|minutes|tokens/s|TFLOP/s|% MFU|nats|bits per byte)(?![\w/])"
    r"|\b(?:loss|perplexity) (?:is |of )?\d[\d.]*"
)
"""A number with a unit of speed, memory or time, or a loss."""
SETTINGS = {
    "README.md": ["5 GB", "1.4 GB"],
    "docs/architecture.md": ["30 s"],
    "docs/checkpoints.md": ["40 s"],
    "docs/clusters.md": ["20 s", "180 s", "30 s"],
    "docs/containers.md": ["64 MB", "10 seconds"],
    "docs/data.md": ["16 MB", "32 seconds", "128 MiB", "256 MiB", "40 seconds"],
    "docs/experiments.md": ["0.002 nats", "0.03 nats", "1.592 bits per byte"],
    "docs/ladder.md": ["6 minutes"],
    "docs/monitoring.md": ["10 seconds"],
    "docs/quickstart.md": ["5 GB", "1.4 GB"],
    "docs/troubleshooting.md": ["600 s", "10 s", "60 s"],
    "train_configs/game_cpu.toml": ["2 minutes"],
}
"""What no command of seconds repeats: limits of ours or of other programs, sizes, long examples."""


@pytest.mark.parametrize("page", sorted({page for card in CARDS.values() for page in card.printed}))
def test_a_page_has_the_figures_of_its_cards(page) -> None:
    """`python -m scripts.cards` fills it."""
    text = (ROOT / page).read_text("utf-8")
    assert filled(CARDS, page, text) == text


def test_every_figure_has_a_card() -> None:
    found = {page: without_card(page, (ROOT / page).read_text("utf-8")) for page in PAGES}
    unknown = {page: figures - {*SETTINGS.get(page, [])} for page, figures in found.items()}
    assert {page: figures for page, figures in unknown.items() if figures} == {}
    gone = {page: {*known} - found[page] for page, known in SETTINGS.items()}
    assert {page: figures for page, figures in gone.items() if figures} == {}


def without_card(page: str, text: str) -> set[str]:
    """Figures of its sentences and comments that no card fills."""
    if page.endswith(".md"):
        text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    else:
        text = "\n".join(line[line.find("#") :] for line in text.splitlines() if "#" in line)
    for card in CARDS.values():
        for pattern, _ in cards.pieces(card, page) if page in card.printed else ():
            text = pattern.sub("", text)
    found = {" ".join(figure.split()) for figure in FIGURE.findall(text)}
    return found - {"80 GB"}  # the GPU's name


def test_the_figures_are_found(monkeypatch) -> None:
    monkeypatch.setattr(
        __name__ + ".CARDS",
        {"one": Card("", printed={"a.md": ["took {s:.1f} s"]}, figures={"s": 2.0})},
    )
    text = "It took 2.0 s of 1,024 MiB at 5 tokens/s to a loss of 3.2, or 0.1 nats."
    text += "\n```\n9 s\n```\n3 steps on 80 GB"
    assert without_card("a.md", text) == {"1,024 MiB", "5 tokens/s", "loss of 3.2", "0.1 nats"}


@pytest.mark.parametrize("name", [name for name, card in CARDS.items() if card.config])
def test_a_card_is_of_the_config_as_it_is(name) -> None:
    """Or `python -m scripts.cards --record NAME` measures it again."""
    assert CARDS[name].config_hash == hash_of(CARDS[name].config)


def test_a_card_says_how_its_figures_were_made() -> None:
    for name, card in CARDS.items():
        assert card.command, name
        assert card.machine, name
        assert card.commit, name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", card.date), name
        assert card.on != "cpu" or card.read.keys() == card.figures.keys(), name


ECHO = Card(
    "python -c \"print('a: 1,234.5 GiB in $FOLDER')\"",
    read={"a": r"a: ([\d.,]+) GiB in /"},
    printed={"page.md": ["It takes {a:,.1f} GiB ({date})"]},
)


def test_a_card_is_recorded_printed_and_verified(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(cards, "CARDS", tmp_path)
    (tmp_path / "echo.toml").write_text(
        tomli_w.dumps({"command": ECHO.command, "read": ECHO.read, "printed": ECHO.printed})
    )
    cards.record(["echo"])
    (card,) = read_cards().values()
    assert card.figures == {"a": 1234.5}
    page = "Words. It takes 7 GiB (2020-01-01). More."
    assert (
        filled({"echo": card}, "page.md", page)
        == f"Words. It takes 1,234.5 GiB ({card.date}). More."
    )
    with pytest.raises(ValueError, match="page.md doesn't print what the card echo has"):
        filled({"echo": card}, "page.md", "Words.")
    assert cards.verify([]) == 0
    other = replace(card, figures={"a": 1234.4})
    (tmp_path / "echo.toml").write_text(
        tomli_w.dumps({"command": other.command, "read": other.read, "figures": other.figures})
    )
    assert cards.verify([]) == 1
    assert "echo: a 1234.5, card 1234.4 WRONG" in capsys.readouterr().out
    (tmp_path / "echo.toml").write_text(
        tomli_w.dumps({"command": "false", "read": other.read, "figures": other.figures})
    )
    assert cards.verify([]) == 1
    assert "echo: false ended with 1" in capsys.readouterr().out


def test_a_figure_agrees_to_the_decimals_of_its_card() -> None:
    assert cards.agrees(63.28, 63.3, 0.0)
    assert cards.agrees(65.85, 65.9, 0.0)
    assert cards.agrees(65.85, 65.8, 0.0)
    assert not cards.agrees(65.84, 65.9, 0.0)
    assert not cards.agrees(63.28, 63.27, 0.0)
    assert not cards.agrees(63.24, 63.3, 0.0)
    assert cards.agrees(4.4249, 4.4247, 0.001)
    assert cards.agrees(6.14e-06, 6.1e-06, 0.0)
    assert not cards.agrees(6.16e-06, 6.1e-06, 0.0)


@pytest.mark.parametrize("command", ["false", "true"])
def test_a_command_that_fails_or_prints_nothing_is_an_error(command) -> None:
    with pytest.raises(ValueError, match=f"{command} (ended with 1|didn't print)"):
        measure(Card(command, read={"a": "a"}))
