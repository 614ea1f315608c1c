"""TOML, then the command line over it, to one checked `JobConfig`; and back to TOML.

Every value remembers where it was written, so that a mistake is reported as `file:line`.
"""

import os
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_origin

import tomli
import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from meshwright.config.command_line import EVERY_KEY, Key, Parser, add_config, parse
from meshwright.config.fields import find_field, find_section
from meshwright.config.job_config import (
    ADDRESS,
    BYTES,
    INPUT_PATH,
    MODULE_OBJECT,
    OUTPUT_PATH,
    JobConfig,
)
from meshwright.errors import ConfigError, did_you_mean

HEADER = re.compile(r"\s*(?P<brackets>\[\[?)\s*(?P<key>[^\]]+?)\s*\]")
ASSIGNMENT = re.compile(r"\s*(?P<key>[\w.\"' -]+?)\s*=")


class Provenance:
    """Where each key was given: `path/to.toml:12` or `--section.key`."""

    def __init__(self) -> None:
        self._origins: dict[Key, str] = {}

    def add_toml(self, path: Path, text: str) -> None:
        """Note the line of every table and key in `text`; inline tables count as one key.

        tomli gives no positions. It has accepted `text`, so a line-wise look is enough; all that
        it could misread is a line within a multi-line string that looks like a key.
        """
        table: Key = ()
        counts = Counter[Key]()
        for number, line in enumerate(text.splitlines(), 1):
            if header := HEADER.match(line):
                table = _split(header["key"])
                if header["brackets"] == "[[":  # one more table of a list
                    if not counts[table]:  # which replaces that of a TOML below
                        self._forget_below(table)
                    counts[table] += 1
                    table = (*table, str(counts[table] - 1))
                self._origins[table] = f"{_shown(path)}:{number}"
            elif assignment := ASSIGNMENT.match(line):
                self._origins[table + _split(assignment["key"])] = f"{_shown(path)}:{number}"

    def add_override(self, key: Key) -> None:
        """Note that the command line gave `key`."""
        self._forget_below(key)
        self._origins[key] = f"--{'.'.join(key)}"

    def _forget_below(self, key: Key) -> None:
        """What was written of the inside of `key` counts no longer."""
        for inner in [inner for inner in self._origins if inner[: len(key)] == key]:
            del self._origins[inner]

    def of(self, key: str | Sequence[str | int]) -> str:
        """Where `key`, or else the nearest table around it, was given; "" if nowhere."""
        parts = tuple(key.split(".") if isinstance(key, str) else map(str, key))
        while parts and not {parts, (*parts, "0")} & self._origins.keys():
            parts = parts[:-1]
        return self._origins.get(parts) or self._origins.get((*parts, "0"), "")

    def explain(self, error: ConfigError) -> str:
        """The error's message, headed by where its key was given."""
        where = self.of(error.key)
        return f"{where}: {error}" if where else str(error)


