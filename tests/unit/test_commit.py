"""What counts as a checkpoint, whenever the writer was killed."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from meshwright.checkpoint import integrity, listing, retention, store
from meshwright.checkpoint.index import INDEX
from meshwright.checkpoint.integrity import being_read
from meshwright.checkpoint.manifest import MANIFEST, DamagedError, Manifest, read_manifest, to_json
from meshwright.checkpoint.retention import (
    Retention,
    apply_retention,
    clean_up,
    mark_best,
    set_aside_later,
)
from meshwright.config.job_config import Checkpoint
from meshwright.system.errors import EXIT_CODES, EXIT_DATA, ConfigError, StorageError
from meshwright.system.files import NamedPath
from tests.helpers.checkpoints import publish, set_manifest
from tests.helpers.files import NOT_THERE, failing_reads, flip_bit, leave_out_flock_and_fsync, tree


def save_all(folder: Path, *steps: int) -> None:
    for step in steps:
        publish(folder, step, "tensors")


def choose(folder: Path, judge: store.Judge = integrity.inspect) -> tuple[str, list[str]]:
    """The name of the newest good checkpoint, and what is said of those that are skipped."""
    said: list[str] = []
    choice = store.select(*store.of_job(folder, Checkpoint(enable=True)), judge, said.append)
    return choice.place.path.name, said


def step_chosen(folder: Path, load_step: int) -> int | None:
    place, candidates = store.of_job(folder, Checkpoint(enable=True, load_step=load_step))
    return store.select(place, candidates).manifest["step"] if candidates else None


def damage(checkpoint: Path) -> list[str]:
    """Everything that a load would find."""
    try:
        manifest = integrity.inspect(checkpoint)
    except DamagedError as error:
        return [error.what]
    return integrity.verify(checkpoint, manifest, list(manifest["files"]))


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    assert listing.saved_steps(tmp_path / "none") == []
    save_all(tmp_path, 5, 10)
    listing.unfinished_folder(tmp_path, 15).mkdir()  # killed while writing
    (tmp_path / "step-20-copy").mkdir()
    assert listing.saved_steps(tmp_path) == [5, 10]
    assert step_chosen(tmp_path, -1) == 10
    assert step_chosen(tmp_path, 5) == 5
    assert store.of_job(tmp_path, Checkpoint(enable=False))[1] == []  # the job resumes from none
    with pytest.raises(ConfigError, match="load_step = 15.*: 5, 10"):
        step_chosen(tmp_path, 15)
    (tmp_path / "step-4.0123456789abcdef.deleted").mkdir()  # killed while deleting
    clean_up(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-10", "step-20-copy", "step-5"]


def test_a_bit_flipped_anywhere_is_found(tmp_path: Path) -> None:
    """benchmarks/checkpoint.py does the same to a checkpoint of a job."""
    rng = random.Random(0)
    checkpoint = publish(tmp_path, 5, "".join(rng.choices("abc", k=300)), data={"a": 0.1, "b": "é"})
    assert damage(checkpoint) == []
    for path in checkpoint.iterdir():
        for _ in range(200):
            position = rng.randrange(8 * path.stat().st_size)
            flip_bit(path, position)
            assert damage(checkpoint), f"{path.name}, bit {position}"
            flip_bit(path, position)
    assert damage(checkpoint) == []


MAY_PASS = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT)


@pytest.mark.parametrize("name", [MANIFEST, INDEX])
@pytest.mark.parametrize("number", [*MAY_PASS, errno.EACCES])
def test_a_read_error_is_no_damage_and_discards_nothing(tmp_path: Path, name, number) -> None:
    publish(tmp_path, 5, "older")
    newest = publish(tmp_path, 10, "newest")
    manifest, before = integrity.inspect(newest), tree(tmp_path)
    if number in MAY_PASS:  # and it does
        with failing_reads(name, number, 1) as failed:
            assert choose(tmp_path) == (newest.name, [])
        assert failed == [str(newest / name)]
        with failing_reads(name, number, 1) as failed, being_read(newest):
            assert integrity.verify(newest, manifest, [INDEX]) == []
        assert failed == [str(newest / name)]
    with failing_reads(name, number, 99) as failed:
        raised = StorageError if number in MAY_PASS else ConfigError
        with pytest.raises(raised, match=f"step-10/{name} cannot be read: .*\n  fix: "):
            choose(tmp_path)
        assert len(failed) == (3 if number in MAY_PASS else 1)
        with pytest.raises(raised), being_read(newest):
            integrity.verify(newest, manifest, [INDEX])
    assert tree(tmp_path) == before
    assert EXIT_CODES[StorageError] == EXIT_DATA


def test_a_file_that_another_machine_shows_late_is_no_damage(tmp_path: Path) -> None:
    """`inspect`, on the first rank's machine, has seen it."""
    newest = publish(tmp_path, 10, "newest")
    manifest = integrity.inspect(newest)
    with (
        failing_reads(INDEX, errno.ENOENT, 1),
        pytest.raises(StorageError, match="not visible"),
    ):
        integrity.verify(newest, manifest, [INDEX])


