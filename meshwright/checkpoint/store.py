"""Lists checkpoints, and opens the one that a job or a path means: it is chosen, verified, and held
while it is read. Free of torch.
"""

import os
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from meshwright.checkpoint.integrity import being_read, inspect, verify
from meshwright.checkpoint.listing import (
    DELETED,
    NAME,
    UNFINISHED,
    entries,
    saved_steps,
    step_folder,
    step_of,
)
from meshwright.checkpoint.manifest import MANIFEST, DamagedError, Manifest
from meshwright.config.job_config import Checkpoint
from meshwright.models.args import DecoderArgs
from meshwright.system.errors import ConfigError, check, where_it_ends
from meshwright.system.files import NamedPath

T = TypeVar("T")


class Saved(NamedTuple):
    """A checkpoint that was chosen: the one that is named, or the newest good one."""

    place: NamedPath
    """Its step's folder."""
    manifest: Manifest


Judge = Callable[[Path], Manifest]
"""Returns the manifest of a checkpoint, or raises `DamagedError`."""


def select(
    place: NamedPath,
    candidates: Sequence[Path],
    judge: Judge = inspect,
    say: Callable[[str], object] = lambda line: None,
) -> Saved:
    """Return the first of `candidates` that isn't damaged.

    Args:
        place: of the one that is named, or of the folder that holds them.
        judge: by default, files that are all there in full are good, though their content isn't
            read.
        say: is told which are skipped, and why.

    Raises:
        ConfigError: if there are none; if all are damaged: starting over would be a surprise.
    """
    if not candidates:
        raise no_checkpoint(place)
    passed_over: dict[Path, str] = {}
    for path in candidates:
        try:
            saved = Saved(NamedPath(place.key, path), judge(path))
        except DamagedError as error:
            passed_over[path] = error.what
            continue
        for newer, what in passed_over.items():
            say(f"skipped {newer}, which is damaged: {what}")
        return saved
    if place.path in passed_over:
        raise place.error(f"is damaged: {passed_over[place.path]}", "choose another step's folder")
    each = "; ".join(f"{path.name}: {what}" for path, what in passed_over.items())
    fix = "restore one of them, or choose a different folder"
    raise place.error(f"every checkpoint in it is damaged: {each}", fix)


def of_job(folder: Path, config: Checkpoint) -> tuple[NamedPath, list[Path]]:
    """Return what `select` takes of a job's folder: the checkpoint of `load_step`; otherwise all,
    or those up to `rewind_to`; none if checkpoints are off. Raises `ConfigError` if none is there
    that a key names."""
    if not config.enable:
        return NamedPath("job.dump_folder", folder), []
    steps, place = saved_steps(folder), NamedPath("job.dump_folder", folder)
    there = ", ".join(map(str, steps)) or "none"
    if config.load_step != -1:
        rule = f"not among the checkpoints in {folder}: {there}"
        fix = "name one of them, or -1 for the newest"
        check(config.load_step in steps, "checkpoint.load_step", config.load_step, rule, fix)
        steps = [config.load_step]
        place = NamedPath("checkpoint.load_step", step_folder(folder, config.load_step))
    elif (last := config.rewind_to) != -1 and not _is_rewound(folder, steps, last):
        fix = "name a later step" if steps else "leave it out"
        steps = [step for step in steps if step <= last]
        rule = f"no checkpoint in {folder} is so early: {there}"
        check(bool(steps), "checkpoint.rewind_to", last, rule, fix)
    return place, [step_folder(folder, step) for step in reversed(steps)]


def _is_rewound(folder: Path, steps: Sequence[int], last: int) -> bool:
    """Return whether the newest good one of `steps` was saved by a job with this `rewind_to`."""
    for step in reversed(steps):
        try:
            saved = inspect(step_folder(folder, step))["config"].get("checkpoint", {})
        except DamagedError:
            continue
        return bool(saved.get("rewind_to", -1) == last)
    return False


