"""The model families by name, a file for each: its sizes, its layers, its names in other formats.

The layers that families share are in `models/layers.py` and `models/attention.py`.
"""

from pkgutil import resolve_name

from meshwright.models.family import Family

FAMILIES: tuple[str, ...] = (
    "meshwright.models.families.llama",
    "meshwright.models.families.qwen3",
    "meshwright.models.families.olmo2",
    "meshwright.models.families.olmo3",
    "meshwright.models.families.qwen3_moe",
    "meshwright.models.families.olmoe",
    "meshwright.models.families.mixtral",
    "meshwright.models.families.gemma2",
    "meshwright.models.families.gemma3_text",
    "meshwright.models.families.smollm3",
    "meshwright.models.families.qwen2",
    "meshwright.models.families.mistral",
    "meshwright.models.families.granite",
    "meshwright.models.families.hyperclovax",
    "meshwright.models.families.deepseek_v2",
    "meshwright.models.families.deepseek_v3",
    "meshwright.models.families.gpt_oss",
    "meshwright.models.families.qwen3_next",
    "meshwright.models.families.qwen3_5_text",
    "meshwright.models.families.olmo_hybrid",
)
"""Modules, free of torch, each with a `FAMILY` of the module's name."""

MODELS: dict[str, Family] = {
    family.name: family for family in (resolve_name(f"{module}:FAMILY") for module in FAMILIES)
}
"""Read before torch is loaded: a config must not wait seconds for its first mistake."""
