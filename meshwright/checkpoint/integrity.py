"""Whether a checkpoint is as it was saved; and a lock that keeps it while it is read.

Free of torch, so that a resume is checked before any rank starts.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from zlib_ng.zlib_ng import crc32

from meshwright.checkpoint.index import INDEX
from meshwright.checkpoint.listing import step_of
from meshwright.checkpoint.manifest import MANIFEST, DamagedError, Manifest, read_manifest
from meshwright.system.errors import StorageError
from meshwright.system.files import lock
from meshwright.system.retries import ABSENT, read_patiently

CHUNK_BYTES = 4 * 2**20


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
