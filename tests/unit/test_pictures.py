"""The pictures of README and docs show what the code prints today."""

import json
import re

import pytest

from scripts import pictures

DRAWN = {"house.svg", "job.svg", "pieces.svg"}
"""By `make docs`; test_house.py compares them."""

MADE = json.loads(pictures.HASHES.read_text("utf-8"))
"""Hashes of the pictures that the script has made; it adds each that it makes."""


@pytest.mark.parametrize("name", MADE)
def test_a_picture_is_of_the_code_as_it_is(name) -> None:
    is_stale = MADE[name] != pictures.hash_of(pictures.PICTURES[name])
    assert not is_stale, f"docs/images/{name} is stale: python -m scripts.pictures {name}"


def test_every_picture_is_made_by_a_script() -> None:
    images = {path.name for path in pictures.IMAGES.iterdir()} - {pictures.HASHES.name}
    assert images == {*pictures.PICTURES} | DRAWN


def test_a_picture_is_stale_when_a_module_that_draws_it_changes(tmp_path, monkeypatch) -> None:
    (tmp_path / "draws.py").write_text("a = 1\n")
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    picture = pictures.Picture("meshwright check", ("draws.py",))
    before = pictures.hash_of(picture)
    (tmp_path / "draws.py").write_text("a = 2\n")
    assert pictures.hash_of(picture) != before


def test_a_picture_is_stale_when_a_text_in_it_changes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    picture = pictures.Picture("meshwright check", (), ("prints.py",))

    def hash_of(code: str) -> str:
        (tmp_path / "prints.py").write_text(code)
        return pictures.hash_of(picture)

    before = hash_of('"""A module."""\nprint(f"cut in {2}")')
    assert hash_of('"""Prints."""\nparts = 1 + 1\nprint(f"cut in {parts}")') == before
    assert hash_of('"""A module."""\nprint(f"sharded over {2}")') != before


def test_a_terminal_is_shown_in_its_colors_and_without_its_progress_bar(tmp_path) -> None:
    code = r"print('\x1b[1mloss\x1b[0m <4>\n 50% ##\r' + ' ' * 7 + '\r' + 'saved'); exit(3)"
    command = f'python -c "{code}"'
    written, exit_code = pictures.in_terminal(command, tmp_path)
    page = pictures.page_of_terminal("meshwright train", written)
    shown = page.partition("<pre>")[2]
    assert exit_code == 3
    assert '<span class="bold">loss</span><span class="plain"> &lt;4&gt;\nsaved</span>' in shown
    assert re.sub("<[^>]*>", "", shown) == "$ meshwright train\nloss &lt;4&gt;\nsaved"
