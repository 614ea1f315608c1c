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
from meshwright.checkpoint.commit import being_read
from meshwright.checkpoint.manifest import MANIFEST, DamagedError, Manifest, read_manifest
from meshwright.models.args import DecoderArgs
from meshwright.system.errors import ConfigError, where_it_ends
from meshwright.system.files import Place


class Opened(NamedTuple):
    """A checkpoint that may be read."""

    place: Place
    """Its step's folder."""
    manifest: Manifest


def find_candidates(place: Place) -> list[Place]:
    """Return the step's folder that `place` is, or all in it, or all in a folder in it (which is
    how a dump folder has them), the newest first; nothing if there is none.

    Raises:
        ConfigError: if several folders in it hold checkpoints.
    """
    path = place.path
    if (path / MANIFEST).is_file() or commit.STEP_FOLDER.fullmatch(path.name):
        is_partial = path.name.endswith((commit.UNFINISHED, commit.DELETED))
        place.check(not is_partial, "is not a complete checkpoint")
        return [place] if path.is_dir() else []
    if not path.is_dir():
        return []
    folders = [path] if commit.saved_steps(path) else []
    folders = folders or [inner for inner in sorted(path.iterdir()) if commit.saved_steps(inner)]
    folders = with_manifests(folders)
    if not folders:
        return []
    names = ", ".join(str(folder) for folder in folders)
    place.check(len(folders) == 1, f"holds several folders of checkpoints: {names}", "name one")
    steps = reversed(commit.saved_steps(folders[0]))
    return [Place(place.key, commit.step_folder(folders[0], step)) for step in steps]


def with_manifests(folders: list[Path]) -> list[Path]:
    """Return the folders in which a step has a manifest, or all if none has: {dump_folder}/hf holds
    models of another format."""
    return [one for one in folders if any(one.glob(f"*/{MANIFEST}"))] or folders


def no_checkpoint(place: Place) -> ConfigError:
    """Return the error of a path without a checkpoint in it."""
    if not place.path.exists():
        return place.error("no such folder", where_it_ends(place.path))
    return place.error("holds no checkpoint", "name a job.dump_folder, or a step's folder in it")


def find_checkpoint(place: Place, damaged: Mapping[Path, str] | None = None) -> Opened | None:
    """Return the step's folder that `place` is, or the newest in it whose files are all there in
    full; their content is not read. None if `place` holds no checkpoint at all.

    Args:
        damaged: folders that are known to be, and how.

    Raises:
        ConfigError: if the one that is named is damaged, or all are.
    """
    candidates = find_candidates(place)
    passed_over: list[str] = []
    for found in candidates:
        try:
            if damaged and found.path in damaged:
                raise DamagedError(found.path, damaged[found.path])
            return Opened(found, commit.inspect(found.path))
        except DamagedError as error:
            passed_over.append(f"{found.path.name}: {error.what}")
    if not candidates:
        return None
    raise _all_damaged(place, candidates, passed_over)


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
    candidates = find_candidates(place)
    if not candidates:
        raise no_checkpoint(place)
    passed_over: list[str] = []
    with ExitStack() as stack:
        for found in candidates:
            try:
                with ExitStack() as held:
                    held.enter_context(being_read(found.path))
                    manifest = commit.inspect(found.path)
                    files = sorted(manifest["files"]) if names is None else names
                    if wrong := commit.verify(found.path, manifest, files):
                        raise DamagedError(found.path, "; ".join(wrong))
                    stack.push(held.pop_all())
                break
            except DamagedError as error:
                passed_over.append(f"{found.path.name}: {error.what}")
        else:
            raise _all_damaged(place, candidates, passed_over)
        for what in passed_over:
            say(f"passed over {what}")
        yield Opened(found, manifest)


def _all_damaged(place: Place, candidates: list[Place], passed_over: list[str]) -> ConfigError:
    if candidates == [place]:
        what = passed_over[0].partition(": ")[2]
        return place.error(f"is damaged: {what}", "name another step's folder")
    return place.error(f"every checkpoint in it is damaged: {'; '.join(passed_over)}")


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
