"""Parses a command line: the options of a command, and a CONFIG with `--section.key value`."""

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from meshwright.system.errors import ConfigError, check

OVERRIDE = re.compile(r"--(?P<key>\w+(\.[\w-]+)+)(=.*)?", re.DOTALL)

NEGATIVE = re.compile(r"-(\d|\.\d|inf|nan).*")

CONFIG_FILE = "job.config_file"

EVERY_KEY = (
    "--section.key VALUE sets any key of the config; a true/false key may stand alone. "
    "`meshwright config --help` documents every key."
)


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are `ConfigError`s."""

    def __init__(self, prog: str, description: str = "") -> None:
        self.options: list[str] = []
        """Those of the command, without the keys of a config."""
        # "resolve": `config` has a --help of its own
        super().__init__(
            prog, description=description, allow_abbrev=False, conflict_handler="resolve"
        )

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        self.options += [name for name in names if name.startswith("--") and "." not in name]
        return super().add_argument(*names, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting.

        Raises:
            ConfigError: always.
        """
        name, is_value, _ = message.removeprefix("argument ").partition(": expected one argument")
        if is_value:
            raise ConfigError("", f"{name}: needs a value\n  fix: {name} VALUE")
        if "\n  fix: " in message:
            raise ConfigError("", message.removeprefix("argument "))
        raise ConfigError("", f"{message}\n  fix: {self.prog} --help lists all options")


def add_config(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add CONFIG, and an option for each `--section.key` among `words`.

    Any name is accepted, because the check of the config reports wrong ones, and better.
    """
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="a TOML file, or a preset by name (meshwright config --presets lists them)",
    )
    parser.set_defaults(overrides={})
    for name in dict.fromkeys(
        match["key"] for word in words if (match := OVERRIDE.fullmatch(word))
    ):
        key = tuple(name.split("."))
        parser.add_argument(
            f"--{name}",
            action=_Override,
            dest="overrides",
            nargs=None if _needs_value(key) else "?",
            const="true",
            key=key,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def _needs_value(key: tuple[str, ...]) -> bool:
    """Return whether `key` is known, and is not a flag."""
    # pydantic takes 0.1 s, more than `--help` needs for all else
    from meshwright.config.fields import find_field, is_flag

    field = find_field(key)
    return field is not None and not is_flag(field)


class _Override(argparse.Action):
    """Collect `--section.key value` under its key."""

    def __init__(self, key: tuple[str, ...], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._key = key

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if self._key in namespace.overrides:
            raise ConfigError("", f"{option_string}: given twice\n  fix: leave out one of the two")
        namespace.overrides = namespace.overrides | {self._key: values}


def parse(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """Parse `words`; with a config, its file is `.config` ("": none) and the rest `.overrides`.

    Raises:
        ConfigError: if a word is not understood.
    """
    # "intermixed": CONFIG may stand before, between and after options
    words = list(_in_our_spelling(words, parser.options))
    given, rest = parser.parse_known_intermixed_args(words)
    if rest:
        _check_option(rest[0], parser.options, takes_config=hasattr(given, "overrides"))
        _refuse(rest[0], words, getattr(given, "config", None))
    if not hasattr(given, "overrides"):
        return given
    if re.fullmatch(r"[\w.]+=.*", given.config or ""):
        _refuse(given.config, words)
    named = given.overrides.pop(tuple(CONFIG_FILE.split(".")), None)
    is_one = named is None or given.config is None
    check(is_one, "CONFIG", given.config, f"given beside --{CONFIG_FILE} {named}", "name one")
    given.config = given.config or named or ""
    return given


def _in_our_spelling(words: Sequence[str], options: Sequence[str]) -> Iterator[str]:
    """Yield the words with - for _ in options, as torchrun takes them, too; and a negative number,
    which may look like an option, behind the = of its key."""
    key = ""
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.replace("_", "-") in options else name
        word = f"{name}{equals}{value}"
        if key and NEGATIVE.fullmatch(word):
            yield f"{key}={word}"
            key = ""
            continue
        if key:
            yield key
        key = word if OVERRIDE.fullmatch(word) and not equals else ""
        if not key:
            yield word
    if key:
        yield key


def _check_option(word: str, options: Sequence[str], *, takes_config: bool) -> None:
    """Refuse a word that is near to an option, or that a command without CONFIG does not know."""
    from meshwright.config.explain import nearest  # pydantic takes 0.1 s

    name, equals, value = word.partition("=")
    for near in nearest(name, options) if name.startswith("--") and "." not in name else ():
        raise ConfigError("", f"{word!r}: no such option\n  fix: write {near}{equals}{value}")
    if not takes_config:
        fix = f"leave it out; the options are {', '.join(options)}"
        raise ConfigError("", f"{word!r}: not understood\n  fix: {fix}")


def _refuse(word: str, words: Sequence[str], config: str | None = None) -> NoReturn:
    """Raise for a word that stands for nothing.

    Args:
        words: the command line.
        config: the CONFIG on it.
    """
    name, equals, _ = word.partition("=")
    bare = name.lstrip("-\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}")
    if "." in bare and not name.startswith("--") and (equals or bare != name):
        raise ConfigError(
            "", f"{word!r}: expected --section.key value\n  fix: write --{word[word.find(bare) :]}"
        )
    before = words[list(words).index(word) - 1] if word in words[1:] else ""
    fix = ""
    if before.endswith("=") and not equals:
        fix = f"no space after =: {before}{word}"
    elif name in ("--config", "--config-file", "--config_file"):
        fix = "write the path of the TOML alone, or --job.config_file PATH"
    elif name.startswith("--"):
        from meshwright.config.explain import suggest_key  # as above: pydantic takes 0.1 s

        fix = suggest_key([bare]).replace("did you mean ", "did you mean --")
    elif config:
        fix = f"leave it out; CONFIG is {config}"
    raise ConfigError(
        "", f"{word!r}: expected CONFIG or --section.key value" + (f"\n  fix: {fix}" if fix else "")
    )
