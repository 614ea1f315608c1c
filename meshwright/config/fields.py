"""The keys of a config, as its classes declare them."""

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from meshwright.config.job_config import JobConfig, Section

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
