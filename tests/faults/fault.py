"""One fault: where it was published, the patch of our code, and the case that must find it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Fault:
    """A fault of another framework, at the place where we would make it."""

    name: str
    thread: str
    """Where it was published; empty: of a known class, but no thread was read."""
    file: str
    """In the package."""
    patch: list[tuple[str, str]]
    """Texts that the file has once, and those in their place."""
    mesh: dict[str, int]
    """Of the shortest case of `prove` that must find it."""
    named: str
    """Part of a line of the verdict that names the quantity, or the parameter, that is wrong."""
    words: list[str] = field(default_factory=list)
    """Of the config, in addition to the debug model's."""
    num_microbatches: int = 0
    kind: Any = "fp32"
    n_layers: int = 3
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Keys of the case, as `build_case` takes them."""
    finder: Literal["prove", "export"] = "prove"
    """The command that must find it."""
