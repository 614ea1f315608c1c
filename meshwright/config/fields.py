"""Finds the keys of a config and their documentation in its classes."""

from collections.abc import Iterator
from typing import Any, NamedTuple, get_args, get_origin

from pydantic.fields import FieldInfo

from meshwright.config.job_config import JobConfig
from meshwright.config.section import Section

Key = tuple[str, ...]


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
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def is_flag(field: FieldInfo) -> bool:
    """Return whether the key may be true or false."""
    return bool in (field.annotation, *get_args(field.annotation))


def all_keys() -> Iterator[tuple[Key, FieldInfo]]:
    """Yield every key of every section, in order, without those inside lists of tables."""
    for name in JobConfig.model_fields:
        section = find_section((name,))
        assert section is not None
        for key, field in section.model_fields.items():
            yield (name, key), field


class Entry(NamedTuple):
    """A key: its name in the section, and its text in one line each."""

    name: str
    kind: str
    default: str
    text: str


def summary(section_name: str) -> str:
    """Return the section's own description."""
    section = find_section((section_name,))
    assert section is not None
    return " ".join((section.__doc__ or "").split())


def entries(section_name: str) -> Iterator[Entry]:
    """Yield the keys of a section, in order."""
    section = find_section((section_name,))
    assert section is not None
    properties = section.model_json_schema()["properties"]
    for name, field in section.model_fields.items():
        default = field.get_default(call_default_factory=True)
        yield Entry(
            name,
            _kind(properties[name]),
            "absent" if default is None else repr(default),
            " ".join((field.description or "").split()),
        )


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
    return names[schema["type"]]


FILE = "schema.json"
"""Beside the presets, whose first line names it."""


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a TOML."""
    schema = JobConfig.model_json_schema()
    extends = {
        "type": "string",
        "description": "TOML or preset that this one changes, relative to this file.",
    }
    properties = schema["properties"]
    # only the command line names the file
    schema["$defs"]["Job"]["properties"].pop("config_file")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "meshwright",
        "properties": {"extends": extends, **properties},
    }
