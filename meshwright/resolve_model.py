"""The model family and the dimensions that a config names. Free of torch."""

import dataclasses
import json
from functools import lru_cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from meshwright.checkpoint.place import Place
from meshwright.config.explain import explain_value
from meshwright.config.job_config import JobConfig
from meshwright.config.model_folder import is_folder
from meshwright.errors import (
    CombinedConfigError,
    ConfigError,
    UnknownKeyError,
    check,
    did_you_mean,
)
from meshwright.exchange.hf_folder import find_family, read_args
from meshwright.extension import extend
from meshwright.models.args import DecoderArgs
from meshwright.models.family import Family
from meshwright.specs import MODELS


def resolve_model(config: JobConfig) -> tuple[Family, DecoderArgs]:
    """Return the family, and the flavor's dimensions with `model.args` over them.

    Raises:
        ConfigError: if there is no such family or size, or `model.args` are wrong.
    """
    extend(config)
    name, flavor = config.model.name, config.model.flavor
    check(name in MODELS, "model.name", name, "no such model", did_you_mean(name, MODELS))
    spec = MODELS[name]
    if is_folder(flavor):
        place = Place("model.flavor", Path(flavor))
        if "name" not in config.model.model_fields_set:
            spec = find_family(place, list(MODELS.values()))
        args = read_args(place, spec.hf, spec.args)
    else:
        sizes = spec.flavors
        check(flavor in sizes, "model.flavor", flavor, "no such size", did_you_mean(flavor, sizes))
        args = sizes[flavor]
    merged = dataclasses.asdict(args) | config.model.args
    try:
        return spec, _decode(type(args), json.dumps(merged))
    except ValidationError as error:
        raise CombinedConfigError(
            [_args_mistake(mistake, args) for mistake in error.errors()]
        ) from None


@lru_cache
def _decode(kind: type[DecoderArgs], text: str) -> DecoderArgs:
    """Return the dimensions in `text`: JSON, because strict validation of a dict wants dataclasses
    in it, not tables.

    Cached, because a search checks a thousand jobs with one model, whose table is made once, then.

    Raises:
        ValidationError: if they are not dimensions of that kind.
    """
    return TypeAdapter(kind).validate_json(text, strict=True)


def _args_mistake(mistake: ErrorDetails, args: DecoderArgs) -> ConfigError:
    """One thing that is wrong with `model.args`."""
    key = ".".join(["model.args", *map(str, mistake["loc"])])
    if mistake["type"] == "unexpected_keyword_argument":
        valid = [field.name for field in dataclasses.fields(args)]
        fix = did_you_mean(str(mistake["loc"][-1]), valid) if len(mistake["loc"]) == 1 else ""
        return UnknownKeyError(key, f"unknown key {key}" + (f"\n  fix: {fix}" if fix else ""))
    if mistake["type"] != "value_error":
        return explain_value(key, mistake)
    message = mistake["msg"].removeprefix("Value error, ")  # it begins with the name of a dimension
    return ConfigError(f"{key}.{message.partition(' = ')[0]}", f"{key}.{message}")
