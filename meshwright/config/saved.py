"""The config that a checkpoint keeps, as a TOML that trains the same model again."""

from typing import Any

import pydantic

from meshwright.config.changes import changed, from_json
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import to_toml
from meshwright.config.provenance import with_comments
from meshwright.system.errors import ConfigError

SHARD_DEGREE = "parallelism.data_parallel_shard_degree"


def saved_config(saved: dict[str, Any]) -> str:
    """Return the TOML of `saved`, the values of every key as `to_json` wrote them.

    The degree of sharding is left open (-1), because ranks don't change the result: the job may be
    repeated on any number of them. It starts anew, whatever step the job itself resumed from. A key
    that this version doesn't have is left out, and a comment at the top names it.

    Raises:
        ConfigError: if a value isn't one that this version accepts.
    """
    values, unknown = from_json(saved), list[str]()
    while True:
        try:
            config = JobConfig.model_validate(values)
            break
        except pydantic.ValidationError as error:
            extra = [e["loc"] for e in error.errors() if e["type"] == "extra_forbidden"]
            if not extra:
                raise ConfigError("", f"the checkpoint's config isn't valid: {error}") from None
            for *parents, key in extra:
                table: Any = values
                for part in parents:
                    table = table[part]
                del table[key]
                unknown.append(".".join(map(str, (*parents, key))))
    degree = config.parallelism.data_parallel_shard_degree
    # the step that a job went back to belongs to its start, not to the run
    anew = {"load_step": -1, "rewind_to": -1}
    again = {"data_parallel_shard_degree": -1}
    config = changed(config, {"parallelism": again, "checkpoint": anew})
    toml = with_comments(to_toml(config), {SHARD_DEGREE: f"{degree} when it was saved"})
    lines = [f"# {key} is left out: this version has no such key" for key in sorted(unknown)]
    return "\n".join([*lines, toml.strip()])
