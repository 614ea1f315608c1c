"""Which checkpoints a folder holds, whether they are whole, and how one comes to be there: all at
once, or not at all.

Free of torch, so that a resume is checked before any rank starts.
"""

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, TypedDict

from zlib_ng.zlib_ng import crc32

from meshwright.errors import ConfigError, check

MANIFEST = "checkpoint.json"
STEP_FOLDER = re.compile(r"step-(\d+)")
UNFINISHED = ".unfinished"
DELETED = ".deleted"
CHUNK_BYTES = 4 * 2**20

REQUIRED: dict[str, type | tuple[type, ...]] = {
    "crc32": str,
    "step": int,
    "tokens_seen": int,
    "loss": (int, float, type(None)),
    "data": dict,
    "data_identity": dict,
    "data_content": dict,
    "model_args": dict,
    "frozen": list,
    "mesh": dict,
    "versions": dict,
    "config": dict,
    "files": dict,
}
"""Keys of a manifest, and what they hold: what a resume reads must be there."""


class FileRecord(TypedDict):
    """What was written, as whoever wrote it saw it on its way to the disk."""

    bytes: int
    crc32: str


class DamagedError(ConfigError):
    """A checkpoint is not what was saved.

    Args:
        what: of it.
    """

    def __init__(self, checkpoint: Path, what: str) -> None:
        super().__init__(
            "checkpoint.load_step",
            f"checkpoint.load_step: checkpoint {checkpoint} is damaged: {what}"
            "\n  fix: name another step in checkpoint.load_step, or -1 for the newest good one",
        )
        self.what = what


class Choice(NamedTuple):
    """The checkpoint to resume from."""

    step: int | None
    """None: there is none at all."""
    manifest: dict[str, Any]
    passed_over: dict[int, str]
    """Newer ones that are damaged, and how."""


def saved_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in `folder`, in order; complete, unless harmed later."""
    if not folder.is_dir():
        return []
    names = (STEP_FOLDER.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(name[1]) for name in names if name)


def choose(folder: Path, load_step: int, damaged: Mapping[int, str] | None = None) -> Choice:
    """The checkpoint of `load_step`, or with -1 the newest whose files are all there in full.

    Their content is not read: that is `verify`'s.

    Args:
        damaged: steps that are known to be, and how.

    Raises:
        ConfigError: if `load_step` is not there or damaged, or if every checkpoint is damaged:
            starting over would be a surprise.
    """
    damaged, steps = damaged or {}, saved_steps(folder)
    if load_step != -1:
        there = ", ".join(map(str, steps)) or "none"
        check(
            load_step in steps,
            "checkpoint.load_step",
            load_step,
            f"not among the checkpoints in {folder}: {there}",
            "name one of them, or -1 for the newest",
        )
        if load_step in damaged:
            raise DamagedError(step_folder(folder, load_step), damaged[load_step])
        return Choice(load_step, inspect(step_folder(folder, load_step)), {})
    passed_over: dict[int, str] = {}
    for step in reversed(steps):
        if step in damaged:
            passed_over[step] = damaged[step]
            continue
        try:
            return Choice(step, inspect(step_folder(folder, step)), passed_over)
        except DamagedError as error:
            passed_over[step] = error.what
    if passed_over:
        each = "; ".join(f"step-{step}: {what}" for step, what in passed_over.items())
        raise ConfigError(
            "job.dump_folder",
            f"every checkpoint in {folder} is damaged: {each}"
            "\n  fix: restore one of them, or use another job.dump_folder to start over",
        )
    return Choice(None, {}, {})


def choose_step(folder: Path, load_step: int) -> int | None:
    """The step that `choose` chooses."""
    return choose(folder, load_step).step


def step_folder(folder: Path, step: int) -> Path:
    """Where the complete checkpoint of `step` is."""
    return folder / f"step-{step}"


def unfinished_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is while it is written; never taken for a checkpoint."""
    return folder / f"step-{step}{UNFINISHED}"


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """What `publish` wrote, with every key of `REQUIRED`.

    Raises:
        DamagedError: if it is not that.
    """
    path = checkpoint / MANIFEST
    try:
        text = path.read_bytes()
        manifest = json.loads(text)
    except (OSError, ValueError) as error:
        raise DamagedError(checkpoint, f"{MANIFEST} cannot be read: {error}") from None
    if not isinstance(manifest, dict):
        raise DamagedError(checkpoint, f"{MANIFEST} is no table")
    for key, kind in REQUIRED.items():
        if key not in manifest:
            raise DamagedError(checkpoint, f"{MANIFEST} has no key {key!r}")
        if not isinstance(manifest[key], kind) or isinstance(manifest[key], bool):
            raise DamagedError(checkpoint, f"{MANIFEST}: {key} is not what it should be")
    if text != _encode(manifest):
        raise DamagedError(
            checkpoint, f"the content of {MANIFEST} has changed since it was written"
        )
    for name, record in manifest["files"].items():
        is_record = isinstance(record, dict) and {*record} >= FileRecord.__required_keys__
        if not (is_record and is_file_name(name)):
            raise DamagedError(checkpoint, f"{MANIFEST}: {name!r} is no file of its folder")
    return manifest


def is_file_name(name: str) -> bool:
    """Whether it stays in the folder that it is joined to: what names files may be forged."""
    return Path(name).name == name and name not in ("", "..")


