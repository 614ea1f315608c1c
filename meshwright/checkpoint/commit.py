"""Which checkpoints a folder holds, whether they are whole, and how one comes to be there: all at
once, or not at all.

Free of torch, so that a resume is checked before any rank starts.
"""

import fcntl
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from zlib_ng.zlib_ng import crc32

from meshwright.checkpoint.claim import check_claim
from meshwright.checkpoint.manifest import (
    MANIFEST,
    VERSION,
    DamagedError,
    FileRecord,
    Manifest,
    read_manifest,
    to_json,
)
from meshwright.system.errors import ConfigError, StorageError, check
from meshwright.system.files import ABSENT, lock, read_patiently, sync_file, sync_folder
from meshwright.system.log import logger

STEP_FOLDER = re.compile(r"step-(0|[1-9][0-9]*)")

PARTIAL_FOLDER = re.compile(rf"({STEP_FOLDER.pattern})\.([0-9a-f]{{16}})\.(unfinished|deleted)")
"""A checkpoint that is being written or deleted. The nonce in its name says that a job of ours made
it: a folder of a user's that ends the same way is left alone."""

UNFINISHED = ".unfinished"

DELETED = ".deleted"

NO_NONCE = "0" * 16

CHUNK_BYTES = 4 * 2**20


class Choice(NamedTuple):
    """A checkpoint whose files are all there in full."""

    path: Path
    manifest: Manifest
    passed_over: dict[Path, str]
    """Newer ones that are damaged, and how."""


