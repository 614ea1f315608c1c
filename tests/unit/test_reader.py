"""Of a checkpoint, nothing but data is read."""

import pickle
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.checkpoint.index import INDEX
from meshwright.checkpoint.reader import CheckpointWeights, SafeCheckpointReader
from meshwright.system.errors import ConfigError
from meshwright.system.files import Place
from tests.helpers.checkpoints import Trap


def test_an_object_in_the_place_of_a_tensor_is_not_unpickled(tmp_path: Path) -> None:
    """The index is plain data; it is torch's planner that unpickles what that calls an object."""
    folder, sprung = tmp_path / "saved", tmp_path / "sprung"
    dcp.save({"a": torch.arange(3), "b": Trap(sprung)}, checkpoint_id=folder, no_dist=True)
    state = {"a": torch.zeros(3, dtype=torch.long)}
    dcp.load(state, storage_reader=SafeCheckpointReader(folder), no_dist=True)
    assert state["a"].tolist() == [0, 1, 2]
    with pytest.raises(CheckpointException, match="b is an object there, no tensor"):
        dcp.load({"b": torch.tensor(0)}, storage_reader=SafeCheckpointReader(folder), no_dist=True)
    assert not sprung.exists()
    dcp.load({"b": torch.tensor(0)}, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert sprung.exists()  # so the trap works


def save(folder: Path) -> Path:
    dcp.save({"a": torch.arange(3)}, checkpoint_id=folder, no_dist=True)
    return folder / INDEX


def test_an_index_does_not_change_classes(tmp_path: Path) -> None:
    """A pickle may set attributes of a class that it names: of Path, say, what it is as text."""
    index = save(tmp_path)
    path_is_victim = b"cpathlib\nPosixPath\n(N}S'_str'\nS'/victim'\nstb0"
    index.write_bytes(b"\x80\x04" + path_is_victim + index.read_bytes()[2:])
    before = Path.__subclasses__()[0].__dict__.copy()
    try:
        with pytest.raises(ValueError, match="setstate"):
            SafeCheckpointReader(tmp_path)
        assert str(tmp_path) != "/victim"
    finally:
        for name in Path.__subclasses__()[0].__dict__.keys() - before.keys():
            delattr(Path.__subclasses__()[0], name)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "..", "sub/file"])
def test_an_index_names_files_of_its_folder_alone(name: str, tmp_path: Path) -> None:
    index = save(tmp_path / "saved")
    metadata = pickle.loads(index.read_bytes())
    for place in metadata.storage_data.values():
        (tmp_path / "outside").write_bytes((tmp_path / "saved" / place.relative_path).read_bytes())
        place.relative_path = name
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="no file of its folder"):
        SafeCheckpointReader(tmp_path / "saved")


def test_an_index_of_another_python_is_read(tmp_path: Path) -> None:
    """In Python 3.13 alone, pathlib's classes are in pathlib._local."""
    index = save(tmp_path)
    content = index.read_bytes()
    was, now = b"\x8c\x07pathlib\x94", b"\x8c\x0epathlib._local\x94"
    if now in content:
        was, now = now, was
    assert was in content
    # frames, which hold their length, are left out
    (size,) = struct.unpack("<Q", content[3:11])
    assert content[2:3] == b"\x95"
    assert len(content) == 11 + size
    index.write_bytes(content[:2] + content[11:].replace(was, now))
    state = {"a": torch.zeros(3, dtype=torch.long)}
    dcp.load(state, storage_reader=SafeCheckpointReader(tmp_path), no_dist=True)
    assert state["a"].tolist() == [0, 1, 2]


def test_a_tensor_larger_than_any_memory_is_one_error(tmp_path: Path) -> None:
    index = save(tmp_path)
    metadata = pickle.loads(index.read_bytes())
    metadata.state_dict_metadata["a"].size = torch.Size([2**58])
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigError, match="cannot be read"):
        CheckpointWeights(Place("A", tmp_path), saved_name=str).read("a")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("size", "the parts of a are not all of it"),
        ("size of chunk", "a is larger than its .* bytes"),
        ("size of chunk, an element per byte", "a is larger than its .* bytes"),
        ("size of chunk, length", "a is said to be outside of __0_0.distcp"),
        ("offset", "a is said to be outside of __0_0.distcp"),
        ("part", "a part of a is in no file"),
    ],
)
def test_forged_sizes_are_one_error(what, message: str, tmp_path: Path) -> None:
    """Memory of that size would be taken, and what is not read of it stay as it was."""
    index = save(tmp_path)
    metadata = pickle.loads(index.read_bytes())
    tensor, (place,) = metadata.state_dict_metadata["a"], metadata.storage_data.values()
    if "size" in what:
        tensor.size = torch.Size([place.length if "per byte" in what else 2**31])
    if "chunk" in what:
        tensor.chunks[0].sizes = tensor.size
    if "length" in what:
        place.length = 2**34
    if what == "offset":
        place.offset = -1
    if what == "part":
        metadata.storage_data.clear()
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=message):
        SafeCheckpointReader(tmp_path)
    with pytest.raises(ConfigError, match=f"cannot be read: {message}"):
        CheckpointWeights(Place("path", tmp_path), str)


def test_each_rank_asks_for_the_sizes_of_its_part_of_the_files(tmp_path: Path, monkeypatch) -> None:
    save(tmp_path)
    asked = []
    stat = Path.stat

    def noted(path: Path, **options: bool) -> object:
        asked.append(path.name)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", noted)
    SafeCheckpointReader(tmp_path, (0, 2))
    assert "__0_0.distcp" in asked
    asked.clear()
    SafeCheckpointReader(tmp_path, (1, 2))
    assert "__0_0.distcp" not in asked
