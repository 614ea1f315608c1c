"""Loads a config: the TOML, with the command line over it, as one checked `JobConfig`.

Every value remembers where it was written, so that a mistake is reported as `file:line`.
"""

import os
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_origin

import tomli
import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from meshwright.config.command_line import Parser, add_config, parse
from meshwright.config.explain import explain_mistake, explain_syntax
from meshwright.config.fields import Key, find_field, is_flag, set_value
from meshwright.config.inheritance import follow_folder, lay_over, merge, unset_empty_paths
from meshwright.config.job_config import JobConfig
from meshwright.config.provenance import Provenance, shown_path
from meshwright.config.section import (
    ADDRESS,
    BYTES,
    INPUT_PATH,
    LOCAL_PATH,
    MODULE_OBJECT,
    OUTPUT_PATH,
    PATH_OR_NAME,
    is_path,
)
from meshwright.config.stages import error_of_stage
from meshwright.config.training import Source
from meshwright.system.errors import (
    CombinedConfigError,
    ConfigError,
    check,
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
    path, stem, presets = folder / written, name.removesuffix(".toml"), preset_names()
    if path.exists() and not (stem in presets and path.is_dir()):
        return path
    if stem in presets:
        return FOLDER.resolve() / f"{stem}.toml"
    if "://" in name:
        raise ConfigError("", f"{name}: is an address\n  fix: fetch the file, and name its path")
    if Path(name).parent != Path():
        fix = where_it_ends(os.path.normpath(path))
        raise ConfigError("", f"{name}: no such file\n  fix: {fix}")
    here = {file.stem: file.name for file in folder.glob("*.toml")}
    near = get_close_matches(stem, here, 1, 0.75)
    fix = f"did you mean {here[near[0]]}?" if near else did_you_mean(stem, presets)
    raise ConfigError("", f"{name}: neither a file here nor a preset\n  fix: {fix}")


MIX_FILE = "training.mix_file"

PART = re.compile(r"\s*(?P<weight>(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?)\s+(?P<path>\S.*?)\s*")


def follow_mix(raw: dict[str, Any]) -> None:
    """Write the lines of `training.mix_file` as tables of `training.datasets`, in place. Each gets
    the other keys of a source from `[training]`, and the path as its name.

    Raises:
        ConfigError: if the file can't be read, or a line isn't a weight and a path.
    """
    training = raw.get("training", {})
    path = training.get("mix_file")
    if not (isinstance(path, str) and path):
        return
    for other in ("datasets", "dataset_path"):
        rule = f"is given together with training.{other}"
        check(not training.get(other), MIX_FILE, path, rule, "leave out one")
    fix = 'say of which kind its files are, e.g. training.dataset = "json"'
    check(bool(training.get("dataset")), MIX_FILE, path, "needs training.dataset", fix)
    shared = {key: training.pop(key) for key in Source.model_fields if key in training}
    training["datasets"], folder = [], Path(training.pop("mix_file")).parent
    for number, line in enumerate(_read_text(Path(path), MIX_FILE).split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        part = PART.fullmatch(line)
        if part is None or not float(part["weight"]) > 0:
            fix = "write a positive weight, a space and a path, e.g. `0.7 web/*.jsonl`"
            message = f"{path}:{number}: {line.strip()!r} is not a weight and a path\n  fix: {fix}"
            raise ConfigError(MIX_FILE, message)
        own = {"weight": float(part["weight"]), "dataset_path": part["path"], "name": part["path"]}
        training["datasets"].append(shared | own)
    _resolve_paths({"training": {"datasets": training["datasets"]}}, folder)
    fix = "write lines like `0.7 web/*.jsonl`"
    check(bool(training["datasets"]), MIX_FILE, path, "names no files", fix)


OF_FUNCTION = re.compile(r"(?<=\.py):\w+$")
"""The end of `path/to/file.py:function`."""


class Written(NamedTuple):
    """A config as it is written: its values aren't checked yet."""

    raw: dict[str, Any]
    provenance: Provenance

    def config(self) -> JobConfig:
        """Return the config, if every value is valid by itself.

        Raises:
            ConfigError: with one entry per mistake, each saying where it was made.
        """
        try:
            config = JobConfig.model_validate(self.raw)
            errors = unreadable_paths(config)
        except ValidationError as error:
            errors = [one for mistake in error.errors() for one in explain_mistake(mistake)]
        if errors:
            raise ConfigError("", self.provenance.explain(CombinedConfigError(errors)))
        return config


def load_config(words: Sequence[str]) -> JobConfig:
    """Load the config of a command line `[CONFIG] [--section.key value ...]`.

    Raises:
        ConfigError: with one entry per mistake, each saying where it was made.
    """
    return read(parse_config(words)).config()


def parse_config(words: Sequence[str]) -> Namespace:
    """Parse a command line that has nothing but a config."""
    parser = Parser("train.py")
    add_config(parser, words)
    return parse(parser, words)


def read(given: Namespace) -> Written:
    """Read the TOML `given.config` ("": none; or a config that is loaded already), and lay
    `given.overrides` over it: from Python, they may be values instead of text.

    Raises:
        ConfigError: if the TOML can't be read.
    """
    provenance = Provenance()
    try:
        return _read(given, provenance)
    except ConfigError as error:
        raise ConfigError("", provenance.explain(error)) from None


def _read(given: Namespace, provenance: Provenance) -> Written:
    raw: dict[str, Any] = {}
    if isinstance(given.config, JobConfig):
        raw = given.config.model_dump(exclude_unset=True)
    elif given.config:
        path = find_config(given.config)
        raw = _read_toml(path, provenance, ())
        set_value(raw, ("job", "config_file"), os.path.abspath(path))
    given_here: dict[str, Any] = {}
    for key, value in given.overrides.items():
        _check_override(key, value)
        provenance.add_override(key)
        table: dict[str, Any] = {}
        is_text = isinstance(value, str)
        set_value(table, key, _from_text(value, find_field(key)) if is_text else value)
        _resolve_paths(table, Path.cwd())
        merge(given_here, table)
    lay_over(raw, given_here, provenance)
    unset_empty_paths(raw, provenance)
    follow_folder(raw)
    follow_mix(raw)
    return Written(raw, provenance)


def with_lines(error: ConfigError, given: Namespace) -> ConfigError:
    """Return the error of a config that could be loaded, with the places where its keys were given.

    The TOML is read again: it is needed for nothing else by then.
    """
    keys = [one.key for one in getattr(error, "errors", [error])]
    if not any(key.partition(".")[0] in JobConfig.model_fields for key in keys):
        return error
    again, stage = read(given), getattr(given, "stage", 0)
    is_of_stage = not any(key.startswith("training.stages") for key in keys)
    if is_of_stage and 1 <= stage <= len((config := again.config()).training.stages):
        error = error_of_stage(error, config, stage - 1)
    return ConfigError("", again.provenance.explain(error))


def _check_override(key: Key, value: object) -> None:
    """Reject a part of a list, and a flag that has taken the CONFIG after it for its value."""
    name, field = f"--{'.'.join(key)}", find_field(key)
    if number := next((n for n, part in enumerate(key) if part.isdecimal()), 0):
        fix = f"write all of {'.'.join(key[:number])} in the TOML"
        rule = "the command line replaces a list as a whole"
        raise ConfigError("", f"{name}: {rule}\n  fix: {fix}")
    text = value if isinstance(value, str) else ""
    if field and is_flag(field) and (text.endswith(".toml") or text in preset_names()):
        what = f"{name} = {text!r}: is no value of it, but a CONFIG"
        raise ConfigError("", f"{what}\n  fix: write {name}=true {text}")


def _read_toml(path: Path, provenance: Provenance, seen: tuple[Path, ...]) -> dict[str, Any]:
    """Return the TOML at `path` over the one that its top-level `extends = "base.toml"` names."""
    path = path.absolute()
    if os.path.realpath(path) in map(os.path.realpath, seen):
        raise ConfigError("", f"{shown_path(path)}: extends itself, through {shown_path(seen[-1])}")
    raw, text = parse_toml(path)
    provenance.add_toml(path, text)
    base: dict[str, Any] = {}
    if (extends := raw.pop("extends", None)) is not None:
        check(isinstance(extends, str), "extends", extends, "must be the path of one TOML")
        try:
            below = find_config(extends, path.parent)
        except ConfigError as error:
            raise ConfigError("extends", str(error)) from None
        base = _read_toml(below, provenance, (*seen, path))
        base.get("job", {}).pop("description", None)  # of another job
        provenance.forget(("job", "description"))
        provenance.add_toml(path, text)  # again, over those of the base
    for name in JobConfig.model_fields:  # else a table of the base, or an override, would hide it
        table = raw.get(name, {})
        check(isinstance(table, dict), name, table, f"must be a table, [{name}]")
    file = raw.get("job", {}).get("config_file")
    check(file is None, "job.config_file", file, "belongs on the command line")
    _resolve_paths(raw, path.parent)
    lay_over(base, raw, provenance)
    return base


def parse_toml(path: Path) -> tuple[dict[str, Any], str]:
    """Return the tables of a TOML, and its text.

    Raises:
        ConfigError: with the line, if it can't be read.
    """
    text = _read_text(path)
    try:
        return tomli.loads(text), text
    except tomli.TOMLDecodeError as error:
        raise explain_syntax(error, shown_path(path)) from None


def _read_text(path: Path, key: str = "") -> str:
    """Return the text of the file that `key` names, without a mark that editors put before it."""
    shown = shown_path(path)
    if path.is_dir():
        raise ConfigError(key, f"{shown}: is a folder\n  fix: name a file in it")
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
        rule = f"cannot be read as UTF-8: it has byte 0x{byte:02x}"
        raise ConfigError(key, f"{shown}:{line}: {rule}\n  fix: save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(key, f"{shown}: cannot be read: {error.strerror}") from None


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


def _paths(
    raw: dict[str, Any], place: Key = ()
) -> Iterator[tuple[Key, dict[str, Any], set[object]]]:
    """Yield the key of every path of local files in `raw`, its table, and its marks."""
    for name, value in raw.items():
        key, field = (*place, name), find_field((*place, name))
        if isinstance(value, dict):
            yield from _paths(value, key)
        for number, inner in enumerate(value if isinstance(value, list) else ()):
            if isinstance(inner, dict):
                yield from _paths(inner, (*key, str(number)))
        if field is None or LOCAL_PATH not in field.metadata or not isinstance(value, str):
            continue
        if any(value in mark for mark in field.metadata if isinstance(mark, tuple)):  # a name
            continue
        is_name = value in ("", BYTES) or MODULE_OBJECT.fullmatch(value) or ADDRESS.match(value)
        if not (is_name or (PATH_OR_NAME in field.metadata and not is_path(value))):
            yield key, raw, set(field.metadata)


def _resolve_paths(raw: dict[str, Any], folder: Path) -> None:
    """Expand ~ in every path in `raw`, in place; a relative input path starts at `folder`."""
    for (*_, name), table, marks in [*_paths(raw)]:
        if marks & {INPUT_PATH, OUTPUT_PATH}:
            table[name] = os.path.expanduser(table[name])
        if INPUT_PATH in marks and not table[name].startswith("~"):
            table[name] = os.path.normpath(folder / table[name])


def unreadable_paths(config: JobConfig) -> list[ConfigError]:
    """Return the errors of paths that this user can't reach: a look at them would raise elsewhere.

    A path that doesn't exist is none of them.
    """
    errors, closed = list[ConfigError](), set[Path]()
    for key, table, marks in _paths(config.model_dump()):
        value, name = table[key[-1]], ".".join(key)
        folder = "" if marks & {INPUT_PATH, OUTPUT_PATH} else config.job.dump_folder
        path = Path(folder, OF_FUNCTION.sub("", value))
        if closed.isdisjoint({path, *path.parents}) and (why := out_of_reach(path)):
            errors.append(ConfigError(name, f"{name} = {value!r}: {why}"))
            closed.add(path)
    return errors


def to_toml(config: JobConfig, *, exclude_defaults: bool = False) -> str:
    """Return the config as TOML that loads to the same config; without defaults, if asked."""
    table = config.model_dump(exclude_none=True, exclude_defaults=exclude_defaults)
    table.get("job", {}).pop("config_file", None)
    for section in ("training", "validation"):
        keys = table.get(section, {})
        if keys.get("datasets") and keys.get("dataset"):
            del keys["dataset"]  # the default, which would be rejected next to them
        if section == "validation" and config.training.validation_fraction:  # as would its data
            table[section] = {key: keys[key] for key in keys if key not in Source.model_fields}
    return tomli_w.dumps({name: section for name, section in table.items() if section})
