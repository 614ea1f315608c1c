"""FSDP2 through shared memory, beside FSDP2 through gloo."""

import mmap
from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from meshwright.parallelisms.shared_memory import Slots, open_slots
from tests.helpers.job import DEEP, Job, mesh
from tests.helpers.operators import Operators
from tests.helpers.tiny import TINY

RANKS = 2
DIMS = mesh(dp_shard=RANKS)


def _train(**options: object) -> tuple[int, list[torch.Tensor]]:
    """Count FSDP2's collectives by gloo in some steps; return figures and weights after them."""
    job = Job(DIMS, 0, 2, param_dtype=torch.bfloat16, **options)
    with Operators() as counter:
        results = [
            job.take_step(step, max_norm=0.5, reduce_every_microbatch=True) for step in (1, 2)
        ]
    calls = counter.counts["c10d._allgather_base_"] + counter.counts["c10d._reduce_scatter_base_"]
    figures = [figure for result in results for figure in (result.loss, result.grad_norm)]
    return calls, [*figures, *job.weights().values()]


@pytest.mark.ranks(RANKS)
def test_two_ranks_share_memory_and_give_the_bits_of_gloo() -> None:
    calls, tensors = _train()
    calls_of_gloo, tensors_of_gloo = _train(fsdp_cpu_backend="gloo")
    assert calls == 0 < calls_of_gloo
    assert all(map(torch.equal, tensors, tensors_of_gloo))
    _, tensors_ahead = _train(prefetch_layers=3, reshard_after_forward="always")
    assert all(map(torch.equal, tensors_ahead, tensors_of_gloo))
    modules = TINY.table.linear_layers()  # each a group of its own
    assert _train(prefetch_layers=3, fp32_modules=modules.keys())[0] == 0
    forbidden = patch.object(mmap, "mmap", side_effect=OSError)
    with forbidden if dist.get_rank() == 1 else nullcontext():
        assert _train()[0] == calls_of_gloo


@pytest.mark.ranks(RANKS)
def test_a_slot_has_room_for_a_group_and_not_for_the_model() -> None:
    opener = "meshwright.parallelisms.shared_memory.open_slots"
    with patch(opener, return_value=None) as opened:
        for args in (TINY, DEEP):
            Job(DIMS, args=args)
    of_two_layers, of_five = (call.args[2] for call in opened.call_args_list)
    assert of_two_layers == of_five


@pytest.mark.ranks(RANKS)
def test_a_slot_is_taken_again_once_no_rank_uses_it() -> None:
    """Rank 1 keeps the first longer than rank 0."""
    memory = np.zeros((4, mmap.PAGESIZE), np.uint8)
    slots = Slots(memory, dist.group.WORLD)

    def take() -> tuple[torch.Tensor, int]:
        tensor = slots.take(64)
        slots.meet(tensor)
        return tensor, (tensor.data_ptr() - memory.ctypes.data) // mmap.PAGESIZE

    kept, first = take()
    if dist.get_rank() == 0:
        del kept
    view, second = take()
    view = view.view(8, 8)[2:]  # its memory is still in use
    kept = None
    third, fourth, fifth = take()[1], take()[1], take()[1]
    del view
    taken = [first, second, third, fourth, fifth, take()[1], take()[1]]
    assert taken == [0, 1, 2, 0, 2, 0, 1]


@pytest.mark.ranks(RANKS)
def test_the_first_rank_decides_where_slots_are() -> None:
    """Ranks differ in the size that they want, and write to the second slot."""
    slots = open_slots(dist.group.WORLD, 3, mmap.PAGESIZE * (RANKS - dist.get_rank()))
    assert slots is not None
    kept, tensor = slots.take(1), slots.take(RANKS)
    tensor[dist.get_rank()] = 7 + dist.get_rank()
    slots.meet(tensor)
    size = RANKS * mmap.PAGESIZE
    with pytest.raises(RuntimeError, match=f"{size + 1} bytes do not fit in 3 slots of {size}"):
        slots.take(size + len(kept))
    assert tensor.tolist() == [7, 8]


@pytest.mark.ranks(RANKS)
def test_ranks_in_different_collectives_raise() -> None:
    slots = Slots(np.zeros((4, mmap.PAGESIZE), np.uint8), dist.group.WORLD)
    with pytest.raises(RuntimeError, match=r"\[64, 128\] bytes"):
        slots.meet(slots.take(64 * (1 + dist.get_rank())))
