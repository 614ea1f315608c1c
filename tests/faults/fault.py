"""One fault: where it was published, the patch of our code, and the case that must find it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

NO_THREAD = ""


@dataclass(frozen=True)
class Fault:
    """A fault of another framework, at the place where we would make it."""

    name: str
    thread: str
    """Where it was published; `NO_THREAD`: of a known class, but no thread was read."""
    file: str
    """In the package."""
    old: str
    new: str
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
    also: tuple[tuple[str, str], ...] = ()
    """Further replacements in the same file, old and new."""
    finder: Literal["prove", "export"] = "prove"
    """The command that must find it."""
