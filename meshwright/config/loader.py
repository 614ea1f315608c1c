"""TOML, then the command line over it, to one checked `JobConfig`; and back to TOML.

Every value remembers where it was written, so that a mistake is reported as `file:line`.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli
import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from meshwright.config.job_config import (
    ADDRESS,
    BYTES,
    INPUT_PATH,
    MODULE_OBJECT,
    OUTPUT_PATH,
    PATH_OR_NAME,
    JobConfig,
    Section,
)
from meshwright.config.model_folder import follow_folder, is_path
from meshwright.config.torchtitan.translate import is_torchtitan, translate
from meshwright.errors import ConfigError, did_you_mean

Key = tuple[str, ...]

HEADER = re.compile(r"\s*(?P<brackets>\[\[?)\s*(?P<key>[^\]]+?)\s*\]")
ASSIGNMENT = re.compile(r"\s*(?P<key>[\w.\"' -]+?)\s*=")


class Provenance:
    """Where each key was given: `path/to.toml:12` or `--section.key`."""

    def __init__(self) -> None:
        self._origins: dict[Key, str] = {}
        self.notes: list[str] = []
        """What has become of each key of a TOML of torchtitan's."""

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

    def translate(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return `raw` as a config of ours, if it is one of torchtitan's."""
        if not is_torchtitan(raw):
            return raw
        table, notes, origins = translate(raw, Path.cwd(), self.of)
        for ours, theirs in origins.items():
            self._origins[_split(ours)] = self.of(theirs)
        for key, text in notes:
            where = self.of(key)
            self.notes.append(f"{where}: {key}: {text}" if where else f"{key}: {text}")
        return table

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


def load_config(argv: Sequence[str]) -> tuple[JobConfig, Provenance]:
    """Read `--job.config_file`, lay the other `--section.key value` over it, check every value.

    Raises:
        ConfigError: with one line per mistake, each saying where it was made.
    """
    provenance = Provenance()
    overrides = _parse_overrides(argv)
    config_file = overrides.get(("job", "config_file"))
    raw = _read_toml(Path(config_file), provenance, ()) if config_file else {}
    for key, text in overrides.items():
        provenance.add_override(key)
        given: dict[str, Any] = {}
        _set(given, key, _from_text(text, _field(key)))
        _resolve_paths(given, Path.cwd())
        _merge(raw, given)
    raw = provenance.translate(raw)
    follow_folder(raw)
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
    _resolve_paths(raw, Path.cwd() if is_torchtitan(raw) else path.parent)
    _merge(base, raw)
    return base


def _parse_overrides(argv: Sequence[str]) -> dict[Key, str]:
    """`--a.b value`, `--a.b=value`, and `--a.b` alone for true."""
    overrides: dict[Key, str] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if word in ("--help", "-h"):
            raise ConfigError("", f"{word}: every key is documented by `meshwright config --help`")
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            raise ConfigError("", f"{word!r}: expected --section.key value")
        key = tuple(name.split("."))
        if not equals:
            field = _field(key)
            if words and not words[0].startswith("--"):
                value = words.pop(0)
            elif field is None or field.annotation is bool:
                value = "true"
            else:
                raise ConfigError("", f"--{name}: needs a value")
        if key in overrides:
            raise ConfigError("", f"--{name}: given twice\n  fix: leave out one of the two")
        overrides[key] = value
    return overrides


def _field(key: Key) -> FieldInfo | None:
    """The declaration of `key`, if it is one of `JobConfig`'s."""
    section = _section(key[:-1])
    return section.model_fields.get(key[-1]) if section else None


def _section(key: Key) -> type[Section] | None:
    """The table at `key`, if it is one of `JobConfig`'s; a number stands for a table in a list."""
    section: type[Section] = JobConfig
    for part in key:
        if part.isdecimal():
            continue
        annotation: Any = getattr(section.model_fields.get(part), "annotation", None)
        if get_origin(annotation) is list:
            (annotation,) = get_args(annotation)
        if not (isinstance(annotation, type) and issubclass(annotation, Section)):
            return None
        section = annotation
    return section


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
        field = _field(key)
        if field is None or not (isinstance(value, str) and value):
            continue
        if ADDRESS.match(value):  # refused as it was written
            continue
        if PATH_OR_NAME in field.metadata and not is_path(value):
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
        section = _section(tuple(tables))
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
