"""What the histories of two runs say that differs, and how much each can do. Free of torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from meshwright.config.changes import ABSENT, LEFT_OPEN, differences, shown
from meshwright.metrics.report.run import Row

Effect = Literal["key", "data", "code", "rounding"]
"""key: it decides about numbers. code: it may. rounding: it decides only how sums are rounded."""

OF_ROUNDING = (
    *("job", "metrics", "profiling", "sentry", "comm", "validation", "parallelism", "compile"),
    *("checkpoint", "activation_checkpoint", "experimental.custom_import"),
    *("training.local_batch_size", "training.attention_kernel", "training.deterministic"),
    *("training.enable_cpu_offload", "training.gc_freq", "training.loss_chunk_tokens"),
    *("training.token_cache_folder", "training.block_cache_gib", "training.max_bad_records"),
    *("training.dataset_path", "training.dataset_revision", "training.mix_file"),
    *("model.tokenizer_path", "training.max_epochs", "optimizer.early_step_in_backward"),
)
"""Sections, and keys, that change no number of a step but by rounding, or by a fact that is
compared by itself: the content of files."""

DECISIVE = ("checkpoint.initial_load", "checkpoint.exclude_from_loading")
"""Keys in those sections that do."""

ASIDE = (
    *("job.", "metrics.", "checkpoint.", "profiling.", "sentry.", "comm.", "validation."),
    *("lr_scheduler.", "training.steps", "training.token_cache_folder", "training.max_epochs"),
)
"""Of those, keys that change not even rounding; a schedule counts if rates differ."""

EFFECTS: Mapping[str, Effect] = {
    "tokenizer": "key",
    "data_content": "data",
    "source": "code",
    "own_code": "code",
    "versions": "code",
    "mesh": "rounding",
    "ranks": "rounding",
    "device": "rounding",
    "kernels": "rounding",
}
"""Of the parts of a start, apart from the config."""


class Fact(NamedTuple):
    """A fact with two values."""

    name: str
    a: str
    b: str
    effect: Effect

    @property
    def changes_bits(self) -> bool:
        """Whether it is more than where a run writes, how often, and when it ends."""
        return self.effect != "rounding" or not self.name.startswith(ASIDE)


def compare_facts(a: Row, b: Row, *, has_other_rates: bool) -> list[Fact]:
    """Return the facts of two starts that differ, those that decide about numbers first.

    Args:
        has_other_rates: the runs have logged different learning rates for one step; otherwise a
            run is merely longer, or its schedule differs later.
    """
    found = [
        Fact(difference.key, shown(difference.old), shown(difference.new), _effect(difference.key))
        for difference in differences(a["config"], b["config"])
        if not _is_open(difference.old, difference.new)
    ]
    late = ("training.steps", "lr_scheduler")
    if not has_other_rates:
        found = [
            fact._replace(effect="rounding") if fact.name.startswith(late) else fact
            for fact in found
        ]
    for name, effect in EFFECTS.items():
        for key, old, new in differences({name: a.get(name)}, {name: b.get(name)}):
            if old is not ABSENT and new is not ABSENT:  # a different device has other kernels
                found.append(Fact(key, shown(old), shown(new), effect))
    order = list(Effect.__args__)  # type: ignore[attr-defined]
    return sorted(found, key=lambda fact: order.index(fact.effect))


def _is_open(*values: Any) -> bool:
    """Return whether one of the values only follows from the mesh or the machine."""
    return any(isinstance(value, int | str) and value in LEFT_OPEN for value in values)


def _effect(key: str) -> Effect:
    is_below = any(key == name or key.startswith(f"{name}.") for name in OF_ROUNDING)
    return "rounding" if is_below and not key.startswith(DECISIVE) else "key"


def other_files(package_a: Path, package_b: Path) -> list[str]:
    """Return the source files in which two checkouts of the package differ."""
    both = [
        {str(path.relative_to(package)): path.read_bytes() for path in package.rglob("*.py")}
        for package in (package_a, package_b)
    ]
    names = sorted(both[0].keys() | both[1].keys())
    return [name for name in names if both[0].get(name) != both[1].get(name)]
