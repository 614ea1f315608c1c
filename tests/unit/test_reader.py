"""Checkpoints' files: forged ones are one error when they are read; what a save copies, and makes
the training stream wait for."""

import io
import pickle
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem

from meshwright.checkpoint import listing
from meshwright.checkpoint.index import INDEX
from meshwright.checkpoint.reader import CheckpointWeights
from meshwright.checkpoint.staging import Staging
from meshwright.checkpoint.writer import CommittingWriter, StagedPlanner
from meshwright.system.errors import ConfigError
from meshwright.system.files import NamedPath
from tests.helpers.checkpoints import BARE, Trap


def save(folder: Path, **others: object) -> Path:
    dcp.save({"a": torch.arange(3), **others}, checkpoint_id=folder, no_dist=True)
    return folder / INDEX


def read(folder: Path, name: str = "a") -> torch.Tensor:
    return CheckpointWeights(NamedPath("A", folder), saved_name=str).read(name)


def refusal(folder: Path, name: str = "a") -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, name)
    return str(caught.value)


def test_an_object_in_the_place_of_a_tensor_is_not_unpickled(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    index = save(tmp_path / "saved", b=Trap(sprung))
    assert read(index.parent).tolist() == [0, 1, 2]
    assert "the checkpoint has no b" in refusal(index.parent, "b")
    metadata = pickle.loads(index.read_bytes())  # and if the index calls it a tensor
    metadata.state_dict_metadata["b"] = tensor = metadata.state_dict_metadata["a"]
    (place,) = [place for key, place in metadata.storage_data.items() if key.fqn == "b"]
    metadata.storage_data = {
        type(key)(name, tensor.chunks[0].offsets): place
        for key in metadata.storage_data
        for name in ("a", "b")
    }
    index.write_bytes(pickle.dumps(metadata))
    assert "cannot be read: " in refusal(index.parent, "b")
    assert not sprung.exists()
    content = (index.parent / place.relative_path).read_bytes()[place.offset :]
    torch.load(io.BytesIO(content[: place.length]), weights_only=False)
    assert sprung.exists()  # so the trap works


def test_an_index_does_not_change_classes(tmp_path: Path) -> None:
    """A pickle may set attributes of a class that it names: of Path, say, what it is as text."""
    index = save(tmp_path)
    path_is_victim = b"cpathlib\nPosixPath\n(N}S'_str'\nS'/victim'\nstb0"
    index.write_bytes(b"\x80\x04" + path_is_victim + index.read_bytes()[2:])
    before = Path.__subclasses__()[0].__dict__.copy()
    try:
        assert ".metadata cannot be read" in refusal(tmp_path)
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
    assert "no file of its folder" in refusal(tmp_path / "saved")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("size", "the parts of a are not all of it"),
        ("size of chunk", "a is larger than its "),
        ("size of chunk, an element per byte", "a is larger than its "),
        ("size of chunk, small", "has shape (3,), not (2,)"),
        ("size of chunk, length", "cannot be read"),
        ("offset", "a is larger than its "),
        ("part", "a part of a is in no file"),
    ],
)
def test_forged_sizes_are_one_error(what, message: str, tmp_path: Path) -> None:
    """Memory of that size would be taken, and what is not read of it stay as it was."""
    index = save(tmp_path)
    metadata = pickle.loads(index.read_bytes())
    tensor, (place,) = metadata.state_dict_metadata["a"], metadata.storage_data.values()
    if "size" in what:
        tensor.size = torch.Size([place.length if "per byte" in what else 2**58])
    if "small" in what:
        tensor.size = torch.Size([2])
    if "chunk" in what:
        tensor.chunks[0].sizes = tensor.size
    if "length" in what:
        place.length = 2**62
    if what == "offset":
        place.offset = -1
    if what == "part":
        metadata.storage_data.clear()
    index.write_bytes(pickle.dumps(metadata))
    assert message in refusal(tmp_path)


@pytest.mark.parametrize("kind", [FileNotFoundError, PermissionError])
def test_a_file_that_is_gone_does_not_come_back(kind, tmp_path: Path, monkeypatch) -> None:
    """As of a folder of torchtitan's that was copied in part: no scheduler need try again."""
    save(tmp_path)
    monkeypatch.setattr(torch, "load", Mock(side_effect=kind(2, "No such file")))
    assert "__0_0.distcp cannot be read: No such file\n  fix: copy" in refusal(tmp_path)


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
        listing.unfinished_folder(tmp_path, 1), BARE | {"step": 1}, is_staged=is_staged
    )
    dcp.save(
        state,
        storage_writer=writer,
        planner=StagedPlanner({"model.weight": state["model.weight"].clone()}.__getitem__),
        no_dist=True,
    )
    assert listing.saved_steps(tmp_path) == [1]
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
