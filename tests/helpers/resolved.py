"""A job of a config, with every fact that the launcher would know."""

from typing import Any

from meshwright.config.job_config import JobConfig
from meshwright.config.rules import Facts, broken_rules
from meshwright.train.facts import look, look_at_files
from meshwright.train.resolve import ResolvedJob, resolve
from meshwright.train.rules import WITHOUT_DATA


def resolved(config: JobConfig, world_size: int, **known: Any) -> ResolvedJob:
    return resolve(config, look_at_files(config, look(config, world_size, **known)))


def resolved_on_rank(config: JobConfig, world_size: int) -> ResolvedJob:
    """As a rank does it, which leaves files to the first."""
    return resolve(config, look(config, world_size))


def broken(config: JobConfig, **facts: Any) -> str:
    """What the rules that need no data say of a config, as written."""
    return "\n".join(map(str, broken_rules(config, Facts(**facts), WITHOUT_DATA)))
