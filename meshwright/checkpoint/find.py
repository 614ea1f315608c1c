"""Finds the checkpoint that a job or a path means, verifies it, and holds it while it is read.

Free of torch.
"""

import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from meshwright.checkpoint import commit
from meshwright.checkpoint.commit import NAME, being_read, entries, inspect, saved_steps, step_of
from meshwright.checkpoint.manifest import MANIFEST, DamagedError, Manifest
from meshwright.config.job_config import Checkpoint
from meshwright.models.args import DecoderArgs
from meshwright.system.errors import ConfigError, check, where_it_ends
from meshwright.system.files import NamedPath


class Choice(NamedTuple):
    """A checkpoint that its judge has found good."""

    path: Path
    manifest: Manifest
    passed_over: dict[Path, str]
    """Newer ones that are damaged, and how."""


Judge = Callable[[Path], Manifest]
"""Returns the manifest of a checkpoint, or raises `DamagedError`. One process may judge, as
`commit.inspect` and `open_checkpoint` do, or all ranks together, as `on_ranks.select_on_ranks`."""


def select(place: NamedPath, candidates: Iterable[Path], judge: Judge = inspect) -> Choice | None:
    """Return the first of `candidates` that isn't damaged; None if there are no candidates.

    Args:
        place: of the one that is named, or of the folder that holds them.
        judge: by default, files that are all there in full are good, though their content isn't
            read.

    Raises:
        ConfigError: if all are damaged: starting over would be a surprise.
    """
    passed_over: dict[Path, str] = {}
    for path in candidates:
        try:
            return Choice(path, judge(path), passed_over)
        except DamagedError as error:
            passed_over[path] = error.what
    if place.path in passed_over:
        raise place.error(f"is damaged: {passed_over[place.path]}", "choose another step's folder")
    each = "; ".join(f"{path.name}: {what}" for path, what in passed_over.items())
    fix = "restore one of them, or choose a different folder"
    place.check(not passed_over, f"every checkpoint in it is damaged: {each}", fix)
    return None


def of_job(folder: Path, config: Checkpoint) -> tuple[NamedPath, list[Path]]:
    """Return what `select` takes of a job's folder: the checkpoint of `load_step`; otherwise all,
    or those up to `rewind_to`. Raises `ConfigError` if none is there that a key names."""
    steps, place = saved_steps(folder), NamedPath("job.dump_folder", folder)
    there = ", ".join(map(str, steps)) or "none"
    if config.load_step != -1:
        rule = f"not among the checkpoints in {folder}: {there}"
        fix = "name one of them, or -1 for the newest"
        check(config.load_step in steps, "checkpoint.load_step", config.load_step, rule, fix)
        steps = [config.load_step]
        place = NamedPath("checkpoint.load_step", commit.step_folder(folder, config.load_step))
    elif (last := config.rewind_to) != -1 and not _is_rewound(folder, steps, last):
        steps = [step for step in steps if step <= last]
        rule = f"no checkpoint in {folder} is so early: {there}"
        check(bool(steps), "checkpoint.rewind_to", last, rule, "name a later step")
    return place, [commit.step_folder(folder, step) for step in reversed(steps)]


def _is_rewound(folder: Path, steps: Sequence[int], last: int) -> bool:
    """Return whether the newest good one of `steps` was saved by a job with this `rewind_to`."""
    for step in reversed(steps):
        try:
            saved = inspect(commit.step_folder(folder, step))["config"].get("checkpoint", {})
        except DamagedError:
            continue
        return bool(saved.get("rewind_to", -1) == last)
    return False


def choose(folder: Path, config: Checkpoint) -> Choice | None:
    """Return the checkpoint of `of_job` whose files are all there in full; raises as that and as
    `select`."""
    return select(*of_job(folder, config))


def find_entries(place: NamedPath) -> list[Path]:
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
    """Return the complete ones of `find_entries`, the newest first; raises as that, and if `place`
    is one that isn't complete."""
    check_complete(place)
    paths = find_entries(place)
    if paths == [place.path]:
        return paths
    return [path for path in reversed(paths) if step_of(path.name) is not None]


def check_complete(place: NamedPath) -> None:
    """Raise `ConfigError` if it is a checkpoint that is being written or deleted."""
    is_partial = place.path.name.endswith((commit.UNFINISHED, commit.DELETED))
    place.check(not is_partial, "is not a complete checkpoint")


def no_checkpoint(place: NamedPath) -> ConfigError:
    if not place.path.exists():
        return place.error("no such folder", where_it_ends(place.path))
    return place.error("holds no checkpoint", "name a job.dump_folder, or a step's folder in it")


class Opened(NamedTuple):
    """A checkpoint that may be read."""

    place: NamedPath
    """Its step's folder."""
    manifest: Manifest


@contextmanager
def open_checkpoint(
    place: NamedPath, say: Callable[[str], None], names: Sequence[str] | None = None
) -> Iterator[Opened]:
    """Give the checkpoint that `place` means, in a folder of several the newest good one. Its
    content was compared with its checksums, and no job's retention deletes it meanwhile.

    Args:
        say: is told which are skipped, and why.
        names: files whose content is read; None: all.

    Raises:
        ConfigError: if there is none, if the one that is named is damaged, or if all are.
    """
    with ExitStack() as held:

        def judge(path: Path) -> Manifest:
            manifest = inspect(path)
            held.enter_context(being_read(path))  # a job may just have deleted it
            files = sorted(manifest["files"]) if names is None else names
            if wrong := commit.verify(path, manifest, files):
                held.close()
                raise DamagedError(path, "; ".join(wrong))
            return manifest

        choice = select(place, find_candidates(place), judge)
        if choice is None:
            raise no_checkpoint(place)
        for newer, what in choice.passed_over.items():
            say(f"skipped {newer.name}: {what}")
        yield Opened(NamedPath(place.key, choice.path), choice.manifest)


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