def inspect(checkpoint: Path) -> dict[str, Any]:
    """The manifest of `checkpoint`, whose files are all there, and as long as they were.

    Raises:
        DamagedError: if they are not.
    """
    manifest = read_manifest(checkpoint)
    for name, record in manifest["files"].items():
        try:
            size = (checkpoint / name).stat().st_size
        except OSError as error:
            raise DamagedError(checkpoint, f"{name}: {error.strerror}") from None
        if size != record["bytes"]:
            what = f"{name} has {size:,} bytes, but {record['bytes']:,} were saved"
            raise DamagedError(checkpoint, what)
    return manifest


def verify(checkpoint: Path, manifest: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """What is wrong with the content of the files `names`; reads them from first to last byte."""
    wrong = []
    for name in names:
        try:
            found = _read_crc32(checkpoint / name)
        except OSError as error:
            wrong.append(f"{name}: {error.strerror}")
            continue
        if found != manifest["files"][name]["crc32"]:
            wrong.append(f"the content of {name} has changed since it was written")
    return wrong


def _read_crc32(path: Path) -> str:
    crc, chunk = 0, memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(chunk):
            crc = crc32(chunk[:count], crc)
    return f"{crc:08x}"


def publish(
    folder: Path, step: int, manifest: Mapping[str, Any], files: Mapping[str, FileRecord]
) -> None:
    """Turn the unfinished checkpoint of `step`, whose `files` are on disk, into a complete one.

    Its one rename is atomic (POSIX rename); everything before is flushed to the disk first, so
    neither a kill nor a power cut leaves a partial checkpoint under a complete one's name.
    """
    unfinished, final = unfinished_folder(folder, step), step_folder(folder, step)
    with open(unfinished / MANIFEST, "wb") as file:
        file.write(_encode({**manifest, "files": dict(sorted(files.items()))}))
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(unfinished)
    if final.exists():  # not of this run, which has set aside what it does not continue
        _set_aside(final)
    unfinished.rename(final)
    _sync_folder(folder)


def _encode(manifest: Mapping[str, Any]) -> bytes:
    """As JSON that holds its own checksum: of itself with that of nothing in its place."""
    blank = json.dumps({**manifest, "crc32": "00000000"}, indent=2).encode()
    return json.dumps({**manifest, "crc32": f"{crc32(blank):08x}"}, indent=2).encode()


@contextmanager
def being_read(checkpoint: Path) -> Iterator[None]:
    """Keep every job's retention from deleting `checkpoint` meanwhile.

    A shared flock on its manifest; where the file system has none, there is no protection.

    Raises:
        DamagedError: if it is not there, or no longer.
    """
    path = checkpoint / MANIFEST
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise DamagedError(checkpoint, f"{MANIFEST} cannot be read: {error}") from None
    with file:
        is_ours = _lock(file, fcntl.LOCK_SH)
        try:
            is_there = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except FileNotFoundError:
            is_there = False
        if not (is_ours and is_there):
            raise DamagedError(checkpoint, "another job has just deleted it")
        yield


def _lock(file: IO[bytes], kind: int) -> bool:
    """Whether no one holds a lock that excludes ours."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return True


def set_aside_later(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints after `step`, so that they count no longer; returns their new names.

    They belong to a run that is not continued: kept among those of the run that is, they would be
    taken for its newest.
    """
    return [_set_aside(step_folder(folder, later)) for later in saved_steps(folder) if later > step]


def _set_aside(checkpoint: Path) -> Path:
    number = len(list(checkpoint.parent.glob(f"{checkpoint.name}.aside*")))
    return checkpoint.rename(checkpoint.with_name(f"{checkpoint.name}.aside{number}"))


def clean_up(folder: Path) -> None:
    """Remove what killed saves and deletions have left."""
    for path in (*folder.glob(f"*{UNFINISHED}"), *folder.glob(f"*{DELETED}")):
        shutil.rmtree(path)


def discard(folder: Path, step: int) -> None:
    """Remove what there is of an unfinished checkpoint, as far as that is possible."""
    shutil.rmtree(unfinished_folder(folder, step), ignore_errors=True)


def retire(folder: Path, keep_latest_k: int, keep_every_n_steps: int = 0) -> list[int]:
    """Delete checkpoints that are no longer wanted.

    Kept are the newest `keep_latest_k` (0: all), those at multiples of `keep_every_n_steps`, the
    newest that is whole and whose loss was finite, and those being read: they go another time.

    Returns:
        Steps of those that are kept for being read alone.
    """
    if keep_latest_k == 0:
        return []
    steps = saved_steps(folder)
    good = next((step for step in reversed(steps) if _is_good(step_folder(folder, step))), None)
    old = (
        step
        for step in steps[:-keep_latest_k]
        if step != good and not is_kept_for_good(step, keep_every_n_steps)
    )
    return [step for step in old if not _delete(step_folder(folder, step))]


def is_kept_for_good(step: int, keep_every_n_steps: int) -> bool:
    """Whether retention never deletes the checkpoint of `step`."""
    return keep_every_n_steps > 0 and step % keep_every_n_steps == 0


def _is_good(checkpoint: Path) -> bool:
    try:
        return inspect(checkpoint)["loss"] is not None
    except DamagedError:
        return False


def _delete(checkpoint: Path) -> bool:
    """Remove a checkpoint; if killed meanwhile, what is left no longer counts as one.

    Returns:
        Whether it did: not if someone reads it.
    """
    try:
        # writable, for NFS gives an exclusive lock for nothing else
        file = open(checkpoint / MANIFEST, "r+b")  # noqa: SIM115
    except FileNotFoundError:
        shutil.rmtree(checkpoint.rename(checkpoint.with_name(checkpoint.name + DELETED)))
        return True
    with file:
        if not _lock(file, fcntl.LOCK_EX):
            return False
        shutil.rmtree(checkpoint.rename(checkpoint.with_name(checkpoint.name + DELETED)))
    return True


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
