"""Saving and loading on ranks that agree, also when one of them cannot write."""

import errno
import logging
import os
import pickle
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright.checkpoint import commit, lease, listing
from meshwright.checkpoint.manager import CheckpointManager
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.checkpoint.retention import apply_retention
from meshwright.checkpoint.staging import Staging
from meshwright.checkpoint.store import Saved
from meshwright.config.job_config import Checkpoint
from meshwright.system.errors import ConfigError, SaveError, StorageError
from tests.helpers.checkpoints import BARE, Trap, republish
from tests.helpers.files import contents, failing_reads, flip_bit, no_room, tree
from tests.helpers.leases import FAR, rewrite

ROWS = 131  # uneven shards, which torch.save writes before their file is closed


class State:
    """A sharded weight, a scalar that all ranks hold, and one that only this rank has."""

    def __init__(self, value: float) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        whole = torch.arange(ROWS * 80.0).view(ROWS, 80) + value
        self.weight = distribute_tensor(whole, mesh, [Shard(0)])
        self.step = torch.tensor(value)
        self.rng = torch.full((100,), dist.get_rank(), dtype=torch.uint8)

    def state_dict(self) -> dict[str, torch.Tensor]:
        rng = f"rng.cpu.rank_{dist.get_rank()}"
        return {"model.weight": self.weight, "optimizer.step": self.step, rng: self.rng}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        assert state["model.weight"] is self.weight

    def change(self, value: float) -> None:
        """As a step does."""
        self.weight.add_(value)
        self.step.fill_(value)


@pytest.fixture
def folder(tmp_path) -> str:
    """Two that are to be made."""
    return str(tmp_path / "dump" / "checkpoint")


def make(folder: str, **options: object) -> CheckpointManager:
    return CheckpointManager(Path(folder), Checkpoint(enable=True, **options))


def save(manager: CheckpointManager, step: int, is_last: bool = False) -> None:
    manager.save(step, State(step), BARE | {"step": step}, is_last)


def select(manager: CheckpointManager, step: int) -> Saved:
    """The checkpoint that is chosen, which has to be that of `step`; held no longer."""
    with manager.open() as found:
        assert found is not None
        assert found.manifest["step"] == step
        return found


def settle(manager: CheckpointManager) -> None:
    """Wait for what is deleted beside training."""
    manager._retention.wait()
    dist.barrier()


