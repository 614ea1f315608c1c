"""Parses a command line: the options of a command, and a CONFIG with `--section.key value`."""

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from meshwright.system.errors import ConfigError, check

OVERRIDE = re.compile(r"--(?P<key>\w+(\.[\w-]+)+)(=.*)?", re.DOTALL)

CONFIG_FILE = "job.config_file"

EVERY_KEY = """\
`--section.key VALUE` sets any key of the config, and a true/false key needs
no VALUE. `meshwright config --help` documents every key."""


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are `ConfigError`s."""

    def __init__(self, prog: str, description: str = "") -> None:
        self.options: dict[str, str] = {}
        """Names of their values by their own, for advice."""
        # "resolve": `config` has a --help of its own
        super().__init__(
            prog,
            description=description,
            allow_abbrev=False,
            conflict_handler="resolve",
            formatter_class=argparse.RawDescriptionHelpFormatter,  # an example has its line
        )

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        if not names[0].startswith("-"):
            settings.setdefault("metavar", names[0].upper())
        value = settings.get("metavar", "VALUE")
        self.options |= {name: value for name in names if name.startswith("--")}
        return super().add_argument(*names, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting.

        Raises:
            ConfigError: always.
        """
        name, is_value, _ = message.removeprefix("argument ").partition(": expected one argument")
        if is_value:
            raise ConfigError("", f"{name}: needs a value\n  fix: write {name}=VALUE")
        if (named := message.removeprefix("the following arguments are required: ")) != message:
            names = named.split(", ")
            fix = " ".join(f"{name} {self.options.get(name)}" for name in names)
            fix = f"write {fix}" if {*names} <= {*self.options} else f"see {self.prog} --help"
            raise ConfigError("", f"{named}: not given\n  fix: {fix}")
        if "\n  fix: " in message:
            raise ConfigError("", message.removeprefix("argument "))
        raise ConfigError("", f"{message}\n  fix: {self.prog} --help lists all options")


A_CONFIG = "a TOML file, or a preset by name (meshwright config --presets lists them)"

A_RUN = "the dump folder of a run, whose config is taken"


def add_config(
    parser: argparse.ArgumentParser, words: Sequence[str], *, is_run: bool = False
) -> None:
    """Add CONFIG, or RUN, and an option for each `--section.key` among `words`.

    Any name is accepted, because the check of the config reports wrong ones, and better.
    """
    metavar, what = ("RUN", A_RUN) if is_run else ("CONFIG", A_CONFIG)
    parser.add_argument("config", nargs="?", metavar=metavar, help=what)
    for name in {match["key"] for word in words if (match := OVERRIDE.fullmatch(word))}:
        of_flag: dict[str, Any] = {"nargs": "?", "const": "true"}
        parser.add_argument(
            f"--{name}",
            action="append",  # to see one that is given twice
            dest=name,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
            **({} if _needs_value(name) else of_flag),
        )


def _needs_value(name: str) -> bool:
    """Return whether the key is known, and isn't a flag."""
    # pydantic takes 0.1 s, more than `--help` needs for all else
    from meshwright.config.fields import find_field, is_flag

    field = find_field(tuple(name.split(".")))
    return field is not None and not is_flag(field)


def parse(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """Parse `words`; with a config, its file is `.config` ("": none) and the rest `.overrides`.

    Raises:
        ConfigError: if a word isn't understood.
    """
    # "intermixed": CONFIG may stand before, between and after options
    given, rest = parser.parse_known_intermixed_args(words)
    if rest:
        _refuse(rest[0], parser, given)
    if not hasattr(given, "config"):
        return given
    if re.fullmatch(r"[\w.]+=.*", given.config or ""):
        _refuse(given.config, parser, given)
    given.overrides = {}
    for name in [name for name in vars(given) if "." in name]:
        values = getattr(given, name)
        if len(values) > 1:
            raise ConfigError("", f"--{name}: given twice\n  fix: leave out one of the two")
        given.overrides[tuple(name.split("."))] = values[0]
        delattr(given, name)
    named = given.overrides.pop(tuple(CONFIG_FILE.split(".")), None)
    is_one = named is None or given.config is None
    check(
        is_one, "CONFIG", given.config, f"given together with --{CONFIG_FILE} {named}", "name one"
    )
    given.config = given.config or named or ""
    return given


def _refuse(word: str, parser: Parser, given: argparse.Namespace) -> NoReturn:
    """Raise for a word that stands for nothing."""
    from meshwright.config.explain import nearest, suggest_key  # pydantic takes 0.1 s

    name, equals, value = word.partition("=")
    bare = name.lstrip("-\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}")
    is_option = name.startswith("--") and "." not in name
    rule = "expected CONFIG or --section.key value"
    fix = f"leave it out; CONFIG is {getattr(given, 'config', None)}"
    if near := nearest(name, parser.options) if is_option else ():
        rule, fix = "no such option", f"write {near[0]}{equals}{value}"
    elif not hasattr(given, "config"):
        rule, fix = "not understood", f"leave it out; the options are {', '.join(parser.options)}"
    elif "." in bare and not name.startswith("--") and (equals or bare != name):
        rule, fix = "expected --section.key value", f"write --{word[word.find(bare) :]}"
    elif is_option:
        fix = suggest_key([bare]).replace("did you mean ", "did you mean --")
        names = [name for name in fix.split() if name.startswith("--") and "." not in name]
        if not {*names} <= {*parser.options}:  # the advice is for other commands
            fix = f"leave it out; the options of {parser.prog} are {', '.join(parser.options)}"
    raise ConfigError("", f"{word!r}: {rule}\n  fix: {fix}")
