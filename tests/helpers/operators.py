"""The operators that torch calls within a `with`."""

from collections import Counter
from collections.abc import Callable

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operators(TorchDispatchMode):
    """Counts calls by name: aten.mm, c10d.send. FSDP2's collectives are operators by gloo alone.

    Args:
        look: is given the name, types, arguments and output tensors of each.
    """

    def __init__(self, look: Callable[..., object] = lambda *_: None) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._look = look

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        self.counts[name] += 1
        self._look(name, types, args, [x for x in tree_leaves(output) if isinstance(x, Tensor)])
        return output
