"""Loads a config: the TOML, with the command line over it, as one checked `JobConfig`.

Every value remembers where it was written, so that a mistake is reported as `file:line`.
"""

import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_origin

import tomli
import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from meshwright.config.command_line import Parser, add_config, parse
from meshwright.config.explain import explain_mistake, explain_syntax
from meshwright.config.fields import Key, find_field, is_flag
from meshwright.config.job_config import JobConfig
from meshwright.config.mix_file import follow_mix
from meshwright.config.provenance import Provenance, shown_path
from meshwright.config.section import (
    ADDRESS,
    BYTES,
    INPUT_PATH,
    LOCAL_PATH,
    MODULE_OBJECT,
    OUTPUT_PATH,
    PATH_OR_NAME,
    Section,
)
from meshwright.config.torchtitan.translate import is_torchtitan, translate
from meshwright.config.training import Source
from meshwright.system.errors import (
    CombinedConfigError,
    ConfigError,
    did_you_mean,
    out_of_reach,
    where_it_ends,
)

PACKAGE = Path(__file__).parents[1]
FOLDER = next(
    folder / "train_configs"
    for folder in (PACKAGE, PACKAGE.parent)
    if (folder / "train_configs").is_dir()
)
"""Folder of the presets: inside the package in a wheel, next to it in the repository."""


def preset_names() -> list[str]:
    """Return the names of all presets."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find_config(name: str, folder: Path = Path()) -> Path:
    """Return the TOML that `name` stands for: a path, or a preset with or without `.toml`.

    Args:
        folder: where a relative path starts.

    Raises:
        ConfigError: if there is neither.
    """
    written = os.path.expanduser(name)
    if why := out_of_reach(written if written.startswith("~") else folder / written):
        raise ConfigError("", f"{name}: {why}")
    path, stem = folder / written, name.removesuffix(".toml")
    is_preset = stem in preset_names()
    if path.exists() and not (is_preset and path.is_dir()):
        return path
    if is_preset:
        return FOLDER.resolve() / f"{stem}.toml"
    if "://" in name:
        raise ConfigError("", f"{name}: is an address\n  fix: fetch the file, and name its path")
    if Path(name).parent != Path():
        raise ConfigError(
            "", f"{name}: no such file\n  fix: {where_it_ends(os.path.normpath(path))}"
        )
    here = [file.name for file in folder.glob("*.toml")]
    near = [f"{name}.toml"] if f"{name}.toml" in here else get_close_matches(name, here, 1, 0.75)
    fix = f"did you mean {near[0]}?" if near else did_you_mean(stem, preset_names())
    raise ConfigError("", f"{name}: neither a file here nor a preset\n  fix: {fix}")


def is_path(value: str) -> bool:
    """Return whether the value of a key that takes a path or a name is a path."""
    return "/" in value or value.partition(":")[0].endswith(".py")


def follow_folder(raw: dict[str, Any]) -> None:
    """Take the tokenizer from the folder that `model.flavor` names, and the first weights if
    `checkpoint.initial_load_in_hf` asks for some, in place, unless they are given."""
    model, checkpoint = raw.get("model"), raw.get("checkpoint")
    flavor = model.get("flavor") if isinstance(model, Mapping) else None
    if not (isinstance(flavor, str) and is_path(flavor)):
        return
    raw["model"] = {"tokenizer_path": flavor} | raw["model"]
    if isinstance(checkpoint, Mapping) and checkpoint.get("initial_load_in_hf") is True:
        raw["checkpoint"] = {"initial_load_path": flavor} | dict(checkpoint)


ROWS = ("json", "parquet", "arrow")
"""Datasets whose rows the same keys describe."""

OF_FUNCTION = re.compile(r"(?<=\.py):\w+$")
"""The end of `path/to/file.py:function`."""


class Written(NamedTuple):
    """A config as it is written: its values are not checked yet."""

    raw: dict[str, Any]
    provenance: Provenance
    notes: list[str]
    """Notes on keys of a TOML of torchtitan's, each with its line."""

    def config(self) -> JobConfig:
        """Return the config, if every value is valid by itself.

        Raises:
            ConfigError: with one entry per mistake, each saying where it was made.
        """
        try:
            config = JobConfig.model_validate(self.raw)
            errors = unreadable_paths(config)
        except ValidationError as error:
            errors = [explain_mistake(mistake) for mistake in error.errors()]
        if errors:
            raise ConfigError("", self.provenance.explain(CombinedConfigError(errors)))
        return config


