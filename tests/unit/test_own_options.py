"""[options.NAME]: tables that a module of the user's own declares."""

import json
import math
from datetime import date
from enum import Enum
from pathlib import Path

import pytest
from pydantic import BaseModel, Field

from meshwright.commands.main import run
from meshwright.config import own_options as own_options_module
from meshwright.config.fields import entries
from meshwright.config.loader import load_config
from meshwright.system.errors import ConfigError
from meshwright.train.resolve_model import own_options

MODULE = """
from datetime import date
from pydantic import BaseModel, ConfigDict

class Plain(BaseModel):
    beta: float = 0.9

class Inner(BaseModel):
    depth: int = 2

class Dated(BaseModel):
    '[options.dated] When.'
    model_config = ConfigDict(strict=True, use_attribute_docstrings=True)

    since: date
    'The first day.'
    sizes: tuple[int, ...] = (1,)
    inner: Inner = Inner()

class Open(BaseModel):
    model_config = ConfigDict(extra="allow")

OPTIONS = {"plain": Plain, "open": Open}
DATED = OPTIONS | {"dated": Dated}
"""

WITH_DATES = MODULE + "OPTIONS = DATED"


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
        ("--options.plain.beta=2026-01-02", "beta = '2026-01-02': should be a valid number"),
        ("--options.other.beta=1", "options.other: no module has options of this name"),
    ],
)
def test_a_wrong_option_is_one_error(tmp_path: Path, word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options_of(tmp_path, word)


@pytest.mark.parametrize("written", ['{"beta": "x"}', '{"betta": 1}'])
def test_options_of_a_process_that_tokenizes_are_held_to_their_model(written, monkeypatch) -> None:
    class Plain(BaseModel):
        beta: float = 0.9

    monkeypatch.setitem(own_options_module.OPTIONS, "plain", Plain)
    assert own_options_module.options_of("plain", "").model_dump() == {"beta": 0.9}
    assert own_options_module.options_of("other", written) is None
    with pytest.raises(ConfigError, match="options.plain.bet"):
        own_options_module.options_of("plain", written)


def test_a_table_of_something_else_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="OPTIONS must be a dict .*classes of pydantic's BaseMo.*'plain': <class"
    ):
        options_of(tmp_path, module="OPTIONS = {'plain': dict}")


def test_dates_and_arrays_of_a_toml_reach_a_strict_model(tmp_path: Path) -> None:
    words = ("--options.dated.since=2026-01-02", "--options.dated.sizes=[3, 4]")
    found = options_of(tmp_path, *words, "--options.plain.beta=inf", module=WITH_DATES)
    assert (found["dated"].since, found["dated"].sizes) == (date(2026, 1, 2), (3, 4))
    assert found["plain"].beta == math.inf
    with pytest.raises(ConfigError, match="options.dated.since: must be given"):
        options_of(tmp_path, module=WITH_DATES)
    with pytest.raises(ConfigError, match="options.dated.since = 'soon': should be a valid date"):
        options_of(tmp_path, "--options.dated.since=soon", module=WITH_DATES)


def output_of(capsys: pytest.CaptureFixture[str], command: str, folder: Path, *words: str) -> str:
    (folder / "mine.py").write_text(WITH_DATES)
    run([command, "debug_model", f"--experimental.custom_import={folder}/mine.py", *words])
    return capsys.readouterr().out


def test_help_has_the_name_that_a_toml_gives_an_option(tmp_path: Path) -> None:
    class Named(BaseModel):
        x: int = Field(1, alias="ex", description="The option.")

    assert [entry.name for entry in entries(Named)] == ["ex"]


def test_help_has_defaults_as_a_toml_has_them() -> None:
    class Kind(Enum):
        FIRST = "first"

    class Inner(BaseModel):
        kind: Kind
        path: Path = Path("b")

    class Typed(BaseModel):
        flags: list[bool] = [True, False]
        names: tuple[str, ...] = ("a",)
        day: date = date(2026, 1, 2)
        file: Path = Path("a.txt")
        table: dict[str, bool] = {"on": True}
        most: float = float("inf")
        least: float | None = None
        inner: list[Inner] = Field(default_factory=lambda: [Inner(kind=Kind.FIRST)])
        some: frozenset[int] = frozenset({3})
        gaps: list[int | None] = [None, 1]

    assert [entry.default for entry in entries(Typed)] == [
        "[true, false]", "['a']", "'2026-01-02'", "'a.txt'", "{on = true}", "inf", "absent",
        "[{kind = 'first', path = 'b'}]", "[3]", "[absent, 1]",
    ]  # fmt: skip


def test_the_help_of_a_config_has_the_options_of_its_module(tmp_path: Path, capsys) -> None:
    text = output_of(capsys, "config", tmp_path, "--help")
    assert "[options.dated] When.\n  --options.dated.since TEXT (default: none, it must" in text, (
        text
    )
    assert "  --options.dated.inner.depth INT (default: 2)" in text
    assert "--options.dated.sizes LIST (default: [1])\n  --options.dated.inner" in text
    assert "--optimizer.lr FLOAT" in text
    one = output_of(capsys, "config", tmp_path, "--help", "options.dated.since")
    assert one.splitlines()[1:] == [
        "[options.dated] When.",
        "  --options.dated.since TEXT (default: none, it must be given)",
        "        The first day.",
    ]
    with pytest.raises(ConfigError, match="'options.datd': no such .*\n  fix: .*options.dated"):
        output_of(capsys, "config", tmp_path, "--help", "options.datd")


def test_the_schema_of_a_config_has_the_options_of_its_module(tmp_path: Path, capsys) -> None:
    found = json.loads(output_of(capsys, "schema", tmp_path))
    options = found["$defs"]["Options"]
    assert options["additionalProperties"] is False
    dated = options["properties"]["dated"]
    assert dated["additionalProperties"] is False
    assert dated["properties"]["since"] == {
        "description": "The first day.", "format": "date", "title": "Since", "type": "string",
    }  # fmt: skip
    place = dated["properties"]["inner"]["$ref"].split("/")
    assert found["$defs"][place[-1]]["properties"]["depth"]["default"] == 2
    (tmp_path / "mine.py").write_text(
        "from pydantic import BaseModel, ConfigDict\nclass A(BaseModel):\n"
        "    model_config = ConfigDict(arbitrary_types_allowed=True)\n    a: slice = slice(1)\n"
        "OPTIONS = {'a': A}"
    )
    words = ["debug_model", f"--experimental.custom_import={tmp_path}/mine.py"]
    with pytest.raises(ConfigError, match="OPTIONS has 'a', of which no TOML can give a key: "):
        run(["schema", *words])
