"""Checkpoints without a job."""

import json
import zlib
from pathlib import Path

from meshwright.checkpoint import commit, listing
from meshwright.checkpoint.index import INDEX
from meshwright.checkpoint.manifest import MANIFEST, NO_JOB, FileRecord, read_manifest

BARE = NO_JOB | {"loss": 1.5, "model_name": "llama"}
"""A manifest, but for the step."""


def records_of(folder: Path) -> dict[str, FileRecord]:
    """What would have been noted of the files in `folder` when they were written."""
    return {
        path.name: {"bytes": path.stat().st_size, "crc32": f"{zlib.crc32(path.read_bytes()):08x}"}
        for path in folder.iterdir()
    }


def set_manifest(checkpoint: Path, **values: object) -> None:
    """Change a manifest, and its checksum with it."""
    path = checkpoint / MANIFEST
    manifest = {**json.loads(path.read_text()), **values, "crc32": "00000000"}
    crc32 = zlib.crc32(json.dumps(manifest, indent=2).encode())
    path.write_text(json.dumps({**manifest, "crc32": f"{crc32:08x}"}, indent=2))


def republish(folder: Path, step: int) -> None:
    """Make the manifest of `step` agree with its files, as whoever swaps a file can."""
    manifest = read_manifest(listing.step_folder(folder, step))
    unfinished = listing.unfinished_folder(folder, step)
    listing.step_folder(folder, step).rename(unfinished)
    (unfinished / MANIFEST).unlink()
    commit.publish(unfinished, manifest, records_of(unfinished))


def publish(
    folder: Path, step: int, text: str = "", nonce: str = listing.NO_NONCE, **manifest: object
) -> Path:
    """Make a complete checkpoint whose index is `text`."""
    unfinished = listing.unfinished_folder(folder, step, nonce)
    unfinished.mkdir(parents=True)
    (unfinished / INDEX).write_text(text)
    commit.publish(unfinished, BARE | {"step": step} | manifest, records_of(unfinished))
    return listing.step_folder(folder, step)


class Trap:
    """Makes `file` when it is unpickled by what runs code."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return (Path.touch, (self._file,))
