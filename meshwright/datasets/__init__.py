"""Sample i of a job, on any mesh: from files or the hub, through tokens, to batches.

This table has the datasets by name; any other name with a slash is one of the Hugging Face hub. The
keys that choose one are in `config/training.py`.
"""

from functools import partial

from meshwright.datasets.files import local_files, token_files
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


def _local(builder: str) -> DatasetSpec:
    opened, files = partial(open_local, builder), partial(local_files, builder)
    return DatasetSpec(opened, files, path="required", has_rows=True)


def _tokens(kind: str) -> DatasetSpec:
    return DatasetSpec(
        partial(open_tokens, kind), partial(token_files, kind), path="required", has_tokens=True
    )


DATASETS: dict[str, DatasetSpec] = {
    "python_stdlib": DatasetSpec(open_stdlib, stdlib_files),
    "c4": _on_hub("allenai/c4", "en"),
    "fineweb": _on_hub("HuggingFaceFW/fineweb", "default"),
    "fineweb-edu": _on_hub("HuggingFaceFW/fineweb-edu", "default"),
    "slimpajama": _on_hub("cerebras/SlimPajama-627B"),
    "json": _local("json"),
    "parquet": _local("parquet"),
    "text": _local("text"),
    "arrow": _local("arrow"),
    "megatron": _tokens("megatron"),
    "tokens": _tokens("tokens"),
}


def find_dataset(name: str) -> DatasetSpec | None:
    """Return the dataset of that name; None if it can be none."""
    if name in DATASETS or "/" not in name or "://" in name:
        return DATASETS.get(name)
    return _on_hub(name)
