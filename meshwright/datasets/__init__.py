"""The datasets by name."""

from functools import partial

from meshwright.datasets.sources import DatasetSpec, hub_stream, local_files, python_stdlib

DATASETS: dict[str, DatasetSpec] = {
    "python_stdlib": DatasetSpec(python_stdlib),
    "c4": DatasetSpec(partial(hub_stream, "allenai/c4", "en"), path="optional"),
    "json": DatasetSpec(partial(local_files, "json"), path="required"),
    "parquet": DatasetSpec(partial(local_files, "parquet"), path="required"),
    "text": DatasetSpec(partial(local_files, "text"), path="required"),
    "arrow": DatasetSpec(partial(local_files, "arrow"), path="required"),
}