def test_retention_deletes_nothing_that_it_cannot_read_now(tmp_path: Path, caplog) -> None:
    save_all(tmp_path, 5, 10, 15)
    retention = Retention(tmp_path, 1, 0, False)
    with failing_reads(MANIFEST, errno.EIO, 99):
        retention.apply()
        retention.wait()
    assert listing.saved_steps(tmp_path) == [5, 10, 15]
    assert "could not be cleaned up" in caplog.text


def lose_key(checkpoint: Path) -> None:
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    del manifest["data_identity"]
    (checkpoint / MANIFEST).write_bytes(to_json(manifest))


def with_manifest(text: str) -> Callable[[Path], object]:
    return lambda checkpoint: (checkpoint / MANIFEST).write_text(text)


HARM: dict[str, Callable[[Path], object]] = {
    ".metadata has 4 bytes, but 7": lambda checkpoint: (checkpoint / INDEX).write_text("tens"),
    ".metadata: No such file": lambda checkpoint: (checkpoint / INDEX).unlink(),
    "checkpoint.json cannot be read: ": lambda checkpoint: (checkpoint / MANIFEST).unlink(),
    "checkpoint.json: Expecting property name": with_manifest("{"),
    "checkpoint.json: is no table": with_manifest("[]"),
    "checkpoint.json: data_identity: field required": lose_key,
    "json: step: input should be a valid integer": lambda c: set_manifest(c, step="x"),
    "maximum recursion depth": with_manifest('{"data": ' * 100_000),
    "it was saved as step-20, and has been renamed": lambda c: set_manifest(c, step=20),
}
"""By a part of the message."""


@pytest.mark.parametrize("says", HARM)
def test_a_damaged_checkpoint_is_passed_over_unless_it_was_named(tmp_path: Path, says) -> None:
    for step in (5, 10, 15):
        publish(tmp_path, step, "tensors")
    HARM[says](tmp_path / "step-15")
    name, (said,) = choose(tmp_path)
    assert name == "step-10"
    assert said.startswith(f"skipped {tmp_path / 'step-15'}, which is damaged: ")
    assert says in said
    with pytest.raises(ConfigError, match="load_step = '.*step-15': is damaged") as error:
        step_chosen(tmp_path, 15)
    assert says in str(error.value)

    damaged = {"step-10": "content"}

    def read(path: Path) -> Manifest:
        if path.name in damaged:
            raise DamagedError(path, damaged[path.name])
        return integrity.inspect(path)

    name, said = choose(tmp_path, read)
    assert name == "step-5"
    assert [line.split(",")[0] for line in said] == [
        f"skipped {tmp_path / name}" for name in ("step-15", "step-10")
    ]
    damaged["step-5"] = "worse"
    with pytest.raises(ConfigError, match="every checkpoint in it .* step-5: worse") as error:
        choose(tmp_path, read)
    assert error.value.key == "job.dump_folder"


def test_a_damaged_one_is_deleted_in_its_turn_but_a_renamed_one_is_not(tmp_path: Path) -> None:
    save_all(tmp_path, 5, 10, 15, 20)
    (tmp_path / "step-5" / MANIFEST).write_text("{")
    (tmp_path / "step-10").rename(tmp_path / "step-99")
    apply_retention(tmp_path, 2)
    assert listing.saved_steps(tmp_path) == [15, 20, 99]
    apply_retention(tmp_path, 1)
    assert listing.saved_steps(tmp_path) == [20, 99]


