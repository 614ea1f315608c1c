"""Finds the model family and dimensions that a config gives, also in your own module. No torch."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from meshwright.checkpoint.conversion.hf_folder import find_family, read_args
from meshwright.config.explain import explain_value
from meshwright.config.job_config import JobConfig
from meshwright.config.own_options import OPTIONS, checked_options
from meshwright.config.section import is_path
from meshwright.datasets.conversations import FORMATS
from meshwright.datasets.sources import DATASETS, DatasetSpec
from meshwright.datasets.tokenizers.kinds import TOKENIZERS
from meshwright.models.args import DecoderArgs
from meshwright.models.families import MODELS
from meshwright.models.family import Family
from meshwright.system import errors
from meshwright.system.files import NamedPath
from meshwright.system.modules import describe_error, import_user_module
from meshwright.train.losses import LOSSES
from meshwright.train.metric_table import METRICS, Metric
from meshwright.train.optim.registry import OPTIMIZERS, SCHEDULES, ElementWise, MatrixWise

IMPORT_KEY = "experimental.custom_import"

FUNCTION: Any = Callable

TABLES: dict[str, tuple[dict[str, Any] | None, tuple[type, ...], str]] = {
    "MODELS": (MODELS, (Family,), "Family"),
    "DATASETS": (DATASETS, (DatasetSpec,), "DatasetSpec"),
    "FORMATS": (FORMATS, (FUNCTION,), "functions"),
    "TOKENIZERS": (TOKENIZERS, (FUNCTION,), "classes or functions"),
    "OPTIMIZERS": (OPTIMIZERS, (ElementWise, MatrixWise), "ElementWise or MatrixWise"),
    "METRICS": (METRICS, (Metric,), "Metric"),
    "LOSSES": (LOSSES, (FUNCTION,), "functions"),
    "SCHEDULES": (SCHEDULES, (FUNCTION,), "functions"),
    "OPTIONS": (OPTIONS, (type(BaseModel),), "classes of pydantic's BaseModel, such as Section"),
    "SINKS": (None, (FUNCTION,), "functions"),  # built later, by the first rank
}
"""Tables that a module may have, by name: ours that they extend, and the kinds of their values, in
words too."""

BuildSink = Callable[[JobConfig, Path], Any]
"""From the config and the dump folder to a sink: `write(record)` and `close()`."""

_ADDED = set[tuple[str, str]]()
"""Table and name of each entry that is a user's."""


def extend_by(name: str, key: str = IMPORT_KEY) -> None:
    """Take over the models, datasets, optimizers, losses and so on of a user's module, if there is
    one; `ConfigError` of `key` if it can't be imported, or takes a name that is ours."""
    if not name:
        return
    for table, (known, *_) in TABLES.items():
        for entry, value in _table(name, table, key).items():
            if known is None:
                continue
            # a notebook imports a module again that was edited
            if entry in known and (table, entry) not in _ADDED:
                what = f"{table} has {entry!r}, which is there already"
                raise _error(name, what, key, "give it another name")
            known[entry] = value
            _ADDED.add((table, entry))


def extend_only_by(name: str) -> None:
    """Do so for a job, which has nothing of the modules that earlier jobs of this process named."""
    for table, entry in _ADDED:
        known, *_ = TABLES[table]
        assert known is not None
        known.pop(entry, None)
    _ADDED.clear()
    extend_by(name)


def is_own(table: str, entry: str) -> bool:
    """Return whether an entry of a table is of the user's module."""
    return (table, entry) in _ADDED


def user_sinks(config: JobConfig) -> dict[str, BuildSink]:
    """Return the functions that build the user's sinks, by name."""
    name = config.experimental.custom_import
    return dict(_table(name, "SINKS", IMPORT_KEY)) if name else {}


def option_models(config: JobConfig) -> Mapping[str, type[BaseModel]]:
    """Return the models of [options.NAME] that the user's module declares, by name."""
    name = config.experimental.custom_import
    return _table(name, "OPTIONS", IMPORT_KEY) if name else {}


def own_options(config: JobConfig) -> dict[str, BaseModel]:
    """Return the options that the user's module declares, by name, with the values of the config.

    Raises:
        ConfigError: for each mistake in [options.NAME].
    """
    return checked_options(config.options, option_models(config))


