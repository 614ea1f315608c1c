"""The tables [options.NAME], checked by models of the user's own module."""

import json
from collections.abc import Iterator, Mapping
from functools import partial

from pydantic import BaseModel, ValidationError, create_model

from meshwright.config.explain import explain_value
from meshwright.config.job_config import Options
from meshwright.system.errors import (
    CombinedConfigError,
    ConfigError,
    Mistakes,
    UnknownKeyError,
    did_you_mean,
)

Models = Mapping[str, type[BaseModel]]

OPTIONS: dict[str, type[BaseModel]] = {}
"""The models of the user's module, by name."""


def options_of(name: str, written: str) -> BaseModel | None:
    """Return the options of a name; None: there is no model for it.

    Args:
        written: as JSON; "": the config has none.

    Raises:
        ConfigError: for each mistake that the model finds.
    """
    model = OPTIONS.get(name)
    return _checked(name, model, written or "{}") if model else None


def checked_options(options: Options, models: Models) -> dict[str, BaseModel]:
    """Return the options of every name in `models`: its defaults, where the config gives none.

    Raises:
        ConfigError: for each name that has no model, and each mistake that a model finds.
    """
    given = options.model_dump(mode="json")
    unknown = given.keys() - models.keys()
    mistakes, found = Mistakes(), dict[str, BaseModel]()
    mistakes.errors += map(partial(_unknown_name, models), unknown)
    for name, model in models.items():
        with mistakes.collect():
            found[name] = _checked(name, model, json.dumps(given.get(name, {})))
    mistakes.check()
    return found


def _checked(name: str, model: type[BaseModel], written: str) -> BaseModel:
    try:
        # as JSON, a strict model takes an array for a tuple, and a date or its text for a date
        return strict(model).model_validate_json(written)
    except ValidationError as error:
        raise CombinedConfigError(list(_explain(name, model, error))) from None


def strict(model: type[BaseModel]) -> type[BaseModel]:
    """Return a model that rejects unknown keys, unless it says what becomes of them: pydantic would
    ignore a misspelled one."""
    if "extra" in model.model_config:
        return model
    return create_model(
        model.__name__, __doc__=model.__doc__, __base__=model, __cls_kwargs__={"extra": "forbid"}
    )


def _unknown_name(models: Models, name: str) -> ConfigError:
    fix = did_you_mean(name, models) if models else ""
    fix = fix or f'add OPTIONS = {{"{name}": ...}} to the module of experimental.custom_import'
    key = f"options.{name}"
    return UnknownKeyError(key, f"{key}: no module has options of this name\n  fix: {fix}")


def _explain(name: str, model: type[BaseModel], error: ValidationError) -> Iterator[ConfigError]:
    for mistake in error.errors():
        key = ".".join(["options", name, *map(str, mistake["loc"])])
        if mistake["type"] == "extra_forbidden":
            fix = did_you_mean(str(mistake["loc"][-1]), model.model_fields)
            yield UnknownKeyError(key, f"unknown key {key}\n  fix: {fix}")
        elif mistake["type"] == "missing":
            yield ConfigError(key, f"{key}: must be given")
        else:
            yield explain_value(key, mistake)