def saved_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in `folder`, in order; complete, unless harmed later."""

    def find() -> list[int]:
        with os.scandir(folder) as entries:
            # only a link has to be looked at: the listing itself tells which others are folders
            return sorted(
                int(name[1])
                for entry in entries
                if (name := STEP_FOLDER.fullmatch(entry.name))
                and (entry.is_dir(follow_symlinks=False) or Path(entry).is_dir())
            )

    try:
        return read_patiently(folder, find)
    except ABSENT:
        return []


def choose_newest(
    candidates: Iterable[Path],
    damaged: Mapping[Path, str],
    error_of: Callable[[dict[Path, str]], ConfigError],
) -> Choice | None:
    """Return the first of `candidates` whose files are all there in full; None if there are none.

    Their content is not read; see `verify`.

    Args:
        damaged: checkpoints that are known to be, and how.
        error_of: makes the error to raise if all are damaged, of the damage of each.
    """
    passed_over: dict[Path, str] = {}
    for path in candidates:
        try:
            if path in damaged:
                raise DamagedError(path, damaged[path])
            return Choice(path, inspect(path), passed_over)
        except DamagedError as error:
            passed_over[path] = error.what
    if passed_over:
        raise error_of(passed_over)
    return None


def choose(
    folder: Path, load_step: int, damaged: Mapping[Path, str] | None = None
) -> Choice | None:
    """Return the checkpoint of `load_step`; if -1, as `choose_newest` of those in `folder`.

    Raises:
        ConfigError: if `load_step` is not there or damaged, or if every checkpoint is damaged:
            starting over would be a surprise.
    """
    steps = saved_steps(folder)
    if load_step != -1:
        there = ", ".join(map(str, steps)) or "none"
        check(
            load_step in steps,
            "checkpoint.load_step",
            load_step,
            f"not among the checkpoints in {folder}: {there}",
            "name one of them, or -1 for the newest",
        )

    def error_of(passed_over: dict[Path, str]) -> ConfigError:
        if load_step != -1:
            return DamagedError(*passed_over.popitem())
        each = "; ".join(f"{path.name}: {what}" for path, what in passed_over.items())
        return ConfigError(
            "job.dump_folder",
            f"every checkpoint in {folder} is damaged: {each}"
            "\n  fix: restore one of them, or use another job.dump_folder to start over",
        )

    wanted = reversed(steps) if load_step == -1 else [load_step]
    return choose_newest((step_folder(folder, step) for step in wanted), damaged or {}, error_of)


def choose_step(folder: Path, load_step: int) -> int | None:
    """Return the step that `choose` chooses."""
    choice = choose(folder, load_step)
    return None if choice is None else choice.manifest["step"]


def step_folder(folder: Path, step: int) -> Path:
    """Return where the complete checkpoint of `step` is."""
    return folder / f"step-{step}"


def unfinished_folder(folder: Path, step: int, nonce: str = NO_NONCE) -> Path:
    """Return where the checkpoint of `step` is while it is written; never taken for a checkpoint.

    Args:
        nonce: 16 hexadecimal digits that no other save has.
    """
    return folder / f"step-{step}.{nonce}{UNFINISHED}"


def inspect(checkpoint: Path) -> Manifest:
    """Return the manifest of `checkpoint`, whose files are all there, and as long as they were.

    Raises:
        DamagedError: if they are not, or if it is the checkpoint of another step, renamed.
        StorageError: if that cannot be seen now.
    """
    manifest = read_manifest(checkpoint)
    name = STEP_FOLDER.fullmatch(checkpoint.name)
    if name and int(name[1]) != manifest["step"]:
        step = manifest["step"]
        raise DamagedError(checkpoint, f"it was saved as step-{step}, and has been renamed")
    for file, record in manifest["files"].items():
        try:
            size = read_patiently(checkpoint / file, (checkpoint / file).stat).st_size
        except ABSENT as error:
            raise DamagedError(checkpoint, f"{file}: {error.strerror}") from None
        if size != record["bytes"]:
            what = f"{file} has {size:,} bytes, but {record['bytes']:,} were saved"
            raise DamagedError(checkpoint, what)
    return manifest


def verify(checkpoint: Path, manifest: Manifest, names: Sequence[str]) -> list[str]:
    """Read the files `names`, which `inspect` has seen, from first to last byte.

    Returns:
        A description of each fault.

    Raises:
        StorageError: if one cannot be read now, or is not to be seen on this machine.
    """
    wrong = []
    for name in names:
        path = checkpoint / name
        try:
            found = read_patiently(path, partial(_read_crc32, path))
        except ABSENT as error:  # a network file system may show a new file late
            raise StorageError(f"{path} is not visible on this machine: {error.strerror}") from None
        if found != manifest["files"][name]["crc32"]:
            wrong.append(f"the content of {name} has changed since it was written")
    return wrong


def _read_crc32(path: Path) -> str:
    crc, chunk = 0, memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while length := file.readinto(chunk):
            crc = crc32(chunk[:length], crc)
    return f"{crc:08x}"


def publish(unfinished: Path, manifest: Mapping[str, Any], files: Mapping[str, FileRecord]) -> None:
    """Turn an unfinished checkpoint, whose `files` are on disk, into a complete one.

    Its one rename is atomic (POSIX rename); everything before is flushed to the disk first, so
    neither a kill nor a power cut leaves a partial checkpoint under a complete one's name.

    Raises:
        TakenOverError: if another job writes to the folder by now.
    """
    name = PARTIAL_FOLDER.fullmatch(unfinished.name)
    assert name is not None, unfinished
    final = unfinished.with_name(name[1])
    content = {"version": VERSION, **manifest, "files": dict(sorted(files.items()))}
    with open(unfinished / MANIFEST, "wb") as file:
        file.write(to_json(content))
        file.flush()
        sync_file(file.fileno(), unfinished / MANIFEST)
    sync_folder(unfinished)
    check_claim(unfinished.parent, name[3])
    if os.path.lexists(final):  # not of this run, which has set aside later checkpoints
        logger.warning("%s was there already; it is now %s", final, set_aside(final).name)
    unfinished.rename(final)
    sync_folder(unfinished.parent)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint, or a path named like one, so that it counts no longer.

    Returns:
        Its new name: one that was free.
    """
    names = (path.with_name(f"{path.name}.aside{number}") for number in count())
    free = next(name for name in names if not os.path.lexists(name))
    return path.rename(free)


RISK = "a checkpoint may be deleted while it is read"
"""Where there is no flock."""


@contextmanager
def being_read(checkpoint: Path) -> Iterator[None]:
    """Keep every job's retention from deleting `checkpoint` meanwhile.

    A shared flock on its manifest. On a file system without flock there is no protection, and the
    log says so.

    Raises:
        DamagedError: if it is not there, or no longer.
        StorageError: if it cannot be read now.
    """
    path = checkpoint / MANIFEST
    try:
        file = read_patiently(path, lambda: open(path, "rb"))  # noqa: SIM115
    except ABSENT as error:
        raise DamagedError(checkpoint, f"{MANIFEST} cannot be read: {error.strerror}") from None
    with file:
        is_ours = lock(file, fcntl.LOCK_SH, path, RISK)
        try:
            is_there = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except FileNotFoundError:
            is_there = False
        if not (is_ours and is_there):
            raise DamagedError(checkpoint, "another job has just deleted it")
        yield