def load_config(words: Sequence[str]) -> JobConfig:
    """Load the config of a command line `[CONFIG] [--section.key value ...]`.

    Raises:
        ConfigError: with one entry per mistake, each saying where it was made.
    """
    return load_given(parse_config(words))


def parse_config(words: Sequence[str]) -> Namespace:
    """Parse a command line that has nothing but a config."""
    parser = Parser("train.py")
    add_config(parser, words)
    return parse(parser, words)


def load_given(given: Namespace) -> JobConfig:
    """Read the TOML `given.config` ("": none), lay `given.overrides` over it, check every value.

    Raises:
        ConfigError: with one entry per mistake, each saying where it was made.
    """
    return read(given).config()


def read(given: Namespace) -> Written:
    """Read the TOML `given.config` ("": none), and lay `given.overrides` over it.

    Raises:
        ConfigError: if the TOML cannot be read.
    """
    provenance = Provenance()
    raw: dict[str, Any] = {}
    if given.config:
        path = find_config(given.config)
        raw = _read_toml(path, provenance, ())
        _set(raw, ("job", "config_file"), os.path.abspath(path))
    given_here: dict[str, Any] = {}
    for key, text in given.overrides.items():
        _check_override(key, text)
        provenance.add_override(key)
        table: dict[str, Any] = {}
        _set(table, key, _from_text(text, find_field(key)))
        _resolve_paths(table, Path.cwd())
        _merge(given_here, table)
    _lay_over(raw, given_here, provenance)
    notes: list[str] = []
    if is_torchtitan(raw):
        try:
            raw, of_keys, origins = translate(raw, Path.cwd())
        except ConfigError as error:
            raise ConfigError("", provenance.explain(error)) from None
        provenance.rename(origins)
        notes = [f"{provenance.place(key)}: {text}" for key, text in of_keys]
    follow_folder(raw)
    follow_mix(raw)
    return Written(raw, provenance, notes)


def with_lines(error: ConfigError, given: Namespace) -> ConfigError:
    """Return the error of a config that could be loaded, with the places where its keys were given.

    The TOML is read again: it is needed for nothing else by then.
    """
    keys = [one.key for one in getattr(error, "errors", [error])]
    if not any(key.partition(".")[0] in JobConfig.model_fields for key in keys):
        return error
    return ConfigError("", read(given).provenance.explain(error))


def _check_override(key: Key, text: str) -> None:
    """Refuse a part of a list, and a flag that has taken the CONFIG after it for its value."""
    name, field = ".".join(key), find_field(key)
    if number := next((n for n, part in enumerate(key) if part.isdecimal()), 0):
        fix = f"write all of {'.'.join(key[:number])} in the TOML"
        raise ConfigError(
            "", f"--{name}: the command line replaces a list as a whole\n  fix: {fix}"
        )
    is_config = text.endswith(".toml") or text in preset_names()
    if field is not None and is_flag(field) and is_config:
        what = f"--{name} = {text!r}: must be true or false"
        raise ConfigError("", f"{what}\n  fix: write --{name}=true {text}")


def _read_toml(path: Path, provenance: Provenance, seen: tuple[Path, ...]) -> dict[str, Any]:
    """Return the TOML at `path` over the one that its top-level `extends = "base.toml"` names."""
    path = path.absolute()
    if os.path.realpath(path) in map(os.path.realpath, seen):
        raise ConfigError(
            "", f"{shown_path(path)}: extends itself, by way of {shown_path(seen[-1])}"
        )
    text = _read_text(path)
    try:
        raw = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise explain_syntax(error, shown_path(path)) from None
    base: dict[str, Any] = {}
    extends = raw.pop("extends", None)
    if isinstance(extends, str):
        base = _read_toml(_find_base(extends, path, text), provenance, (*seen, path))
        base.get("job", {}).pop("description", None)  # of another job
        provenance.forget(("job", "description"))
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
    _lay_over(base, raw, provenance)
    return base


