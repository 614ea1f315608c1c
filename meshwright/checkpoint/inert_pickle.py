"""The content of a pickle, read without running any of it. Free of torch.

A pickle is a list of calls to functions it names; loading it makes the calls. Here a stand-in takes
the place of each named function, and keeps the arguments.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar


class Record:
    """A call that was not made. Each function named has a class of its own, derived from this."""

    called: ClassVar[str]
    """Its name, as `package.module.name`."""
    arguments: tuple[Any, ...]
    state: Any = None
    """The state to set on the result."""

    def __new__(cls, *arguments: Any) -> "Record":
        record = super().__new__(cls)
        record.arguments = arguments
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _InertUnpickler(pickle.Unpickler):
    def __init__(self, content: bytes, is_allowed: Callable[[str, str], bool]) -> None:
        super().__init__(io.BytesIO(content))
        self._is_allowed = is_allowed

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if not self._is_allowed(module, name):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no data")
        return type(name, (Record,), {"called": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        return pid


def read_pickle(content: bytes, is_allowed: Callable[[str, str], bool]) -> Any:
    """Dicts, lists, numbers and text as they are, all else as a `Record`, or a class of them.

    Args:
        is_allowed: whether the pickle may have a name (module, name) in it.

    Raises:
        ValueError: if it may not, or makes no sense.
    """
    try:
        return _InertUnpickler(content, is_allowed).load()
    except Exception as error:  # a damaged pickle raises any exception
        raise ValueError(str(error) or type(error).__name__) from None
