"""The types in which gradients are summed over ranks, which no bound on their values can tell.

A sum of a few numbers in bf16 is off by about 2e-3. A product in bf16, added up in parts, is off by
as much, so a bound that allows the one allows the other.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # documented; gone, this would raise

from meshwright.parallelisms.shared_memory import fsdp_groups

Note = Callable[[Tensor], None]


class _Collectives(TorchDispatchMode):
    """Notes the tensors that are reduced over ranks by an operator of torch's."""

    def __init__(self, note: Note) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        namespace, _, name = func.name().partition("::")
        if "c10d" in namespace and "reduce" in name:
            for arg in args:  # a tensor or several; and options
                for tensor in arg if isinstance(arg, list) else [arg]:
                    if isinstance(tensor, Tensor):
                        self._note(tensor)
        return func(*args, **(kwargs or {}))


class _ReduceScatter:
    """FSDP2's reduce-scatter `inner`, which notes the tensors it sums. Ranks on one machine
    reduce without an operator of torch's."""

    def __init__(self, inner: Any, note: Note) -> None:
        self.allocate, self._inner, self._note = inner.allocate, inner, note

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        self._note(input_tensor)
        return self._inner(output_tensor=output_tensor, input_tensor=input_tensor, **options)


def watch_reductions(stages: Sequence[nn.Module]) -> dict[str, torch.dtype]:
    """From now on, note the narrowest type in which gradients of `stages` are summed over ranks.

    Returns:
        The types, by parameter or, where many are summed at once, by the first of FSDP2's group.
    """
    seen: dict[str, torch.dtype] = {}
    names = {weight: name for stage in stages for name, weight in stage.named_parameters()}
    for group in (group for stage in stages for group in fsdp_groups(stage)):
        sizes = {names[one.sharded_param]: one.sharded_param.numel() for one in group.fsdp_params}
        note = functools.partial(_note, sizes, seen)
        # Private names, as `share_memory` and `sum_over_tp_in_reduce_dtype` have them. If one is
        # gone, this raises.
        group._reduce_scatter_comm = _ReduceScatter(group._reduce_scatter_comm, note)
        group.post_backward = _watched(group.post_backward, note)
    return seen


def narrower(seen: Mapping[str, torch.dtype], wanted: torch.dtype) -> list[str]:
    """Return the names in `seen` whose gradients were summed in a narrower type than `wanted`, each
    with its type."""
    return [
        f"{name} in {str(dtype).removeprefix('torch.')}"
        for name, dtype in seen.items()
        if dtype.itemsize < wanted.itemsize
    ]


def _watched(post_backward: Callable[..., None], note: Note) -> Callable[..., None]:
    def watched(*unused: object) -> None:
        with _Collectives(note):
            post_backward(*unused)

    return watched


def _note(sizes: Mapping[str, int], seen: dict[str, torch.dtype], tensor: Tensor) -> None:
    """Note the type of a tensor that is reduced, under the names of the parameters of its size."""
    names = [name for name, size in sizes.items() if size == tensor.numel()]
    if not names:
        first, *others = sizes
        names = [f"{first} and {len(others)} more" if others else first]
    for name in names:
        known = seen.setdefault(name, tensor.dtype)
        seen[name] = min(known, tensor.dtype, key=lambda dtype: dtype.itemsize)
