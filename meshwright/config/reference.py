"""Every key of the config with its type, default and meaning: the help and a page of docs."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from meshwright.config.fields import find_section


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
