"""`meshwright config`: what a config comes to, and what every key means."""

from argparse import Namespace
from collections.abc import Iterator
from textwrap import fill

from meshwright.config.job_config import JobConfig, Section
from meshwright.config.loader import load_given, to_toml


def run(given: Namespace) -> None:
    """Print the config with all defaults, or with --help the documentation of every key."""
    if given.help is not None:
        print("\n".join(_documentation()))
    else:
        config, _ = load_given(given)
        print(to_toml(config), end="")


def _documentation() -> Iterator[str]:
    yield "Every key can stand in the TOML as [section] key = value, or on the command line as"
    yield "--section.key value. A flag may stand alone: --compile.enable is --compile.enable true."
    for section_name, section_field in JobConfig.model_fields.items():
        section = section_field.annotation
        assert isinstance(section, type)
        assert issubclass(section, Section)
        properties = section.model_json_schema()["properties"]
        yield f"\n{fill(' '.join((section.__doc__ or '').split()), 100)}"
        for name, field in section.model_fields.items():
            default = field.get_default(call_default_factory=True)
            kind = _kind(properties[name])
            shown = "absent" if default is None else repr(default)
            yield f"  --{section_name}.{name} {kind} (default: {shown})"
            text = " ".join((field.description or "").split())
            yield fill(text, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)


def _kind(schema: dict[str, object]) -> str:
    """The type of a key, from its JSON Schema, as a person would write it."""
    if "enum" in schema:
        choices = schema["enum"]
        assert isinstance(choices, list)
        return "|".join(map(str, choices))
    if "anyOf" in schema:
        options = schema["anyOf"]
        assert isinstance(options, list)
        return "|".join(_kind(option) for option in options if option.get("type") != "null")
    names = {
        "integer": "INT",
        "number": "FLOAT",
        "boolean": "true|false",
        "string": "TEXT",
        "object": "TABLE",
        "array": "LIST",
    }
    return names[str(schema["type"])]
