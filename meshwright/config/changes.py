"""Differences between two configs, and the effect of each on a run that resumes. No torch."""

import json
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Literal, NamedTuple

from meshwright.config.job_config import JobConfig

LONGEST_SHOWN = 100


PARTS = "training.datasets"


class Missing(Enum):
    """Stands for a value where a key is on one side alone."""

    ABSENT = "absent"


ABSENT = Missing.ABSENT


class Difference(NamedTuple):
    """A key that has two values."""

    key: str
    """Dotted; a number stands for a table in a list."""
    old: Any
    new: Any


Effect = Literal["none", "training", "model", "data"]


def _keys(effect: Effect, **sections: str) -> dict[str, Effect]:
    return {f"{name}.{key}": effect for name, keys in sections.items() for key in keys.split()}


def _sections(effect: Effect, *names: str) -> dict[str, Effect]:
    """Return the effect for every key of the sections, later keys included."""
    defaults = JobConfig()
    return {
        f"{name}.{key}": effect
        for name in names
        for key in type(getattr(defaults, name)).model_fields
    }


EFFECTS: dict[str, Effect] = {
    # rounding at most; or when something ends, is saved or is reported, and where to
    **_sections(
        *("none", "job", "parallelism", "activation_checkpoint", "compile"),
        *("validation", "metrics", "profiling", "comm", "experimental"),
    ),
    **_keys(
        "none",
        bad_steps="budget",
        float8="emulate",
        training="max_epochs max_bad_records token_cache_folder local_batch_size "
        "loss_chunk_tokens enable_cpu_offload gc_freq deterministic attention_kernel",
        optimizer="early_step_in_backward",
        checkpoint="enable folder interval keep_latest_k keep_every_n_steps keep_best load_step "
        "async_mode on_save_failure initial_load_path initial_load_in_hf load_only "
        "enable_first_step_checkpoint last_save_model_only last_save_in_hf export_dtype",
    ),
    # the run continues, but differently; the learning rate is a function of training.steps, too
    **_keys(
        "training",
        model="frozen",
        bad_steps="policy spike_std spike_window",
        training="mask_documents global_batch_size max_norm steps dtype mixed_precision_param "
        "fp32_modules mixed_precision_reduce",
        optimizer="name lr beta1 beta2 eps weight_decay decay_norm_and_bias groups",
        float8="enable recipe_name filter_fqns",
        lr_scheduler="warmup_steps total_steps decay_ratio decay_type min_lr_factor",
        checkpoint="exclude_from_loading",
    ),
    f"{PARTS}.*.weight": "training",  # the place in each part of a mixture is unchanged
    # only the resolved dimensions count, which a checkpoint has beside its config
    **_keys("model", model="name flavor args"),
    # likewise the identity and the content of the data: a place in it means something in the same
    # samples in the same order
    **_keys(
        "data",
        model="tokenizer_path chat_template_path",
        training="datasets dataset dataset_path dataset_subset dataset_revision dataset_split "
        "dataset_column dataset_format dataset_mode shuffle_window stream_shards seq_len seed",
    ),
}
"""The effect of a change of each key on a run that resumes."""


def effect_of(key: str) -> Effect | None:
    """Return the effect of a key, or of one inside it; None: there is no such key."""
    in_lists = re.sub(r"\.\d+(?=\.|$)", ".*", key)
    return EFFECTS.get(in_lists) or EFFECTS.get(".".join(key.split(".")[:2]))


def to_json(config: JobConfig) -> dict[str, Any]:
    """Return the config as a checkpoint keeps it: JSON has no word for infinity, so that is a
    string."""
    text = json.dumps(config.model_dump(mode="json"))
    return dict(json.loads(text, parse_constant=str))


def shown(value: object) -> str:
    """Return a value as a person would write it, cut where it is long."""
    if value is ABSENT or value is None:
        return "absent"
    text = "inf" if value == "Infinity" else repr(value)
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
    changed only if it has not its default.

    Args:
        defaults: by dotted key.
    """
    for difference in differences(saved, here):
        key, old, new = difference
        if old is not ABSENT:
            yield difference
            continue
        for inner in differences({key: defaults.get(key, ABSENT)}, {key: new}):
            yield inner._replace(old=ABSENT)


def config_defaults() -> dict[str, Any]:
    """Return the meaning of every section and key that a saved config lacks, by dotted key."""
    sections = to_json(JobConfig())
    keys = {
        f"{name}.{key}": value for name, table in sections.items() for key, value in table.items()
    }
    return sections | keys