def _read_text(path: Path) -> str:
    """Return the text of a TOML, without the mark that some editors put before it."""
    shown = shown_path(path)
    if path.is_dir():
        raise ConfigError("", f"{shown}: is a folder\n  fix: name a TOML in it")
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
        rule = f"cannot be read as UTF-8: it has byte 0x{byte:02x}"
        raise ConfigError("", f"{shown}:{line}: {rule}\n  fix: save it as UTF-8") from None
    except OSError as error:
        raise ConfigError("", f"{shown}: cannot be read: {error.strerror}") from None


def _find_base(extends: str, path: Path, text: str) -> Path:
    """Return the TOML that the one at `path` extends: a file next to it, or a preset."""
    try:
        return find_config(extends, path.parent)
    except ConfigError as error:
        provenance = Provenance()
        provenance.add_toml(path, text)
        raise ConfigError("", provenance.explain(ConfigError("extends", str(error)))) from None


def _from_text(text: str, field: FieldInfo | None) -> object:
    """Return a command-line value as the TOML value it stands for; validation has the last word."""
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


def _lay_over(base: dict[str, Any], over: Mapping[str, Any], provenance: Provenance) -> None:
    """Lay `over` over `base`, in place; where it names other data, the inherited keys of the data
    that `base` names go: they belong to those."""
    default, holds_out = Source.model_fields["dataset"].default, False
    for section in ("training", "validation"):  # in this order
        here, inherited = over.get(section, {}), base.get(section)
        named = (inherited or {}).get("dataset", default)
        names_other = "datasets" in here or here.get("dataset", named) != named
        # a preset that says how rows are to be read, of files that it does not name
        is_template = named in ROWS and not (inherited or {}).get("dataset_path")
        goes = (names_other and not is_template) or (holds_out and "dataset" not in here)
        if isinstance(inherited, dict) and goes:
            for key in {*Source.model_fields, "datasets", "mix_file"} - {*here}:
                inherited.pop(key, None)
                provenance.forget((section, key))
        holds_out = bool(here.get("validation_fraction"))
    _merge(base, over)


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
        if ADDRESS.match(value):  # kept as it was written, or refused
            continue
        if PATH_OR_NAME in field.metadata and not is_path(value):
            continue
        if INPUT_PATH in field.metadata and value != BYTES and not MODULE_OBJECT.fullmatch(value):
            value = os.path.expanduser(value)
            raw[name] = value if value.startswith("~") else os.path.normpath(folder / value)
        elif OUTPUT_PATH in field.metadata:
            raw[name] = os.path.expanduser(value)


def unreadable_paths(config: JobConfig) -> list[ConfigError]:
    """Return the errors of paths that this user cannot reach: a look at them would raise elsewhere.

    A path that does not exist is none of them.
    """
    errors, closed = list[ConfigError](), set[Path]()
    for key, value, field in _values(config, ()):
        if not (isinstance(value, str) and value and LOCAL_PATH in field.metadata):
            continue
        if PATH_OR_NAME in field.metadata and not is_path(value):
            continue
        if ADDRESS.match(value):  # of object storage
            continue
        is_inside = not {INPUT_PATH, OUTPUT_PATH} & set(field.metadata)
        path = Path(config.job.dump_folder if is_inside else "", OF_FUNCTION.sub("", value))
        is_new = closed.isdisjoint({path, *path.parents})
        if is_new and (why := out_of_reach(path)):
            errors.append(ConfigError(key, f"{key} = {value!r}: {why}"))
            closed.add(path)
    return errors


def _values(section: Section, table: Key) -> Iterator[tuple[str, object, FieldInfo]]:
    """Yield every key of a section and of those in it, its value and its declaration."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        yield ".".join((*table, name)), value, field
        inner = value if isinstance(value, list) else [value]
        for number, one in enumerate(inner):
            if isinstance(one, Section):
                place = (*table, name, str(number)) if isinstance(value, list) else (*table, name)
                yield from _values(one, place)


def to_toml(config: JobConfig, only_changes: bool = False) -> str:
    """Return the config as TOML that loads to the same config; or only values that are not
    defaults."""
    table = config.model_dump(exclude_none=True, exclude_defaults=only_changes)
    table.get("job", {}).pop("config_file", None)
    for section in ("training", "validation"):
        keys = table.get(section, {})
        if keys.get("datasets") and keys.get("dataset"):
            del keys["dataset"]  # the default, which would be refused beside them
    return tomli_w.dumps({name: section for name, section in table.items() if section})