def _split(dotted: str) -> Key:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def _shown(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def load_config(words: Sequence[str]) -> tuple[JobConfig, Provenance]:
    """Load what a command line of `[CONFIG] [--section.key value ...]` describes.

    Raises:
        ConfigError: with one entry per mistake, each saying where it was made.
    """
    parser = Parser("train.py", epilog=EVERY_KEY)
    add_config(parser, words)
    return load_given(parse(parser, words))


def load_given(given: Namespace) -> tuple[JobConfig, Provenance]:
    """Read the TOML `given.config` ("": none), lay `given.overrides` over it, check every value.

    Raises:
        ConfigError: with one entry per mistake, each saying where it was made.
    """
    provenance = Provenance()
    raw: dict[str, Any] = {}
    if given.config:
        raw = _read_toml(Path(given.config), provenance, ())
        config_file = os.path.abspath(Path(given.config).expanduser())
        _set(raw, ("job", "config_file"), config_file)
    for key, text in given.overrides.items():
        provenance.add_override(key)
        table: dict[str, Any] = {}
        _set(table, key, _from_text(text, find_field(key)))
        _resolve_paths(table, Path.cwd())
        _merge(raw, table)
    try:
        return JobConfig.model_validate(raw), provenance
    except ValidationError as error:
        lines = [_describe(mistake, provenance) for mistake in error.errors()]
        raise ConfigError("", "\n".join(lines)) from None


@contextmanager
def config_errors(provenance: Provenance) -> Iterator[None]:
    """Any `ConfigError` raised inside says, once outside, where its key was given."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError("", provenance.explain(error)) from None


def _read_toml(path: Path, provenance: Provenance, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The TOML at `path` over the one that its top-level `extends = "base.toml"` names."""
    path = path.expanduser().absolute()
    if path in seen:
        raise ConfigError("", f"{_shown(path)}: extends itself, by way of {_shown(seen[-1])}")
    try:
        text = path.read_text(encoding="utf-8")
        raw = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise ConfigError("", f"{_shown(path)}:{error.lineno}: not TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError("", f"{_shown(path)}: cannot be read: {reason}") from None
    base: dict[str, Any] = {}
    extends = raw.pop("extends", None)
    if isinstance(extends, str):
        base = _read_toml(path.parent / extends, provenance, (*seen, path))
    provenance.add_toml(path, text)
    if not isinstance(extends, str | None):
        where = provenance.of("extends")
        raise ConfigError("", f"{where}: extends = {extends!r}: must be the path of one TOML")
    for name in JobConfig.model_fields:  # else a table of the base, or an override, would hide it
        if not isinstance(raw.get(name, {}), dict):
            where = provenance.of(name)
            raise ConfigError("", f"{where}: {name} = {raw[name]!r}: must be a table, [{name}]")
    if "config_file" in raw.get("job", {}):
        where = provenance.of("job.config_file")
        raise ConfigError("", f"{where}: job.config_file: belongs on the command line")
    _resolve_paths(raw, path.parent)
    _merge(base, raw)
    return base


def _from_text(text: str, field: FieldInfo | None) -> object:
    """A command-line value as the TOML value it stands for; validation has the last word."""
    if field and (field.annotation is str or get_origin(field.annotation) is Literal):
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        return text


def _set(table: dict[str, Any], key: Key, value: object) -> None:
    for part in key[:-1]:
        table = table.setdefault(part, {})
    table[key[-1]] = value


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Lay `over` over `base`, in place, table by table."""
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def _resolve_paths(raw: dict[str, Any], folder: Path, table: Key = ()) -> None:
    """Expand ~ in every path in `raw`, in place; a relative input path starts at `folder`."""
    for name, value in raw.items():
        key = (*table, name)
        if isinstance(value, dict):
            _resolve_paths(value, folder, key)
        elif isinstance(value, list):
            for inner in value:
                if isinstance(inner, dict):
                    _resolve_paths(inner, folder, key)
        field = find_field(key)
        if field is None or not (isinstance(value, str) and value):
            continue
        if ADDRESS.match(value):  # refused as it was written
            continue
        if INPUT_PATH in field.metadata and value != BYTES and not MODULE_OBJECT.fullmatch(value):
            raw[name] = os.path.normpath(folder / Path(value).expanduser())
        elif OUTPUT_PATH in field.metadata:
            raw[name] = str(Path(value).expanduser())


def _describe(mistake: ErrorDetails, provenance: Provenance) -> str:
    """One mistake as `file:line: key = value: what is wrong` and, for a name, the way out."""
    key = ".".join(map(str, mistake["loc"]))
    where = provenance.of(mistake["loc"])
    prefix = f"{where}: " if where else ""
    if mistake["type"] == "extra_forbidden":
        *tables, _ = map(str, mistake["loc"])
        section = find_section(tuple(tables))
        assert section is not None
        kind = "key" if tables else "section"
        valid = [".".join([*tables, field]) for field in section.model_fields]
        return f"{prefix}unknown {kind} {key}\n  fix: {did_you_mean(key, valid)}"
    message = mistake["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    return f"{prefix}{key} = {mistake['input']!r}: {message}"


def to_toml(config: JobConfig, only_changes: bool = False) -> str:
    """The config as TOML that loads to the same config; or only what differs from the defaults."""
    table = config.model_dump(exclude_none=True, exclude_defaults=only_changes)
    table.get("job", {}).pop("config_file", None)
    return tomli_w.dumps({name: section for name, section in table.items() if section})
