"""Counts the bytes of live tensors, operator by operator, and attributes each tensor to a purpose.

A purpose may become known late: a gradient is one when the optimizer meets it, an activation when
the forward that made it is over and it is still there. So the ledger notes births, sizes and
deaths, and purposes are settled when the step is over.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.commands.plan import torch_names
from meshwright.commands.plan.torch_names import FakeTensor, FakeTensorMode
from meshwright.commands.plan.trace import AGAIN, FORWARD, Moment, Scope

PURPOSES = (
    "parameters",
    "optimizer",
    "gradients",
    "activations",
    "logits and loss",
    "gathered parameters",
    "communication buffers",
    "temporary",
    "unattributed",
)
"""Of tensors. Parameters include buffers; gradients include those of gathered parameters."""

HOST = "host"
"""Purpose of tensors that aren't on the device."""

AT_START = Moment("at start", "", 0)
"""Of tensors made before the step."""


@dataclass
class Item:
    """One storage from its birth to its death."""

    purpose: str
    operator: str
    born: Moment
    num_bytes: int = 0
    """Now."""


class Event(NamedTuple):
    """A change of the bytes that live."""

    item: int
    delta: int
    place: Moment


@dataclass
class Record:
    """Everything that happened from one `begin` to the next."""

    items: list[Item] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


class Ledger(torch_names.TorchDispatchMode):
    """Within, every tensor is counted.

    Args:
        scope: knows which module and phase runs.
        seen: called with each operator, its arguments and its output.
        fake: tensors of this mode count; None: all real ones.
        has_copies: as on CPUs, an operand of a different type is converted in a temporary (torch's
            TensorIterator); GPUs convert it element by element.
    """

    supports_higher_order_operators = True
    """Flex attention is one: without it torch won't run it within this mode."""

    def __init__(
        self,
        scope: Scope,
        seen: Callable[[Any, Any, Any, Any], None],
        fake: FakeTensorMode | None,
        *,
        has_copies: bool,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen, self._has_copies = seen, has_copies
        self._scope, self._fake = scope, fake
        self._live: dict[int, int] = {}  # storage -> index in items
        self._pending: list[int] = []  # made by the forward that runs
        self._place = AT_START
        self._is_shadow = False
        self.record = Record()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """torch.compile won't run within other modes."""
        return True

    def begin(self) -> None:
        """Start a new record, with the tensors that live now as its first events."""
        old, self.record = self.record, Record()
        for new, (key, number) in enumerate(self._live.items()):
            item = old.items[number]
            item.born = AT_START
            self.record.items.append(item)
            self.record.events.append(Event(new, item.num_bytes, AT_START))
            self._live[key] = new
        self._pending.clear()

    def note(self, tensors: Iterable[Tensor], purpose: str) -> None:
        """Settle the purpose of `tensors`, for all of their life."""
        for tensor in tensors:
            self._count(tensor, purpose, "")
            key = torch_names.storage_key(_plain(tensor).untyped_storage())
            if key in self._live:
                self.record.items[self._live[key]].purpose = purpose

    def mark_shadow(self, is_shadow: bool) -> None:
        """Count no tensors until the next call. For `torch_names.shadows_marked`."""
        self._is_shadow = is_shadow

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Note the new size of a storage. For `torch_names.resizes_seen`."""
        self._set_size(torch_names.storage_key(storage), num_bytes)

    def _set_size(self, key: int, num_bytes: int) -> None:
        if key in self._live:  # others are none of ours
            item = self.record.items[self._live[key]]
            delta, item.num_bytes = num_bytes - item.num_bytes, num_bytes
            self.record.events.append(Event(self._live[key], delta, self._place))

    def _count(self, tensor: Tensor, purpose: str, operator: str) -> None:
        tensor = _plain(tensor)
        mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None
        storage = tensor.untyped_storage()
        key = torch_names.storage_key(storage)
        if tensor.device.type == "meta" or mode is not self._fake or key in self._live:
            return
        self._live[key] = len(self.record.items)
        self.record.items.append(Item(purpose, operator, self._place))
        weakref.finalize(storage, self._free, key)
        self._set_size(key, storage.nbytes())
        if self._scope.phase in (FORWARD, AGAIN):
            self._pending.append(key)

    def _free(self, key: int) -> None:
        self._set_size(key, 0)
        self._live.pop(key, None)

    def settle(self) -> None:
        """Attribute tensors that a forward made and left behind to its activations."""
        for item in (self.record.items[self._live[k]] for k in self._pending if k in self._live):
            if item.purpose in ("temporary", "communication buffers"):
                item.purpose = "activations"
        self._pending.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        namespace = getattr(func, "namespace", "")
        if self._is_shadow or namespace == "prim":  # a fake tensor is asked for its device
            return func(*args, **kwargs)
        scope = self._scope
        scope.look(inspect.currentframe())
        now = scope.moment
        if (now.phase, now.microbatch) != (self._place.phase, self._place.microbatch):
            self.settle()
        self._place = now
        name = getattr(func, "__name__", str(func))
        if namespace == "fsdp" and name.startswith("chunk_cat"):  # into what is reduced
            self.note(args[0], "gradients")
        output = func(*args, **kwargs)
        purpose = scope.purpose
        if purpose == "temporary" and namespace in ("_c10d_functional", "c10d"):
            purpose = "communication buffers"
        for leaf in torch_names.tree_iter(output):
            if isinstance(leaf, Tensor):
                self._count(leaf, purpose, name)
        if self._has_copies and name == "add_.Tensor":
            self._count_copy(*args[:2])
        self._seen(func, args, kwargs, output)
        return output

    def _count_copy(self, total: Tensor, summand: object) -> None:
        """Count the copy of `summand` that an addition makes, and frees."""
        if not isinstance(summand, Tensor) or summand.dtype == total.dtype or not summand.dim():
            return
        number, size = len(self.record.items), summand.numel() * total.element_size()
        self.record.items.append(Item(self._scope.purpose, "add_", self._place))
        self.record.events += [Event(number, size, self._place), Event(number, -size, self._place)]


def _plain(tensor: Tensor) -> Tensor:
    """Return the tensor inside of a DTensor, or of one that a collective still writes."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    elem = getattr(tensor, "elem", None)
    return elem if isinstance(elem, Tensor) and not isinstance(tensor, FakeTensor) else tensor
