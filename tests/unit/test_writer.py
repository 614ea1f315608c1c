"""What a save copies, and what it makes the training stream wait for."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem

from meshwright.checkpoint import commit
from meshwright.checkpoint.staging import Staging
from meshwright.checkpoint.writer import CommittingWriter, StagedPlanner
from tests.helpers.checkpoints import BARE


@pytest.mark.parametrize("is_staged", [True, False])
def test_copies_in_host_memory_are_written_without_the_device(
    tmp_path, monkeypatch, is_staged: bool
) -> None:
    """With CUDA torch's loader waits for the current stream every 10 MB."""
    used = []

    class Loader(filesystem._SerialCpuLoader):
        def __init__(self, resolve, **_: object) -> None:
            used.append("that waits")
            super().__init__(resolve)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", Loader)
    state = {"model.weight": torch.arange(10.0)}
    writer = CommittingWriter(
        commit.unfinished_folder(tmp_path, 1), BARE | {"step": 1}, is_staged=is_staged
    )
    dcp.save(
        state,
        storage_writer=writer,
        planner=StagedPlanner({"model.weight": state["model.weight"].clone()}.__getitem__),
        no_dist=True,
    )
    assert commit.saved_steps(tmp_path) == [1]
    assert used == ([] if is_staged else ["that waits"])


def test_a_rank_whose_shards_are_all_empty_has_a_copy_too() -> None:
    staging = Staging()
    for sizes in ((0, 0), (4, 0), (0, 0)):
        staging.take({str(number): torch.ones(size) for number, size in enumerate(sizes)})
        staging.wait()
        assert [len(tensor) for tensor in staging.tensors.values()] == list(sizes)


def test_copies_have_the_layout_of_what_is_saved_now() -> None:
    """A state of as many bytes as the one before may be of other tensors."""
    staging, numbers = Staging(), torch.arange(32)
    for state in ({"a": numbers}, {"b": numbers.double()}, {"b": numbers.double().view(4, 8).T}):
        staging.take(state)
        staging.wait()
        ((name, copy),) = staging.tensors.items()
        assert copy.dtype == state[name].dtype
        assert torch.equal(copy, state[name])


def test_memory_that_cuda_cannot_pin_is_used_all_the_same(monkeypatch, caplog) -> None:
    """CUDA keeps an error until a kernel fails with it: the next one would have been a step's."""
    called, zeros = [], torch.zeros

    class Runtime:
        def cudaHostRegister(self, *_: int) -> int:  # noqa: N802
            called.append("register")
            return 2  # no memory

        def cudaHostUnregister(self, *_: int) -> int:  # noqa: N802
            called.append("unregister")
            return 62  # of what is not registered

    def fail(*size: int, device: object = None) -> torch.Tensor:
        if device != "cuda":
            return zeros(*size, device=device)
        called.append("kernel")
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch, "zeros", fail)
    staging = Staging()
    for size in (4, 40):  # the second takes new memory
        staging.take({"a": torch.ones(size)})
        assert torch.equal(staging.tensors["a"], torch.ones(size))
    assert called == ["register", "kernel"] * 2
    assert caplog.text.count("could not be pinned") == 2
