"""Changes a config, and compares two: which keys differ. Free of torch."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import takewhile
from typing import Any, NamedTuple

from pydantic import ValidationError

from meshwright.config.explain import explain_mistake
from meshwright.config.job_config import JobConfig, Update
from meshwright.system.errors import CombinedConfigError, as_toml

LONGEST_SHOWN = 100

LEFT_OPEN = (-1, "auto")
"""Values that stand for one that follows from the mesh or the machine."""

ABSENT = object()
"""Stands for a value where a key is on one side only."""


def changed(config: JobConfig, update: Update) -> JobConfig:
    """Return `config` with the values of `update`, by section and key.

    Raises:
        ConfigError: for each key that doesn't exist, and each value that breaks its own rule;
            combinations of keys are judged when a job is resolved.
    """
    sections: dict[str, Any] = {name: getattr(config, name) for name in config.model_fields_set}
    for name, keys in update.items():
        section = getattr(config, name, None)
        own = () if section is None else section.model_fields_set
        sections[name] = {key: getattr(section, key) for key in own} | dict(keys)
    try:
        return JobConfig.model_validate(sections)
    except ValidationError as error:
        mistakes = [one for mistake in error.errors() for one in explain_mistake(mistake)]
        raise CombinedConfigError(mistakes) from None


def with_values(
    config: Mapping[str, Any], other: Mapping[str, Any], keys: Collection[str]
) -> dict[str, Any]:
    """Return a config, as JSON, that has the values of `other` at dotted `keys`; a key below a list
    of tables brings the list."""
    result: dict[str, Any] = json.loads(json.dumps(config))
    for key in keys:
        *tables, name = takewhile(lambda part: not part.isdecimal(), key.split("."))
        target, source = result, other
        for table in tables:
            target, source = target.setdefault(table, {}), source.get(table, {})
        if name in source:
            target[name] = source[name]
        else:
            target.pop(name, None)
    return result


class Difference(NamedTuple):
    """A key that has two values."""

    key: str
    """Dotted; a number stands for a table in a list."""
    old: Any
    new: Any


def to_json(config: JobConfig) -> dict[str, Any]:
    """Return the config as a checkpoint keeps it: JSON has no word for infinity, so that is a
    string."""
    text = json.dumps(config.model_dump(mode="json"))
    return dict(json.loads(text, parse_constant=str))


def from_json(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that `to_json` wrote, by section and key."""
    return dict(json.loads(re.sub(r'"(-?Infinity|NaN)"', r"\1", json.dumps(saved))))


def shown(value: object) -> str:
    """Return a value as a person would write it, cut where it is long."""
    if value is ABSENT or value is None:
        return "absent"
    text = "inf" if value == "Infinity" else as_toml(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> Iterator[Difference]:
    """Yield every key whose values differ, in the order of `new`; goes into tables, and into lists
    of tables."""
    for name in [*new, *(name for name in old if name not in new)]:
        key, left, right = f"{prefix}{name}", old.get(name, ABSENT), new.get(name, ABSENT)
        left_table, right_table = _as_table(left), _as_table(right)
        if left_table is not None and right_table is not None:
            yield from differences(left_table, right_table, f"{key}.")
        elif left != right:
            yield Difference(key, left, right)


def _as_table(value: object) -> Mapping[str, Any] | None:
    if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        return {str(index): item for index, item in enumerate(value)}
    return value if isinstance(value, Mapping) else None


def changes(
    saved: Mapping[str, Any], here: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Iterator[Difference]:
    """Yield the same, where `saved` may be of an older version: a key that it lacks counts as
    changed only if it hasn't its default.

    Args:
        defaults: by dotted key.
    """
    for difference in differences(saved, here):
        key, old, new = difference
        if old is not ABSENT:
            yield difference
            continue
        for inner in differences({key: defaults.get(key)}, {key: new}):
            yield inner._replace(old=ABSENT)


def config_defaults() -> dict[str, Any]:
    """Return the meaning of every section and key that a saved config lacks, by dotted key."""
    sections = to_json(JobConfig())
    keys = {
        f"{name}.{key}": value for name, table in sections.items() for key, value in table.items()
    }
    return sections | keys