def test_the_newest_every_nth_and_the_last_good_one_are_kept(tmp_path: Path) -> None:
    for step in (100, 10, 20, 30, 40, 50, 60):
        publish(tmp_path, step, loss=None if step > 50 else 1.0)
    (tmp_path / "step-50" / INDEX).unlink()
    for keep_latest_k, every_nth, kept in (
        (0, 0, [10, 20, 30, 40, 50, 60, 100]),
        (4, 20, [20, 40, 50, 60, 100]),
        (1, 20, [20, 40, 60, 100]),
        (1, 0, [40, 100]),  # neither 60 nor 100 has a finite loss
    ):
        apply_retention(tmp_path, keep_latest_k, keep_every_n_steps=every_nth)
        assert listing.saved_steps(tmp_path) == kept
    theirs = publish(tmp_path / "other", 105)  # a link is a user's, and none of ours to resume from
    (tmp_path / "step-105").symlink_to(theirs)
    apply_retention(tmp_path, 1)
    assert listing.saved_steps(tmp_path) == [40, 100, 105]
    publish(tmp_path, 110)
    apply_retention(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"other", "step-105", "step-110"}


def test_checkpoints_that_stay_anyway_are_not_looked_at(tmp_path: Path, monkeypatch) -> None:
    """A long job has hundreds of them, and a save of a thousand ranks a manifest of 160 KB."""
    save_all(tmp_path, *range(20, 420, 20), 415)
    monkeypatch.setattr(retention, "read_manifest", (read := Mock(wraps=retention.read_manifest)))
    apply_retention(tmp_path, 1, keep_every_n_steps=20)
    assert listing.saved_steps(tmp_path) == [*range(20, 420, 20), 415]
    assert read.call_count < 4


def test_the_best_by_validation_is_kept_and_marked(tmp_path: Path) -> None:
    for step, best in ((10, None), (20, [20, 3.5]), (30, [20, 3.5]), (40, [20, 3.5])):
        publish(tmp_path, step, best_validation=best)
    assert mark_best(tmp_path) == 20
    marked = {"step": 20, "validation_loss": 3.5, "checkpoint": "step-20"}
    assert json.loads((tmp_path / "best.json").read_text()) == marked
    apply_retention(tmp_path, 1, best=20)
    assert listing.saved_steps(tmp_path) == [20, 40]
    publish(tmp_path, 50, best_validation=[45, 3.0])  # which was not saved
    assert mark_best(tmp_path) is None
    publish(tmp_path, 60)  # resumed with other validation data: none of them is the best so far
    assert mark_best(tmp_path) == 20
    (tmp_path / "best.json").write_text("[]")
    assert mark_best(tmp_path) is None


def test_the_best_that_is_set_aside_is_no_longer_marked(tmp_path: Path) -> None:
    """The next step of that number was kept for it, and named with its loss."""
    for step, best in ((10, None), (20, [20, 3.5]), (30, [20, 3.5])):
        publish(tmp_path, step, best_validation=best)
    assert mark_best(tmp_path) == 20
    set_aside_later(tmp_path, 20, is_named=False)
    assert (tmp_path / "best.json").exists()
    killed = patch.object(retention.logger, "info", side_effect=KeyboardInterrupt)
    with killed, pytest.raises(KeyboardInterrupt):
        set_aside_later(tmp_path, 10, is_named=False)
    set_aside_later(tmp_path, 10, is_named=False)  # by the next start
    assert not (tmp_path / "best.json").exists()
    publish(tmp_path, 20)
    assert mark_best(tmp_path) is None


def test_a_checkpoint_that_is_read_is_deleted_when_it_no_longer_is(tmp_path: Path) -> None:
    save_all(tmp_path, 5, 10, 15)
    with being_read(tmp_path / "step-10"), being_read(tmp_path / "step-10"):
        assert apply_retention(tmp_path, 1) == [10]
        assert listing.saved_steps(tmp_path) == [10, 15]
    rmtree = shutil.rmtree

    def remove(folder: Path) -> None:
        files = (
            os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")
        )
        assert not [file for file in files if file.startswith(str(folder))]
        rmtree(folder)

    with patch("shutil.rmtree", remove):  # NFS keeps files that are open, and so their folder
        assert apply_retention(tmp_path, 1) == []
    assert listing.saved_steps(tmp_path) == [15]
    with pytest.raises(ConfigError, match="step-10 is damaged"):
        being_read(tmp_path / "step-10").__enter__()


