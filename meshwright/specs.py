"""The model families by name."""

from pkgutil import resolve_name

from meshwright.models.family import Family

FAMILIES: tuple[str, ...] = (
    "meshwright.models.llama",
    "meshwright.models.qwen3",
    "meshwright.models.olmo2",
)
"""Modules, free of torch, each with a `FAMILY`: the table is read before torch is loaded, because a
config must not wait seconds for its first mistake."""

MODELS: dict[str, Family] = {
    family.name: family for family in (resolve_name(f"{module}:FAMILY") for module in FAMILIES)
}
