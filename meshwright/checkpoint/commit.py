"""A checkpoint's folder: its name, whether it is whole, and how it appears complete or not at all.

Free of torch, so that a resume is checked before any rank starts.
"""

import fcntl
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from zlib_ng.zlib_ng import crc32

from meshwright.checkpoint import lease
from meshwright.checkpoint.index import INDEX
from meshwright.checkpoint.manifest import (
    MANIFEST,
    VERSION,
    DamagedError,
    FileRecord,
    Manifest,
    read_manifest,
    to_json,
)
from meshwright.system.errors import StorageError
from meshwright.system.files import lock, sync_file, sync_folder
from meshwright.system.log import logger
from meshwright.system.retries import ABSENT, read_patiently

NAME = re.compile(
    r"step-(?P<step>0|[1-9][0-9]*)"
    r"(?:\.(?P<nonce>[0-9a-f]{16})\.(?P<state>unfinished|deleted)|\.(?P<aside>aside)\d+)?"
)
"""A complete checkpoint, or one that is being written or deleted, or was set aside. The nonce says
that our job made it: a folder of a user's that ends the same way is left unchanged."""

UNFINISHED, DELETED = ".unfinished", ".deleted"

NO_NONCE = "0" * 16

CHUNK_BYTES = 4 * 2**20


class CheckpointEntry(NamedTuple):
    """A folder with the name of a checkpoint."""

    step: int
    path: Path
    state: str
    """"unfinished", "deleted" or "aside"; "": complete, unless harmed later."""
    nonce: str
    """Of the save or the deletion under way; "": none is."""


def entries(folder: Path) -> list[CheckpointEntry]:
    """Return everything in `folder` that has the name of a checkpoint, by step and name."""

    def scan() -> list[CheckpointEntry]:
        with os.scandir(folder) as listing:
            # only a link has to be looked at: the listing itself tells which others are folders
            return sorted(
                CheckpointEntry(
                    int(name["step"]),
                    Path(entry),
                    name["state"] or name["aside"] or "",
                    name["nonce"] or "",
                )
                for entry in listing
                if (name := NAME.fullmatch(entry.name))
                and (entry.is_dir(follow_symlinks=False) or Path(entry).is_dir())
            )

    try:
        return read_patiently(folder, scan)
    except ABSENT:
        return []


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in `folder`, in order."""
    return [entry.step for entry in entries(folder) if not entry.state]


def step_of(name: str) -> int | None:
    """Return the step of a complete checkpoint's folder by its name; None for any other name."""
    match = NAME.fullmatch(name)
    return int(match["step"]) if match and match.end("step") == len(name) else None


def step_folder(folder: Path, step: int) -> Path:
    """Return where the complete checkpoint of `step` is."""
    return folder / f"step-{step}"


def unfinished_folder(folder: Path, step: int, nonce: str = NO_NONCE) -> Path:
    """Return where the checkpoint of `step` is while it is written. `nonce`: 16 hexadecimal digits
    that no other save has."""
    return folder / f"step-{step}.{nonce}{UNFINISHED}"


def inspect(checkpoint: Path) -> Manifest:
    """Return the manifest of `checkpoint`, whose files are all there, and as long as they were.

    Raises:
        DamagedError: if they aren't, or if it is the checkpoint of a different step, renamed.
        StorageError: if that can't be seen now.
    """
    manifest = read_manifest(checkpoint)
    if step_of(checkpoint.name) not in (None, step := manifest["step"]):
        raise DamagedError(checkpoint, f"it was saved as step-{step}, and has been renamed")
    if INDEX not in manifest["files"]:
        raise DamagedError(checkpoint, f"{MANIFEST} has no record of {INDEX}")
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
    """Read the files `names`, which `inspect` has seen, to the last byte; return every fault.

    Raises:
        StorageError: if one can't be read now, or isn't to be seen on this machine.
    """
    wrong = []
    for name in names:
        path = checkpoint / name
        try:
            checksum = read_patiently(path, partial(_read_crc32, path))
        except ABSENT as error:  # a network file system may show a new file late
            raise StorageError(f"{path} is not visible on this machine: {error.strerror}") from None
        if checksum != manifest["files"][name]["crc32"]:
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
    name = NAME.fullmatch(unfinished.name)
    assert name is not None, unfinished
    final = step_folder(unfinished.parent, int(name["step"]))
    content = {"version": VERSION, **manifest, "files": dict(sorted(files.items()))}
    with open(unfinished / MANIFEST, "wb") as file:
        file.write(to_json(content))
        file.flush()
        sync_file(file.fileno(), unfinished / MANIFEST)
    sync_folder(unfinished)
    lease.check_lease(unfinished.parent, name["nonce"])
    if os.path.lexists(final):  # not of this run, which has set aside later checkpoints
        logger.warning("%s was there already; it is now %s", final, set_aside(final).name)
    unfinished.rename(final)
    sync_folder(unfinished.parent)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint, or a path named like one, so that it counts no longer; return where it
    is."""
    names = (path.with_name(f"{path.name}.aside{number}") for number in count())
    free = next(name for name in names if not os.path.lexists(name))
    return path.rename(free)


RISK = "a checkpoint may be deleted while it is read"
"""The risk on a file system without flock."""


@contextmanager
def being_read(checkpoint: Path) -> Iterator[None]:
    """Keep every job's retention from deleting `checkpoint`, by a shared flock on its manifest.

    Raises:
        DamagedError: if it isn't there, or no longer.
        StorageError: if it can't be read now.
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