def test_only_the_one_that_is_opened_is_kept_and_not_those_that_are_skipped(tmp_path) -> None:
    save_all(tmp_path, 5, 10, 15)
    flip_bit(tmp_path / "step-10" / INDEX, 9)
    place = NamedPath("CHECKPOINT", tmp_path)
    older = [tmp_path / "step-10", tmp_path / "step-5"]
    said: list[str] = []
    with store.open_checkpoint(place, said.append, candidates=older) as opened:
        assert opened.place.path.name == "step-5"
        assert "the content of" in said[0]
        assert apply_retention(tmp_path, 1) == [5]
    assert listing.saved_steps(tmp_path) == [5, 15]


@pytest.mark.parametrize("is_saved_again", [False, True])
def test_what_is_deleted_while_it_is_opened_is_not_read(tmp_path, is_saved_again) -> None:
    checkpoint = publish(tmp_path, 5)

    def delete_first(*of_flock: object) -> bool:
        shutil.rmtree(checkpoint)
        if is_saved_again:  # the lock is on the manifest of before
            publish(tmp_path, 5)
        return True

    with (
        patch.object(integrity, "lock", delete_first),
        pytest.raises(ConfigError, match="another job has just deleted it"),
    ):
        being_read(checkpoint).__enter__()


@pytest.mark.parametrize(
    "files",
    [
        {"../outside": {"bytes": 3, "crc32": "00000000"}},
        {"..": {"bytes": 3, "crc32": "00000000"}},
        {"a": 3},
        {"a": {"bytes": -3, "crc32": "00000000"}},
    ],
)
def test_a_manifest_names_files_of_its_folder_alone(files, tmp_path: Path) -> None:
    """Its checksum is no secret: anybody can make one."""
    set_manifest(publish(tmp_path, 5), files=files)
    with pytest.raises(DamagedError, match="no file of its folder|files.a"):
        read_manifest(tmp_path / "step-5")


def test_a_manifest_of_a_later_version_is_an_error(tmp_path: Path) -> None:
    publish(tmp_path, 5)
    set_manifest(publish(tmp_path, 10), version=99)
    # passed over, it would be a resume from an older one that nobody asked for
    with pytest.raises(ConfigError, match="step-10: .*version 99; .* reads up to 1") as error:
        choose(tmp_path)
    assert not isinstance(error.value, DamagedError)
    publish(tmp_path, 15)
    assert apply_retention(tmp_path, 1) == []
    assert listing.saved_steps(tmp_path) == [10, 15]  # nor is it deleted by who cannot read it


def strangers(folder: Path) -> set[str]:
    """What a user, or a mishap, may leave in a folder of checkpoints."""
    (folder / "elsewhere").mkdir(parents=True)
    (folder / "elsewhere" / "notes").write_text("keep")
    for name in ("step-5.unfinished", "mine.unfinished", "step-6.deleted", "step-007", "step-3"):
        shutil.copytree(folder / "elsewhere", folder / name)
    (folder / "notes.unfinished").write_text("keep")
    (folder / "step-8.deleted").write_text("keep")
    (folder / "step-9.unfinished").symlink_to("elsewhere")
    (folder / "step-9.0123456789abcdef.deleted").symlink_to("elsewhere")
    (folder / "step-1").symlink_to("elsewhere")
    (folder / "loop").symlink_to("loop")
    return tree(folder)


def test_what_is_not_ours_is_left_alone_and_stops_nothing(tmp_path: Path) -> None:
    before = strangers(tmp_path)
    for step in (2, 4, 10, 20):
        publish(tmp_path, step, "tensors")
        clean_up(tmp_path)
        apply_retention(tmp_path, 1)
    assert step_chosen(tmp_path, -1) == 20
    ours = {"step-20", *(f"step-20/{name}" for name in (MANIFEST, INDEX))}
    assert tree(tmp_path) == before | ours
    assert (tmp_path / "step-1" / "notes").read_text() == "keep"