def list_checkpoints(place: NamedPath) -> list[Path]:
    """Return the step's folder that `place` is, or all in it or in a folder in it (a dump folder),
    by step and name, whatever has become of them. Raises `ConfigError` if several folders in it
    hold some."""
    path = place.path
    if not path.is_dir():
        return []
    is_of_hf = (path / "config.json").is_file()  # as in {dump_folder}/hf/step-N
    if (path / MANIFEST).is_file() or (NAME.fullmatch(path.name) and not is_of_hf):
        return [path]
    within = [*_folder_of_job(path), *sorted(path.iterdir())]
    # by their places: the config, or a link, may name one of them once more
    places = {os.path.realpath(one): one for one in within}
    folders = [path] if entries(path) else [one for one in places.values() if entries(one)]
    # {dump_folder}/hf holds models of a different format
    folders = [one for one in folders if any(one.glob(f"*/{MANIFEST}"))] or folders
    names = ", ".join(map(str, folders))
    place.check(len(folders) < 2, f"holds several folders of checkpoints: {names}", "name one")
    return [entry.path for folder in folders for entry in entries(folder)]


def _folder_of_job(dump_folder: Path) -> list[Path]:
    """Return where the job keeps its checkpoints, by its config: an absolute path is elsewhere."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        config = tomllib.loads((dump_folder / "config.toml").read_text("utf-8"))
        return [dump_folder / config["checkpoint"]["folder"]]
    return []


def find_candidates(place: NamedPath) -> list[Path]:
    """Return the complete ones of `list_checkpoints`, the newest first; raises as that, and if
    `place` is one that isn't complete."""
    is_partial = place.path.name.endswith((UNFINISHED, DELETED))  # being written, or deleted
    place.check(not is_partial, "is not a complete checkpoint", "choose another step's folder")
    paths = list_checkpoints(place)
    if paths == [place.path]:
        return paths
    return [path for path in reversed(paths) if step_of(path.name) is not None]


def no_checkpoint(place: NamedPath) -> ConfigError:
    if not place.path.exists():
        return place.error("no such folder", where_it_ends(place.path))
    return place.error("holds no checkpoint", "name a job.dump_folder, or a step's folder in it")


class Readers:
    """The processes that judge a checkpoint together: this one alone. `on_ranks.AllRanks` are all
    ranks of a job."""

    def on_first(self, ask: Callable[[], T]) -> T:
        """Return what `ask` does in one of them."""
        return ask()

    def on_every(self, ask: Callable[[], T]) -> list[T]:
        """Return what `ask` does in each of them."""
        return [ask()]

    def own_part(self, files: Sequence[str]) -> Sequence[str]:
        """Return the files that this one reads, so that each is read by one of them."""
        return files


ALONE = Readers()


@contextmanager
def open_checkpoint(
    place: NamedPath,
    say: Callable[[str], object],
    names: Sequence[str] | None = None,
    *,
    candidates: Sequence[Path] | None = None,
    readers: Readers = ALONE,
) -> Iterator[Saved]:
    """Give the checkpoint that `place` means, in a folder of several the newest good one. Its
    content was compared with its checksums, and no job's retention deletes it meanwhile.
    Collective over `readers`.

    Args:
        say: is told which are skipped, and why, in one of the processes.
        names: files whose content is read; None: all.
        candidates: the newest first; None: of `place`.

    Raises:
        ConfigError: if there is none, if the one that is named is damaged, or if all are.
        StorageError: if a process can't read its part now. Either is raised in all of them.
    """
    with ExitStack() as held:

        def damage(path: Path, manifest: Manifest) -> list[str]:
            held.enter_context(being_read(path))  # a job may just have deleted it
            files = sorted(manifest["files"]) if names is None else names
            return verify(path, manifest, readers.own_part(files))

        def judge(path: Path) -> Manifest:
            manifest = readers.on_first(partial(inspect, path))
            parts = readers.on_every(partial(damage, path, manifest))
            if wrong := "; ".join(what for part in parts for what in part):
                held.close()
                raise DamagedError(path, wrong)
            return manifest

        if candidates is None:
            candidates = readers.on_first(partial(find_candidates, place))
        yield select(place, candidates, judge, lambda line: readers.on_first(partial(say, line)))


def saved_args(place: NamedPath, manifest: Manifest, kind: type[DecoderArgs]) -> DecoderArgs:
    """Return the dimensions of the model that the checkpoint is of, of the family's class `kind`.

    Raises:
        ConfigError: if it doesn't say, or says more than its files can hold.
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
