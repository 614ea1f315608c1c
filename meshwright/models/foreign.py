"""How a model's weights lie in files that others made. Free of torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from meshwright.models.args import DecoderArgs


@dataclass(frozen=True)
class ForeignTensor:
    """A parameter's name in the file, and its layout there."""

    name: str
    shape: tuple[int, ...]
    head_dim: int | None = None
    """If given, the rows of each head, which are so many, are for a rotation of (i, i + H/2); ours
    are for one of (2i, 2i + 1)."""
    copies: tuple[str, ...] = ()
    """Other names under which the files may hold it once more."""


@dataclass(frozen=True)
class Dimension:
    """One of a model's dimensions, as a file gives it."""

    key: str
    """Its name in the file."""
    value: Any


def positive(key: str, value: object) -> int:
    """Return the value of a file's key; raise `ValueError` unless it is a positive integer."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} is {value!r}, not a positive integer")
    return value


class MetaForm(Protocol):
    """A model family in the form of Meta's folders: names of tensors are ours, others its keys."""

    def read_params(self, params: Mapping[str, Any]) -> dict[str, Dimension]:
        """Read a params.json as the dimensions of our model, by our names, as far as it has them.

        Raises:
            ValueError: if our model is not that function, or a key is missing.
        """

    def same(self, name: str, ours: object, theirs: object) -> bool:
        """Return whether the dimension `name` equals the one that `read_params` gives."""

    def copy_of(self, name: str, args: DecoderArgs) -> str | None:
        """Under which other name the files may hold the parameter `name` once more."""

    def is_needless(self, name: str) -> bool:
        """Return whether a tensor that no parameter is made of may be in the files all the same."""


class TorchtitanForm(Protocol):
    """A model family in the form of torchtitan's checkpoints, which differ from ours in names."""

    PREFIXES: tuple[str, ...]
    """An optional prefix of all names."""
    OF_MODEL: tuple[str, ...]
    """The beginnings of parameters' names, after the prefix; others are not the model's."""

    def names(self, ours: str) -> Iterator[str]:
        """Its versions' names of our parameter, without prefix."""
