"""Finds the keys of a config and their documentation in its classes."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, reduce
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from meshwright.config.job_config import JobConfig
from meshwright.config.section import Section
from meshwright.system.errors import as_toml

Key = tuple[str, ...]

SECTIONS: dict[str, type[Section]] = {
    name: field.annotation  # type: ignore[misc]
    for name, field in JobConfig.model_fields.items()
}
"""By name."""


def find_field(key: Key) -> FieldInfo | None:
    """Return the declaration of `key`, if there is one."""
    section = find_section(key[:-1])
    return section.model_fields.get(key[-1]) if section else None


def find_section(key: Key) -> type[Section] | None:
    """Return the table at `key`, if there is one; a number stands for a table in a list."""
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


def value_of(config: JobConfig, key: str) -> object:
    """Return the value of a dotted key of a section."""
    return reduce(getattr, key.split("."), config)


def set_value(table: dict[str, Any], key: Key, value: object) -> None:
    """Set the value of a key in a raw config."""
    for part in key[:-1]:
        table = table.setdefault(part, {})
    table[key[-1]] = value


def is_flag(field: FieldInfo) -> bool:
    """Return whether the key may be true or false."""
    return bool in (field.annotation, *get_args(field.annotation))


def all_keys() -> Iterator[tuple[Key, FieldInfo]]:
    """Yield every key of every section, in order, without those inside lists of tables."""
    for name, section in SECTIONS.items():
        for key, _, field in _keys_below(section):
            yield (name, *key), field


def _keys_below(section: type[BaseModel]) -> Iterator[tuple[Key, type[BaseModel], FieldInfo]]:
    """Yield the keys of a section with the section that has them, which is one inside of it for
    keys of two parts."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            for key, inner, of_inner in _keys_below(field.annotation):
                yield (name, *key), inner, of_inner
        else:
            yield (field.alias or name,), section, field


class KeyEntry(NamedTuple):
    """A key: its name (dotted, if it is in a section of the section), and its text in a line."""

    name: str
    kind: str
    default: str
    text: str


def summary(section: type[BaseModel]) -> str:
    """Return the section's own description."""
    return " ".join((section.__doc__ or "").split())


def entries(section: type[BaseModel]) -> Iterator[KeyEntry]:
    """Yield the keys of a section, in order; of one that a module of the user's declares, too."""
    for key, owner, field in _keys_below(section):
        schema = _properties(owner)[key[-1]]
        # as JSON has it: a default of a user's model may be of a type that no TOML has
        default = schema.get("default", field.get_default(call_default_factory=True))
        default = to_jsonable_python(default, fallback=str)
        shown = "none, it must be given" if field.is_required() else as_toml(default)
        yield KeyEntry(
            ".".join(key),
            _kind(schema),
            "absent" if default is None else shown,
            " ".join((field.description or "").split()),
        )


@cache
def _properties(section: type[BaseModel]) -> dict[str, Any]:
    return dict(section.model_json_schema()["properties"])


def _kind(schema: dict[str, Any]) -> str:
    """Return the type of a key, from its JSON Schema, as a person would write it."""
    if "enum" in schema:
        return "|".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    if "anyOf" in schema:
        return "|".join(_kind(option) for option in schema["anyOf"] if option.get("type") != "null")
    names = {
        "integer": "INT",
        "number": "FLOAT",
        "boolean": "true|false",
        "string": "TEXT",
        "object": "TABLE",
        "array": "LIST",
    }
    return names.get(schema.get("type", ""), "VALUE")  # a model of the user's may have any type


def json_schema(
    names: Mapping[Key, Sequence[str]],
    presets: Sequence[str],
    options: Mapping[str, type[BaseModel]],
) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a TOML.

    Args:
        options: models of [options.NAME] by name; without any, all tables are allowed.
        names: the values of keys that take a name. Any other is a mistake, unless the TOML, or
            one of the user's that it extends, may import a module that adds it.
        presets: none of them imports a module.
    """
    schema = JobConfig.model_json_schema()
    extends = {
        "type": "string",
        "description": "TOML or preset that this one changes, relative to this file.",
    }
    properties, sections = schema["properties"], schema["$defs"]
    # only the command line names the file
    sections["Job"]["properties"].pop("config_file")
    # editors hand on TOML's inf as null, since JSON has none
    max_norm = sections["Training"]["properties"]["max_norm"]
    max_norm["anyOf"] = [{"type": max_norm.pop("type")}, {"type": "null"}]
    for name, model in options.items():
        prefix = f"options.{name}."
        own = model.model_json_schema(ref_template=f"#/$defs/{prefix}{{model}}")
        sections |= {prefix + inner: table for inner, table in own.pop("$defs", {}).items()}
        sections["Options"]["additionalProperties"] = False
        sections["Options"]["properties"][name] = own
    imports = {"properties": {"experimental": {"required": ["custom_import"]}}}
    known: dict[str, Any] = {}
    for (section, key), values in names.items():
        field = sections[properties[section]["$ref"].rpartition("/")[2]]["properties"][key]
        field["anyOf"] = [{"enum": list(values)}, {"type": field.pop("type")}]  # to complete
        known[section] = {"properties": {key: {"enum": list(values)}}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "meshwright",
        "properties": {"extends": extends, **properties},
        "if": {
            "not": {"required": ["experimental"], **imports},
            "properties": {"extends": {"enum": list(presets)}},
        },
        "then": {"properties": known},
    }