def test_what_has_the_name_of_a_checkpoint_is_set_aside(tmp_path: Path) -> None:
    """A file, a link to nowhere, a folder: nothing is lost, and nothing is in the way."""
    (tmp_path / "step-10").write_text("keep")
    (tmp_path / "step-10.aside1").write_text("before")
    (tmp_path / "step-10.aside0").symlink_to("nowhere")
    (tmp_path / "step-15").symlink_to("nowhere")
    (tmp_path / "step-20").mkdir()
    save_all(tmp_path, 10, 15, 20)
    assert listing.saved_steps(tmp_path) == [10, 15, 20]
    texts = [(tmp_path / f"step-10.aside{number}").read_text() for number in (1, 2)]
    assert texts == ["before", "keep"]
    assert (tmp_path / "step-15.aside0").is_symlink()
    assert (tmp_path / "step-20.aside0").is_dir()


@pytest.mark.parametrize("name", ["saved_steps", "commit.set_aside"])
def test_what_cannot_be_set_aside_is_an_error_of_every_rank(name, tmp_path, monkeypatch) -> None:
    """The first rank tells a `ConfigError` to the others; any other error leaves them waiting."""
    save_all(tmp_path, 2, 4)
    error = OSError(errno.ELOOP, "Too many levels of symbolic links")
    monkeypatch.setattr(f"meshwright.checkpoint.retention.{name}", Mock(side_effect=error))
    with pytest.raises(ConfigError, match="after step 2 cannot be set aside: .*symbolic links"):
        set_aside_later(tmp_path, 2, is_named=False)


def test_what_cannot_be_removed_is_a_warning(tmp_path: Path, caplog) -> None:
    save_all(tmp_path, 5, 10)
    listing.unfinished_folder(tmp_path, 15).mkdir()
    with patch("shutil.rmtree", side_effect=PermissionError(errno.EACCES, "Permission denied")):
        clean_up(tmp_path)
        apply_retention(tmp_path, 1)
    assert "step-15.0000000000000000.unfinished, left by a killed job, could not" in caplog.text
    assert "an old checkpoint could not be deleted" in caplog.text
    clean_up(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-10"]


def test_a_save_under_way_is_not_cleaned_up(tmp_path: Path) -> None:
    for nonce in ("0" * 16, "1" * 16):
        listing.unfinished_folder(tmp_path, 5, nonce).mkdir()
    clean_up(tmp_path, is_in_use=lambda nonce: nonce == "1" * 16)
    assert [path.name for path in tmp_path.iterdir()] == [f"step-5.{'1' * 16}.unfinished"]


@pytest.mark.parametrize("number", NOT_THERE)
def test_a_file_system_without_flock_or_fsync_is_named_and_used(
    tmp_path: Path, monkeypatch, caplog, number: int
) -> None:
    leave_out_flock_and_fsync(monkeypatch, number)
    for step in (5, 10, 15):
        publish(tmp_path, step)
        with being_read(tmp_path / f"step-{step}"):
            pass
    apply_retention(tmp_path, 2)
    assert listing.saved_steps(tmp_path) == [10, 15]
    said = [record.getMessage() for record in caplog.records]
    assert sum("has no flock" in line for line in said) == 1
    for what in ("a folder", "a file"):
        assert sum(f"cannot flush {what} to the disk" in line for line in said) == 1


def test_a_checkpoint_may_be_a_link_to_a_folder_elsewhere_and_is_then_kept(tmp_path):
    elsewhere, run = publish(tmp_path / "archive", 5), tmp_path / "run"
    publish(run, 10)
    (run / "step-5").symlink_to(elsewhere)
    assert listing.saved_steps(run) == [5, 10]
    publish(run, 15)
    apply_retention(run, 1)
    assert listing.saved_steps(run) == [5, 15]


def test_a_folder_that_cannot_be_listed_for_a_moment_is_not_empty(tmp_path, monkeypatch) -> None:
    publish(tmp_path, 5)
    monkeypatch.setattr("meshwright.system.retries.RETRY_AFTER_S", (0.0,))
    answers = [OSError(errno.ESTALE, "Stale file handle"), os.scandir(tmp_path)]
    monkeypatch.setattr(os, "scandir", Mock(side_effect=answers))
    assert listing.saved_steps(tmp_path) == [5]
