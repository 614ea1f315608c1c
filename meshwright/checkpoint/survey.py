"""The content of a folder of checkpoints: good, damaged and leftovers. Free of torch."""

import re
from dataclasses import dataclass
from pathlib import Path

from meshwright.checkpoint import commit
from meshwright.checkpoint.find import no_checkpoint, with_manifests
from meshwright.checkpoint.manifest import MANIFEST, DamagedError, Manifest, read_manifest
from meshwright.checkpoint.place import Place
from meshwright.errors import ConfigError

NAME = re.compile(
    rf"{commit.STEP_FOLDER.pattern}(?:\.[0-9a-f]{{16}}(?=\.[ud]))?(?:\.(unfinished|deleted|aside\d+))?"
)
"""Folders of earlier versions have no nonce."""
STATES = {None: "complete", "unfinished": "unfinished", "deleted": "being deleted"}


@dataclass(frozen=True)
class FoundCheckpoint:
    """A step's folder, whatever has become of it."""

    path: Path
    state: str
    """complete, unfinished, being deleted, set aside, or damaged: and how."""
    num_bytes: int
    """Of the files that are there."""
    manifest: Manifest | None
    """None: it cannot be read."""


def find_entries(place: Place) -> list[Path]:
    """Return the step's folder that `place` is, or all in it, or in a folder in it, by step and
    name.

    Raises:
        ConfigError: if there are none, or several folders in it hold some.
    """
    path = place.path
    if not path.is_dir():
        raise no_checkpoint(place)
    if (path / MANIFEST).is_file() or NAME.fullmatch(path.name):
        return [path]
    folders = [inner for inner in (path, *sorted(path.iterdir())) if _entries(inner)]
    folders = with_manifests(folders)
    names = ", ".join(map(str, folders))
    if not folders:
        raise no_checkpoint(place)
    place.check(
        path in folders or len(folders) == 1,
        f"holds several folders of checkpoints: {names}",
        "name one",
    )
    return _entries(folders[0])


def _entries(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (int(re.findall(r"\d+", path.name)[0]), path.name))


def look_at(path: Path) -> FoundCheckpoint:
    """Return a step's folder, of which no more is read than the manifest.

    Raises:
        FileNotFoundError: if a job deletes it meanwhile.
    """
    # a link may lead nowhere
    num_bytes = sum(file.stat().st_size for file in path.iterdir() if file.exists())
    match = NAME.fullmatch(path.name)
    suffix = match[2] if match else None
    state = STATES.get(suffix, "set aside")
    if suffix in ("unfinished", "deleted"):
        return FoundCheckpoint(path, state, num_bytes, None)
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(path)
        commit.inspect(path)
    except DamagedError as error:
        state = f"{state}, damaged: {error.what}" if suffix else f"damaged: {error.what}"
    except ConfigError:
        state = "of a later version of meshwright"
    return FoundCheckpoint(path, state, num_bytes, manifest)
