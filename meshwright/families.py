"""The registry of model families: names alone, so that the config can have a default."""

FAMILIES: tuple[str, ...] = (
    "meshwright.models.llama",
    "meshwright.models.qwen3",
    "meshwright.models.olmo2",
)
"""Modules, free of torch, each with a `FAMILY` of the module's name. `specs.MODELS` loads them. The
first stays the first: see `FIRST`."""

FIRST = FAMILIES[0].rpartition(".")[2]
"""The family of configs that name none; and of checkpoints that name none, which were saved when it
was the only one."""
