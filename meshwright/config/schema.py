"""JSON Schema of the config, for editors: every key with description, default and bounds."""

from typing import Any

from meshwright.config.job_config import JobConfig

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