@contextmanager
def logged() -> Iterator[list[str]]:
    """What this rank logs meanwhile."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("meshwright")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


@pytest.mark.ranks(2)
def test_all_ranks_pass_over_what_any_finds_damaged(folder: str) -> None:
    manager = make(folder)
    for step in (5, 10, 15, 20):
        save(manager, step)
    checkpoint = Path(folder)
    if dist.get_rank() == 0:
        flip_bit(checkpoint / "step-20" / "__1_0.distcp", 5000)
        flip_bit(checkpoint / "step-15" / ".metadata", 100)
        with open(checkpoint / "step-10" / "__0_0.distcp", "ab") as file:
            file.write(b"more")
    dist.barrier()
    with logged() as messages:
        found = select(manager, 5)
    if dist.get_rank() == 0:
        assert [message.split(",")[0] for message in messages] == [
            f"skipped {folder}/step-{step}" for step in (20, 15, 10)
        ]
        assert "the content of __1_0.distcp has changed" in messages[0]
        assert "the content of .metadata has changed" in messages[1]
        assert "__0_0.distcp has " in messages[2]
    select(make(folder, verify="sizes"), 20)
    for step in (10, 15, 20):
        with pytest.raises(ConfigError, match=f"step-{step}': is damaged"):
            select(make(folder, load_step=step), step)
    state = State(0)
    manager.load(state, found)
    assert torch.equal(state.weight.full_tensor(), State(5).weight.full_tensor())
    assert state.step == 5
    dist.barrier()
    assert listing.saved_steps(checkpoint) == [5]  # the others are set aside


@pytest.mark.ranks(1)
def test_a_job_of_more_saves_than_its_names_have_digits_for(folder: str) -> None:
    manager = make(folder)
    manager._saves = 0xFFFE
    for step in (1, 2, 3):
        save(manager, step)
    assert listing.saved_steps(Path(folder)) == [1, 2, 3]


@pytest.mark.ranks(2)
def test_a_later_checkpoint_that_cannot_be_set_aside_again_is_an_error_on_every_rank(
    folder: str,
) -> None:
    """It was done so often that the job begins in the past for ever, or the disk refuses."""
    manager = make(folder)
    for step in (5, 10):
        save(manager, step)
    dist.barrier()
    back = make(folder, load_step=5)
    found = select(back, 5)
    refusing = patch.object(Path, "rename", side_effect=OSError(30, "Read-only file system"))
    with refusing, pytest.raises(ConfigError, match="after step 5 cannot be set aside: .*Read-on"):
        back.load(State(0), found)
    (Path(folder) / "step-10.aside2").mkdir(exist_ok=True)
    dist.barrier()
    with pytest.raises(ConfigError, match="step 10 has been set aside 3 times"):
        back.load(State(0), found)
    dist.barrier()
    assert listing.saved_steps(Path(folder)) == [5, 10]


@pytest.mark.ranks(2)
def test_a_read_error_of_one_rank_discards_no_checkpoint(folder: str) -> None:
    """A file of the newest checkpoint cannot be read by one rank: once, or for good."""
    manager = make(folder)
    for step in (5, 10):
        save(manager, step)
    file = "__0_0.distcp" if dist.get_rank() == 1 else "none"
    before = tree(Path(folder))
    dist.barrier()
    with (
        failing_reads(file, errno.ESTALE, 99),
        logged() as messages,
        pytest.raises(StorageError, match="rank 1: .*/__0_0.distcp cannot be read: St"),
    ):
        select(manager, 10)
    assert len([line for line in messages if "trying again" in line]) == 2 * (file != "none")
    with failing_reads(file, errno.ESTALE, 1):
        found = select(manager, 10)
    file = file.replace("__0_", "__1_")  # another part of the files, and the rank's own tensors
    with failing_reads(file, errno.EIO, 99), pytest.raises(StorageError, match="rank 1: .*step-10"):
        manager.load(State(0), found)
    with failing_reads(".metadata", errno.EIO, 1):
        manager.load(state := State(0), found)
    assert state.step == 10
    assert tree(Path(folder)) == before


@pytest.mark.ranks(2)
def test_no_retention_deletes_a_checkpoint_between_its_choice_and_its_load(folder: str) -> None:
    manager, path, is_first = make(folder), Path(folder), dist.get_rank() == 0
    for step in (5, 10):
        save(manager, step)
    settle(manager)
    resumed = make(folder, load_step=5, load_only=True)
    with resumed.open() as found:
        assert found is not None
        if is_first:
            assert apply_retention(path, 1) == [5]
        dist.barrier()
        resumed.load(state := State(0), found)
    assert state.step == 5
    dist.barrier()
    if is_first:
        assert apply_retention(path, 1) == []
    dist.barrier()
    assert listing.saved_steps(path) == [10]


@pytest.mark.ranks(2)
def test_a_checkpoint_that_one_rank_alone_does_not_see_is_not_passed_over(folder: str) -> None:
    """A network file system shows a new file late: an older one would be a step back."""
    manager = make(folder)
    for step in (5, 10):
        save(manager, step)
    file = MANIFEST if dist.get_rank() == 1 else "none"
    dist.barrier()
    with (
        failing_reads(file, errno.ENOENT, 99),
        pytest.raises(StorageError, match=r"rank 1: .*/step-10: .*json cannot .*\n  fix: run"),
    ):
        select(manager, 10)


@pytest.mark.ranks(2)
def test_an_index_that_names_code_is_refused_and_not_run(folder: str) -> None:
    path, manager = Path(folder), make(folder)
    for step, what in ((5, "it is no index of a checkpoint"), (10, "saved with another")):
        save(manager, step)
        settle(manager)  # it would tidy what `republish` makes
        if dist.get_rank() == 0:
            index = listing.step_folder(path, step) / ".metadata"
            metadata: object = Trap(path / "sprung")
            if step == 10:
                metadata = pickle.loads(index.read_bytes())
                metadata.state_dict_metadata["optimizer.step"] = BytesStorageMetadata()
            index.write_bytes(pickle.dumps(metadata))
            republish(path, step)
        dist.barrier()
        found = select(manager, step)  # every checksum is right
        with pytest.raises(ConfigError, match=what):
            manager.load(State(0), found)
    assert not (path / "sprung").exists()


@pytest.mark.parametrize("mode", ["disabled", "thread"])
@pytest.mark.ranks(2)
def test_a_save_that_fails_on_one_rank_fails_on_all(folder: str, mode: str) -> None:
    rank, path = dist.get_rank(), Path(folder)

    def save_without_room(manager: CheckpointManager, is_last: bool = False) -> None:
        with no_room(1000) if rank == 1 else nullcontext():
            save(manager, 15, is_last)
            manager._wait()

    manager = make(folder, keep_latest_k=2, async_mode=mode)
    for step in (5, 10):
        save(manager, step)
    for attempt in range(2):
        manager._wait()
        with logged() as messages:
            save_without_room(manager)
        (said,) = (line for line in messages if "could not be written" in line)
        assert "step 15 could not be written: rank 1: [Errno 27] File too large" in said, attempt
        assert "; the newest that is safe: step 10; training continues" in said
        settle(manager)
        assert sorted(p.name for p in path.iterdir()) == ["step-10", "step-5"]
    with pytest.raises(SaveError, match="safe: step 10; it was the last of the job"):
        save_without_room(manager, is_last=True)
    with pytest.raises(SaveError, match='no checkpoint .*on_save_failure = "stop"'):
        save_without_room(make(folder, on_save_failure="stop", async_mode=mode))
    save(manager, 15)
    manager._wait()
    settle(manager)
    assert listing.saved_steps(path) == [10, 15]


@pytest.mark.ranks(2)
def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    dist.barrier()
    with logged() as messages:
        save(make(f"{tmp_path}/file/checkpoint"), 5)
    assert "rank 0: [Errno 17] File exists" in messages[0]
    assert tree(tmp_path) == {"file"}


@pytest.mark.ranks(2)
def test_a_folder_that_is_gone_is_made_again_and_said(folder: str) -> None:
    """A file system that was unmounted: the next checkpoints are below it, on another one."""
    manager, path = make(folder), Path(folder)
    save(manager, 5)
    settle(manager)
    if dist.get_rank() == 0:
        path.rename(path.with_name("elsewhere"))
    dist.barrier()
    with logged() as messages:
        save(manager, 10)
    assert any("is gone, and is made again" in said for said in messages) == (dist.get_rank() == 0)
    settle(manager)
    assert listing.saved_steps(path) == [10]


@pytest.mark.ranks(2)
def test_what_fails_at_the_end_of_a_save_leaves_nothing(folder: str) -> None:
    manager = make(folder)
    save(manager, 5)
    dist.barrier()
    for call in ("os.fsync", "pathlib.Path.rename"):
        with logged() as messages, patch(call, side_effect=OSError(5, "Input/output error")):
            save(manager, 10)
        assert "rank 0: [Errno 5] Input/output error" in messages[0]
        settle(manager)
        assert [p.name for p in Path(folder).iterdir()] == ["step-5"]
    with (
        patch.object(commit, "publish", side_effect=KeyError("a mistake of ours")),
        pytest.raises(RuntimeError, match="saving step 10"),
    ):
        save(manager, 10)


def _overlap(folder: str, mode: str) -> None:
    """A save, then steps at once, as often as there are checkpoints."""
    state = State(0)
    slow = patch("os.fsync", side_effect=lambda _: time.sleep(0.1))
    with slow, make(f"{folder}/{mode}", async_mode=mode, keep_latest_k=2) as manager:
        manager.prepare_saves(state)
        for step in range(1, 5):
            state.change(step)
            manager.save(step, state, BARE | {"step": step}, is_last=step == 4)
            if mode != "disabled":
                assert not Path(folder, mode, f"step-{step}").exists()
                for _ in range(3):
                    state.change(100.0)
                    manager.poll()
                for _ in range(3):
                    state.change(-100.0)


def test_a_save_in_the_background_is_the_same_to_the_bit(on_ranks, tmp_path) -> None:
    for mode in ("disabled", "thread"):
        on_ranks(2, _overlap, str(tmp_path), mode)
    want = contents(tmp_path / "disabled")
    assert {path.split("/")[0] for path in want} == {"step-3", "step-4"}
    assert len(want) == 2 * 4
    got = contents(tmp_path / "thread")
    assert got.keys() == want.keys()
    assert [name for name in want if got[name] != want[name]] == []


@pytest.mark.ranks(2)
def test_the_memory_for_saves_is_taken_beforehand_and_only_where_there_are_saves(
    folder: str,
) -> None:
    state = State(1)
    with make(folder, async_mode="thread") as manager:
        manager.prepare_saves(state)
        manager._wait()
        with patch.object(Staging, "_allocate", side_effect=AssertionError("allocated anew")):
            manager.save(5, state, BARE | {"step": 5}, is_last=True)
    assert make(folder, async_mode="thread", load_only=True)._staging is None


@pytest.mark.ranks(2)
def test_what_fails_in_the_background_is_said_at_the_next_step_or_the_end(folder: str) -> None:
    make_async = partial(make, folder, async_mode="thread")
    publish, error, is_asked_again = commit.publish, OSError(5, "I/O error"), threading.Event()
    with (
        patch.object(commit, "publish", side_effect=error),
        make_async(on_save_failure="stop") as manager,
    ):
        save(manager, 10)
        futures.wait([manager._in_flight])  # as long as a step takes, without asking
        with pytest.raises(SaveError, match="stop"):
            manager.poll()
        manager.poll()
        save(manager, 15, is_last=True)
        with pytest.raises(SaveError, match="the last of the job"):
            manager.__exit__(None)

    def fail_once(unfinished: Path, *rest: object) -> None:
        if unfinished.name.startswith("step-20"):
            is_asked_again.wait()
            raise error
        publish(unfinished, *rest)

    # a save that is asked for before another has failed: what is left of that is removed, not this
    with patch.object(commit, "publish", fail_once), make_async() as manager:
        save(manager, 20)
        threading.Timer(0.2, is_asked_again.set).start()
        save(manager, 25)
        assert manager._retention.nonce

    # which may fail because another job has the folder by now, and is saving
    theirs = listing.unfinished_folder(Path(folder), 26)
    theirs.mkdir(exist_ok=True)
    with patch.object(commit, "publish", side_effect=error), make_async() as manager:
        save(manager, 28)
    assert theirs.exists()

    manager = make_async().__enter__()
    save(manager, 30)
    manager.__exit__(KeyError)  # in training
    dist.barrier()
    assert listing.saved_steps(Path(folder)) == [25, 30]


@contextmanager
def recorded(log: Path) -> Iterator[None]:
    """A line in `log`, which ranks share, for each that is flushed (and how long it then is) or
    renamed, and for each folder that is made."""
    fsync, rename, mkdir = os.fsync, Path.rename, Path.mkdir

    def note(*words: object) -> None:
        with open(log, "a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    def flush(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)
        note("flush", path, *[path.stat().st_size] * path.is_file())

    def move(path: Path, target: Path) -> Path:
        note("rename", path, target)
        return rename(path, target)

    def make_folder(path: Path, *rest: object, **options: object) -> None:
        mkdir(path, *rest, **options)
        note("make", path)

    with (
        patch("os.fsync", flush),
        patch.object(Path, "rename", move),
        patch.object(Path, "mkdir", make_folder),
    ):
        yield


@pytest.mark.ranks(2)
def test_everything_is_on_the_disk_before_it_gets_its_name(folder: str, tmp_path: Path) -> None:
    manager, final, log = make(folder), Path(folder) / "step-5", tmp_path / "log"
    with recorded(log):
        save(manager, 5)
    dist.barrier()
    events = log.read_text().splitlines()

    def when(*words: object) -> int:
        """The last time."""
        return len(events) - events[::-1].index(" ".join(map(str, words)))

    unfinished = next(event.split()[1] for event in events if event.endswith(".unfinished"))
    published, folder_flushed = when("rename", unfinished, final), when("flush", unfinished)
    names = sorted(path.name for path in final.iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "checkpoint.json"]
    for name in names:
        written_as = f"{unfinished}/{name}{'.tmp' * (name == '.metadata')}"
        assert when("flush", written_as, (final / name).stat().st_size) < folder_flushed, name
    named = when("rename", f"{unfinished}/.metadata.tmp", f"{unfinished}/.metadata")
    assert named < folder_flushed < published < when("flush", folder)
    for made in (Path(folder), Path(folder).parent):
        assert when("make", made) < when("flush", made.parent)


@pytest.mark.ranks(2)
def test_a_job_whose_folder_was_taken_over_ends(folder: str) -> None:
    manager, path = make(folder), Path(folder)
    manager.take_lease()
    save(manager, 5)
    if dist.get_rank() == 0:
        rewrite(path / "job.lock", **FAR, token="f" * 32)
    dist.barrier()
    with pytest.raises(SaveError, match="on far.*This job ends: the other continues"):
        save(manager, 10)
    manager.release()
    dist.barrier()
    assert listing.saved_steps(path) == [5]
    assert (path / "job.lock").exists()
    # a job on that machine runs, as far as anybody can see: all ranks are told so
    for options in ({}, {"load_only": True}):  # its records would mix with the other's
        if dist.get_rank() == 0:
            beat = threading.Timer(0.5, os.utime, [path / "job.lock"])
            beat.start()
        with patch.object(lease, "GRACE_S", 1.0), pytest.raises(ConfigError, match="on far"):
            make(folder, **options).take_lease()


@pytest.mark.ranks(2)
def test_a_job_that_only_reads_removes_nothing_of_a_killed_one(folder: str) -> None:
    left = listing.unfinished_folder(Path(folder), 5)
    left.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    for only_reads in (True, False):
        with make(folder, load_only=only_reads) as manager:
            manager.take_lease()
        assert left.exists() == only_reads


@pytest.mark.ranks(2)
def test_old_checkpoints_are_deleted_beside_training(folder: str) -> None:
    remove, begun = shutil.rmtree, time.monotonic()

    def slow(path: Path, **options: object) -> None:
        time.sleep(1.5)
        remove(path, **options)

    with patch("shutil.rmtree", slow), make(folder, keep_latest_k=1) as manager:
        for step in (5, 10, 15):
            save(manager, step)
        dist.barrier()
        assert time.monotonic() - begun < 1.5
    # on every rank: the first is not waited for in a collective of training
    assert time.monotonic() - begun > 1.5
    assert [path.name for path in Path(folder).iterdir()] == ["step-15"]