def check_own_parts(config: JobConfig, own_options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if an optimizer, a loss or a metric of the user's module breaks its
    contract."""
    name = config.experimental.custom_import
    module = import_user_module(name) if name else None
    if any(getattr(module, table, None) for table in ("OPTIMIZERS", "LOSSES", "METRICS")):
        # not at the top: it imports torch, which other checks don't wait for
        from meshwright.train.own_contracts import check_contracts

        _, args = resolve_model(config)
        check_contracts(name, IMPORT_KEY, own_options, config.optimizer, args)


CORRECT_IT = "correct it; docs/extending.md has examples"


def _import(name: str, key: str) -> ModuleType:
    try:
        return import_user_module(name)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        fix = ""
        if isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]:
            fix = 'install it, or name its file: "path/to/file.py"'
        elif name.endswith(".py") and not Path(name).exists():
            raise _error(name, "no such file", key, errors.where_it_ends(name)) from None
        elif name.endswith(".py"):
            missing = error.name if isinstance(error, ModuleNotFoundError) else ""
            folder = Path(name).absolute().parent
            is_beside = (folder / f"{missing}.py").exists()
            fix = f"put it into {name}, or set PYTHONPATH={folder}" if is_beside else CORRECT_IT
        what = f"cannot be imported: {describe_error(error, name)}"
        raise _error(name, what, key, fix) from error


def _table(name: str, table: str, key: str) -> Mapping[str, Any]:
    found, (_, kinds, words) = getattr(_import(name, key), table, {}), TABLES[table]
    what = f"{table} must be a dict from names to {words}"
    if not isinstance(found, Mapping):
        raise _error(name, f"{what}, and is {found!r:.60}", key, CORRECT_IT)
    for entry, value in found.items():
        if not (isinstance(entry, str) and isinstance(value, kinds)):
            raise _error(name, f"{what}, and has {entry!r}: {value!r:.60}", key, CORRECT_IT)
    return found


def _error(name: str, what: str, key: str, fix: str = "") -> errors.ConfigError:
    usual = 'write "package.module" or "path/to/file.py"; docs/extending.md has examples'
    return errors.UserModuleError(key, str(errors.config_error(key, name, what, fix or usual)))


def resolve_model(config: JobConfig) -> tuple[Family, DecoderArgs]:
    """Return the family, and the flavor's dimensions with `model.args` over them.

    Raises:
        ConfigError: if there is no such family or size, or `model.args` are wrong.
    """
    extend_by(config.experimental.custom_import)
    name, flavor = config.model.name, config.model.flavor
    # with a lower bound, mixtral would be offered for mistral
    fix = f"{errors.did_you_mean(name, MODELS, 0.88)} (docs/extending.md adds one)"
    errors.check(name in MODELS, "model.name", name, "no such model", fix)
    family = MODELS[name]
    if is_path(flavor):
        place = NamedPath("model.flavor", Path(flavor))
        if "name" not in config.model.model_fields_set:
            family = find_family(place, list(MODELS.values()))
        args = read_args(place, family.hf, family.args, is_tie_given=config.model.gives_tie)
    else:
        sizes = family.flavors
        is_folder = f"write ./{flavor} for the folder" if Path(flavor).is_dir() else ""
        fix = is_folder or errors.did_you_mean(flavor, sizes or ["a path to a model's folder"])
        errors.check(flavor in sizes, "model.flavor", flavor, "no such size", fix)
        args = sizes[flavor]
    merged = dataclasses.asdict(args) | config.model.args
    try:
        return family, _decode(type(args), json.dumps(merged))
    except ValidationError as error:
        raise errors.CombinedConfigError(
            [_args_mistake(mistake, args) for mistake in error.errors()]
        ) from None


def check_own_model(config: JobConfig, family: Family, args: DecoderArgs) -> None:
    """Raise `ConfigError` if the user's module has this family, and the model has no table, or its
    modules don't hold the parameters of that, or don't run."""
    name = config.experimental.custom_import
    if not name or _table(name, "MODELS", IMPORT_KEY).get(family.name) is not family:
        return
    # not at the top: it imports torch, which ours need not, since tests compare them
    from meshwright.models.table_check import TableError, check_modules

    fix = "correct the table or the module; docs/extending.md has an example"
    try:
        check_modules(args)
    except TableError as error:
        raise errors.config_error("model.name", family.name, str(error), fix) from None
    except Exception as error:  # whatever the user's code raises
        rule = f"raises {describe_error(error, str(import_user_module(name).__file__))}"
        raise errors.config_error("model.name", family.name, rule, fix) from error


@lru_cache
def _decode(kind: type[DecoderArgs], text: str) -> DecoderArgs:
    """Return the dimensions in `text`: JSON, because strict validation of a dict wants dataclasses
    in it, not tables. A search checks a thousand jobs with one model, whose table is made once."""
    return TypeAdapter(kind).validate_json(text, strict=True)


def _args_mistake(mistake: ErrorDetails, args: DecoderArgs) -> errors.ConfigError:
    key = ".".join(["model.args", *map(str, mistake["loc"])])
    if mistake["type"] == "unexpected_keyword_argument":
        valid = [field.name for field in dataclasses.fields(args)]
        fix = (
            errors.did_you_mean(str(mistake["loc"][-1]), valid) if len(mistake["loc"]) == 1 else ""
        )
        return errors.UnknownKeyError(
            key, f"unknown key {key}" + (f"\n  fix: {fix}" if fix else "")
        )
    if mistake["type"] != "value_error":
        return explain_value(key, mistake)
    message = mistake["msg"].removeprefix("Value error, ")  # it starts with the name of a dimension
    return errors.ConfigError(f"{key}.{message.partition(' = ')[0]}", f"{key}.{message}")
