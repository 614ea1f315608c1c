"""Sample i of a job, on any mesh: from files or the hub, through tokens, to batches.

This table has the datasets by name; any other name with a slash is one of the Hugging Face hub. The
keys that choose one are in `config/training.py`.
"""

from functools import partial

from meshwright.datasets.files import ROW_FORMATS, local_files, token_files
from meshwright.datasets.sources import (
    DatasetSpec,
    hub_files,
    open_hub,
    open_local,
    open_stdlib,
    open_tokens,
    stdlib_files,
)


def _on_hub(repository: str, subset: str = "") -> DatasetSpec:
    return DatasetSpec(
        partial(open_hub, repository, subset),
        partial(hub_files, repository, subset),
        path="optional",
        is_large=True,
        has_rows=True,
    )


_ROWS = DatasetSpec(open_local, local_files, path="required", has_rows=True)

_TOKENS = DatasetSpec(open_tokens, token_files, path="required", has_tokens=True)

DATASETS: dict[str, DatasetSpec] = {
    "python_stdlib": DatasetSpec(open_stdlib, stdlib_files),
    "c4": _on_hub("allenai/c4", "en"),
    "fineweb": _on_hub("HuggingFaceFW/fineweb", "default"),
    "fineweb-edu": _on_hub("HuggingFaceFW/fineweb-edu", "default"),
    "slimpajama": _on_hub("cerebras/SlimPajama-627B"),
    **dict.fromkeys(ROW_FORMATS, _ROWS),
    "megatron": _TOKENS,
    "tokens": _TOKENS,
}


def find_dataset(name: str) -> DatasetSpec | None:
    """Return the dataset of that name; None if it can be none."""
    if name in DATASETS or "/" not in name or "://" in name:
        return DATASETS.get(name)
    return _on_hub(name)
