"""Every private name of torch that planning uses, each with its failure mode if it is removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.distributed._tools.fake_collectives
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.pipelining import schedules
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.attention import flex_attention as flex
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "flop_registry",
    "storage_key",
    "tree_iter",
]


def start_fake_process_group(rank: int, world_size: int) -> None:
    """Make this process rank `rank` of `world_size`, whose collectives send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a key that tells live storages apart. Gone: AttributeError at the first operator."""
    return storage._cdata


def sequence_number() -> int:
    """Return the number that the next node of autograd gets. Gone: AttributeError at once."""
    return torch._C._autograd._get_sequence_nr()


def backward_number() -> int | None:
    """Return the number of the node whose backward runs; None outside. Gone: AttributeError."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def below_autograd() -> AbstractContextManager[object]:
    """Within, operators with a kernel for some devices aren't taken apart on others.

    Gone: AttributeError at the first norm of a plan for GPUs.
    """
    return torch._C._AutoDispatchBelowAutograd()


def group_name(argument: object) -> str | None:
    """Return the name of the process group that an operator of c10d takes; None: it isn't one.

    `unbox` gone: AttributeError at the first collective of FSDP2.
    """
    if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
        return dist.ProcessGroup.unbox(argument).group_name
    return None


@contextmanager
def resizes_seen(seen: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Call `seen` before every `UntypedStorage.resize_`, by which FSDP2 frees and allocates.

    Public, but replaced. If FSDP2 frees in another way, plans exceed the allocator's numbers, and
    tests/distributed/test_planning.py fails.
    """
    plain = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        seen(storage, num_bytes)
        return plain(storage, num_bytes)

    with mock.patch.object(torch.UntypedStorage, "resize_", resize_):
        yield


@contextmanager
def shadows_marked(mark: Callable[[bool], None]) -> Iterator[None]:
    """Call `mark(True)` and `mark(False)` around DTensor's propagation of shapes.

    It makes whole-size tensors. Method gone: AttributeError at once.
    """
    plain = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate(propagator: Any, schema: Any) -> Any:
        mark(True)
        try:
            return plain(propagator, schema)
        finally:
            mark(False)

    name = "_propagate_tensor_meta_non_cached"
    with mock.patch.object(ShardingPropagator, name, propagate):
        yield


@contextmanager
def static_pipelines() -> Iterator[None]:
    """Let pipeline schedules take the given shapes without asking the other stages.

    Stages vote on it by a message, and fake messages carry no number. torch 2.11 has no vote: its
    schedules have no `_warmup_p2p`, and nothing is replaced. Renamed later: `.item()` of a fake
    tensor raises DataDependentOutputException in the first step of a pipeline.
    """

    def warm_up(self: Any, stages: Any, has_backward: bool, p2p_done: bool) -> Any:
        mode = schedules.InferenceMode.STATIC
        for stage in stages:
            stage._inference_mode = mode
        return mode

    owner, name = schedules._PipelineSchedule, "_warmup_p2p"
    with mock.patch.object(owner, name, warm_up) if hasattr(owner, name) else nullcontext():
        yield


MASK_BLOCK = 128
"""Queries, and keys, of a block of flex attention's masks: torch's default."""


def flex_attention_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_mask: flex.BlockMask,
    scale: float,
    enable_gqa: bool,
    score_mod: object = None,
    return_aux: flex.AuxRequest | None = None,
) -> Tensor | tuple[Tensor, flex.AuxOutput]:
    """Do flex attention as one operator, as compiled code does; `score_mod`, which its kernel
    computes for each score, takes no memory and next to no time. Logarithms come with the output if
    `return_aux` asks for something.

    `flex_attention_hop` or its options changed: an error in plans with training.mask_documents.
    """
    assert enable_gqa or q.shape[1] == k.shape[1]
    options = {"PRESCALE_QK": False, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False}
    mask = block_mask.as_tuple()
    out, logsumexp, *_ = flex.flex_attention_hop(q, k, v, flex._identity, mask, scale, options)
    return out if return_aux is None else (out, flex.AuxOutput(lse=logsumexp))
