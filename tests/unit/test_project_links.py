"""One place in pyproject.toml holds the project's address and authors."""

import tomllib
from pathlib import Path

import pytest

from scripts.project_links import FILES

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
ADDRESS = "https://example.org/team/meshwright"
SET = {
    "authors": [{"name": "A. Lovelace"}, {"name": "C. Babbage"}],
    "urls": {"Repository": ADDRESS},
}


@pytest.mark.parametrize("name", FILES)
def test_files_hold_what_pyproject_says(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    assert FILES[name](text, PROJECT) == text


def test_links_appear_once_the_address_is_set_and_go_with_it() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    filled = FILES["README.md"](text, SET)
    assert f"git clone {ADDRESS} meshwright && cd meshwright" in filled
    assert f"To report a bug, open an issue at {ADDRESS}/issues.\n" in filled
    assert "author = {{A. Lovelace} and {C. Babbage}}" in filled
    assert f"url = {{{ADDRESS}}}}}" in filled
    assert FILES["README.md"](filled, PROJECT) == text

    site = (ROOT / "mkdocs.yml").read_text("utf-8")
    filled = FILES["mkdocs.yml"](site, SET)
    assert f"repo_url: {ADDRESS}\nedit_uri: edit/main/docs/\n" in filled
    assert FILES["mkdocs.yml"](filled, PROJECT) == site
