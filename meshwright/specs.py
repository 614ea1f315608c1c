"""The model families by name."""

from pkgutil import resolve_name

from meshwright.families import FAMILIES
from meshwright.models.family import Family

MODELS: dict[str, Family] = {
    family.name: family for family in (resolve_name(f"{module}:FAMILY") for module in FAMILIES)
}
"""Read before torch is loaded: a config must not wait seconds for its first mistake."""
