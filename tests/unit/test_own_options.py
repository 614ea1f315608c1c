"""[options.NAME]: tables that a module of the user's own declares."""

from pathlib import Path

import pytest

from meshwright.config.loader import load_config
from meshwright.system.errors import ConfigError
from meshwright.train.resolve_model import own_options

MODULE = """
from pydantic import BaseModel, ConfigDict

class Plain(BaseModel):
    beta: float = 0.9

class Open(BaseModel):
    model_config = ConfigDict(extra="allow")

OPTIONS = {"plain": Plain, "open": Open}
"""


def options_of(folder: Path, *words: str, module: str = MODULE) -> dict:
    (folder / "mine.py").write_text(module)
    own = f"--experimental.custom_import={folder}/mine.py"
    return own_options(load_config(["debug_model", own, *words]))


def test_options_have_the_values_of_the_config_or_their_defaults(tmp_path: Path) -> None:
    assert options_of(tmp_path)["plain"].beta == 0.9
    found = options_of(tmp_path, "--options.plain.beta=0.5", "--options.open.anything=1")
    assert found["plain"].beta == 0.5
    assert found["open"].anything == 1
    assert type(found["plain"]).__name__ == "Plain"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--options.plain.betta=0.5", "unknown key options.plain.betta\n  fix: .*beta"),
        ("--options.plain.beta=x", "options.plain.beta = 'x': should be a valid number"),
        ("--options.other.beta=1", "options.other: no module has options of this name"),
    ],
)
def test_a_wrong_option_is_one_error(tmp_path: Path, word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options_of(tmp_path, word)


def test_a_table_of_something_else_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="OPTIONS must be a dict .*classes of pydantic's BaseMo"):
        options_of(tmp_path, module="OPTIONS = {'plain': dict}")
