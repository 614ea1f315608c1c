"""Of a checkpoint, nothing but data is read."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.checkpoint.reader import PlainReader
from tests.helpers.checkpoints import Trap


def test_an_object_in_the_place_of_a_tensor_is_not_unpickled(tmp_path: Path) -> None:
    """The index is plain data; it is torch's planner that unpickles what that calls an object."""
    folder, sprung = tmp_path / "saved", tmp_path / "sprung"
    dcp.save({"a": torch.arange(3), "b": Trap(sprung)}, checkpoint_id=folder, no_dist=True)
    state = {"a": torch.zeros(3, dtype=torch.long)}
    dcp.load(state, storage_reader=PlainReader(folder), no_dist=True)
    assert state["a"].tolist() == [0, 1, 2]
    with pytest.raises(CheckpointException, match="b is an object there, no tensor"):
        dcp.load({"b": torch.tensor(0)}, storage_reader=PlainReader(folder), no_dist=True)
    assert not sprung.exists()
    dcp.load({"b": torch.tensor(0)}, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert sprung.exists()  # so the trap works
