"""Which checkpoint of ours a path means, and how to read it: verified, and held meanwhile. Free of
torch."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from meshwright.checkpoint import commit
from meshwright.checkpoint.commit import Choice, being_read
from meshwright.checkpoint.manifest import MANIFEST, DamagedError, Manifest, read_manifest
from meshwright.models.args import DecoderArgs
from meshwright.system.errors import ConfigError, where_it_ends
from meshwright.system.files import ABSENT, Place, read_patiently


class Opened(NamedTuple):
    """A checkpoint that may be read."""

    place: Place
    """Its step's folder."""
    manifest: Manifest


NAME = re.compile(
    rf"{commit.STEP_FOLDER.pattern}(?:\.[0-9a-f]{{16}}\.(unfinished|deleted)|\.aside\d+)?"
)


def find_entries(place: Place) -> list[Path]:
    """Return the step's folder that `place` is, or all in it, or all in a folder in it (which is
    how a dump folder has them), by step and name, whatever has become of them.

    Raises:
        ConfigError: if several folders in it hold some.
    """
    path = place.path
    if not path.is_dir():
        return []
    if (path / MANIFEST).is_file() or NAME.fullmatch(path.name):
        return [path]
    folders = [path] if _entries(path) else [one for one in sorted(path.iterdir()) if _entries(one)]
    # {dump_folder}/hf holds models of another format
    folders = [one for one in folders if any(one.glob(f"*/{MANIFEST}"))] or folders
    names = ", ".join(map(str, folders))
    place.check(len(folders) < 2, f"holds several folders of checkpoints: {names}", "name one")
    return _entries(folders[0]) if folders else []


def _entries(folder: Path) -> list[Path]:
    try:
        paths = read_patiently(folder, lambda: [*folder.iterdir()])
    except ABSENT:
        return []
    found = [path for path in paths if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (int(re.findall(r"\d+", path.name)[0]), path.name))


def find_candidates(place: Place) -> list[Path]:
    """Return the step's folder that `place` is, or all complete ones of `find_entries`, the newest
    first.

    Raises:
        ConfigError: if it is not complete, or several folders in it hold some.
    """
    check_complete(place)
    entries = find_entries(place)
    if entries == [place.path]:
        return entries
    return [path for path in reversed(entries) if commit.STEP_FOLDER.fullmatch(path.name)]


def check_complete(place: Place) -> None:
    """Raise `ConfigError` if it is a checkpoint that is being written or deleted."""
    is_partial = place.path.name.endswith((commit.UNFINISHED, commit.DELETED))
    place.check(not is_partial, "is not a complete checkpoint")


def no_checkpoint(place: Place) -> ConfigError:
    """Return the error of a path without a checkpoint in it."""
    if not place.path.exists():
        return place.error("no such folder", where_it_ends(place.path))
    return place.error("holds no checkpoint", "name a job.dump_folder, or a step's folder in it")


def find_checkpoint(place: Place, damaged: Mapping[Path, str]) -> Choice | None:
    """Return the step's folder that `place` is, or as `commit.choose_newest` of those in it.

    Raises:
        ConfigError: if the one that is named is damaged, or all are.
    """
    candidates = find_candidates(place)

    def error_of(passed_over: dict[Path, str]) -> ConfigError:
        if candidates == [place.path]:
            what = passed_over[place.path]
            return place.error(f"is damaged: {what}", "name another step's folder")
        each = "; ".join(f"{path.name}: {what}" for path, what in passed_over.items())
        return place.error(f"every checkpoint in it is damaged: {each}")

    return commit.choose_newest(candidates, damaged, error_of)


@contextmanager
def open_checkpoint(
    place: Place, say: Callable[[str], None], names: Sequence[str] | None = None
) -> Iterator[Opened]:
    """Give the checkpoint that `place` means, every byte of which was compared with its checksum,
    and keep every job's retention from deleting it meanwhile.

    In a folder of several it is the newest that is good.

    Args:
        say: is told which are passed over, and why.
        names: files whose content is read; None: all.

    Raises:
        ConfigError: if there is none, if the one that is named is damaged, or if all are.
    """
    damaged: dict[Path, str] = {}
    with ExitStack() as held:
        while True:
            choice = find_checkpoint(place, damaged)
            if choice is None:
                raise no_checkpoint(place)
            path, manifest, passed_over = choice
            try:
                held.enter_context(being_read(path))
                files = sorted(manifest["files"]) if names is None else names
                wrong = commit.verify(path, manifest, files)
            except DamagedError as error:  # a job has just deleted it
                wrong = [error.what]
            if not wrong:
                break
            held.close()
            damaged[path] = "; ".join(wrong)
        for newer, what in passed_over.items():
            say(f"passed over {newer.name}: {what}")
        yield Opened(Place(place.key, path), manifest)


def saved_args(place: Place, manifest: Manifest, kind: type[DecoderArgs]) -> DecoderArgs:
    """Return the dimensions of the model that the checkpoint is of.

    Args:
        kind: the args class of its family.

    Raises:
        ConfigError: if it does not say, or says more than its files can hold.
    """
    try:
        args = TypeAdapter(kind).validate_python(manifest["model_args"])
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise place.error(f"{MANIFEST} has no model_args of a model: {reason}") from None
    num_bytes = sum(record["bytes"] for record in manifest["files"].values())
    place.check(
        args.table.num_params <= num_bytes,  # a parameter has a byte at least
        f"{MANIFEST} has model_args of {args.table.num_params:,} parameters, but its files have "
        f"{num_bytes:,} bytes",
    )
    return args


STATES = {"unfinished": "unfinished", "deleted": "being deleted"}


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


def look_at(path: Path) -> FoundCheckpoint:
    """Return a step's folder, of which no more is read than the manifest.

    Raises:
        FileNotFoundError: if a job deletes it meanwhile.
    """
    # a link may lead nowhere
    num_bytes = sum(file.stat().st_size for file in path.iterdir() if file.exists())
    name = NAME.fullmatch(path.name)
    if name and name[2]:
        return FoundCheckpoint(path, STATES[name[2]], num_bytes, None)
    is_aside = ".aside" in path.name
    state = "set aside" if is_aside else "complete"
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(path)
        commit.inspect(path)
    except DamagedError as error:
        state = f"{state}, damaged: {error.what}" if is_aside else f"damaged: {error.what}"
    except ConfigError:
        state = "of a later version of meshwright"
    return FoundCheckpoint(path, state, num_bytes, manifest)
