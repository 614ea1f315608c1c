"""Deletes old checkpoints while training continues, and only files that are ours. Free of torch."""

import fcntl
import json
import secrets
import shutil
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

from meshwright.checkpoint import commit
from meshwright.checkpoint.integrity import RISK, inspect
from meshwright.checkpoint.listing import DELETED, entries, saved_steps, step_folder
from meshwright.checkpoint.manifest import MANIFEST, DamagedError, read_manifest
from meshwright.system.errors import ConfigError, StorageError, config_error
from meshwright.system.files import lock, only_warn, whole_file
from meshwright.system.log import logger

BEST_FILE = "best.json"


class Retention:
    """Deletes, in its own thread, old checkpoints in a folder.

    Deleting takes minutes on some file systems, and other ranks would wait for the first. What
    fails is a warning, and is tried again after the next save.
    """

    def __init__(
        self, folder: Path, keep_latest_k: int, keep_every_n_steps: int, keep_best: bool
    ) -> None:
        self._folder = folder
        self._kept = keep_latest_k, keep_every_n_steps
        self._keep_best = keep_best
        self._thread = ThreadPoolExecutor(1, "retention")
        self._last: Future[None] | None = None
        self.nonce = ""
        """Of the save under way, whose folder isn't to be deleted."""

    def clean_up(self, job: str = "") -> None:
        """Start to remove the leftovers of killed saves and deletions; if `job` is given, only of
        the saves whose nonces start with it."""
        self._submit(
            lambda: clean_up(
                self._folder, lambda nonce: nonce == self.nonce or not nonce.startswith(job)
            )
        )

    def apply(self) -> None:
        """Start to delete old checkpoints as well."""
        self.clean_up()
        self._submit(self._apply)

    def wait(self) -> None:
        """Wait until the deletions under way are done."""
        if self._last is not None:
            self._last.result()

    def _submit(self, task: Callable[[], None]) -> None:
        self._last = self._thread.submit(self._run, task)

    def _run(self, task: Callable[[], None]) -> None:
        try:
            task()
        except (OSError, StorageError) as error:
            logger.warning("%s could not be cleaned up: %s", self._folder, error)

    def _apply(self) -> None:
        best = mark_best(self._folder) if self._keep_best else None
        for step in apply_retention(self._folder, *self._kept, best):
            checkpoint = step_folder(self._folder, step)
            logger.info("%s is being read: it is deleted later", checkpoint)


def mark_best(folder: Path) -> int | None:
    """Write the checkpoint with the lowest validation loss to `BEST_FILE`; return its step.

    If the newest checkpoint knows of none, as after a resume with other validation data, it is
    still the one that the file gives. None: there is none, or it isn't there.
    """
    steps = saved_steps(folder)
    try:
        best = inspect(step_folder(folder, steps[-1]))["best_validation"] if steps else None
    except ConfigError:  # the newest is damaged, or of a later version
        return None
    if best is None:
        return _marked(folder, steps)
    if best[0] not in steps:
        return None
    step, loss = int(best[0]), best[1]
    marked = {"step": step, "validation_loss": loss, "checkpoint": step_folder(folder, step).name}
    with whole_file(folder / BEST_FILE) as file:
        file.write(f"{json.dumps(marked)}\n".encode())
    return step


def _marked(folder: Path, steps: Sequence[int]) -> int | None:
    """The step that `BEST_FILE` names, if it is one of `steps`."""
    try:
        step = json.loads((folder / BEST_FILE).read_text("utf-8"))["step"]
    except (OSError, ValueError, KeyError, TypeError):  # it isn't there, or was tampered with
        return None
    return step if step in steps else None


def apply_retention(
    folder: Path, keep_latest_k: int, keep_every_n_steps: int = 0, best: int | None = None
) -> list[int]:
    """Delete checkpoints that are no longer wanted; return the steps of those being read, which go
    another time.

    Kept are the newest `keep_latest_k` (0: all), multiples of `keep_every_n_steps`, `best`, and the
    newest that is whole and whose loss was finite. A link, a folder without a manifest, and a
    checkpoint that was renamed are a user's: they are neither counted nor deleted.
    """
    if keep_latest_k == 0:
        return []
    steps = saved_steps(folder)
    is_ours = partial(_is_ours, folder)  # a look takes long: none at those that stay anyway
    newest = [*islice(filter(is_ours, reversed(steps)), keep_latest_k)]
    ours = filter(is_ours, reversed(steps))
    good = next((step for step in ours if _is_good(step_folder(folder, step))), None)
    old = (
        step
        for step in steps[: bisect_left(steps, min(newest, default=0))]
        if step not in (good, best) and (not keep_every_n_steps or step % keep_every_n_steps)
    )
    spared = []
    for step in filter(is_ours, old):
        with only_warn("an old checkpoint could not be deleted"):
            if not _delete(step_folder(folder, step)):
                spared.append(step)
    return spared


def _is_ours(folder: Path, step: int) -> bool:
    checkpoint = step_folder(folder, step)
    if checkpoint.is_symlink() or not (checkpoint / MANIFEST).is_file():
        return False
    try:
        return read_manifest(checkpoint)["step"] == step
    except DamagedError:
        return True
    except ConfigError:  # of a later version
        return False


def _is_good(checkpoint: Path) -> bool:
    try:
        return inspect(checkpoint)["loss"] is not None
    except DamagedError:
        return False


def _delete(checkpoint: Path) -> bool:
    """Delete a checkpoint, unless someone reads it: then return False. If killed meanwhile, the
    rest no longer counts as one."""
    # writable, for NFS gives an exclusive lock for nothing else
    with open(checkpoint / MANIFEST, "r+b") as file:
        if not lock(file, fcntl.LOCK_EX, checkpoint / MANIFEST, RISK):
            return False
        name = f"{checkpoint.name}.{secrets.token_hex(8)}{DELETED}"
        renamed = checkpoint.rename(checkpoint.with_name(name))
    shutil.rmtree(renamed)  # not while a file in it is open: NFS would keep that, and the folder
    return True


MOST_ASIDE = 3
"""How often one step may be set aside by jobs that `load_step` starts in the past."""


def set_aside_later(folder: Path, step: int, *, is_named: bool) -> None:
    """Rename the checkpoints after `step`, so that they count no longer.

    They belong to a run that isn't continued: among the checkpoints of this run they would be
    taken for its newest.

    Args:
        is_named: by `load_step`. A scheduler that restarts such a job would have every start throw
            away the steps of the one before, and fill the disk with them.

    Raises:
        ConfigError: if one can't be renamed; or if `is_named`, and one has been set aside
            `MOST_ASIDE` times.
    """
    try:
        later = {each: step_folder(folder, each) for each in saved_steps(folder) if each > step}
        for each, path in later.items() if is_named else ():
            if path.with_name(f"{path.name}.aside{MOST_ASIDE - 1}").exists():
                rule = f"step {each} has been set aside {MOST_ASIDE} times, since each start with "
                rule += "this key trains it again"
                fix = f"leave it out to resume from the newest, or delete {folder}/*.aside*"
                raise config_error("checkpoint.load_step", step, rule, fix)
        # this run's own step of that number is another; before, so that a kill leaves no name of it
        if _marked(folder, [*later]) is not None:
            (folder / BEST_FILE).unlink()
        for path in later.values():
            logger.info("set aside a later checkpoint as %s", commit.set_aside(path))
    except OSError as error:
        what = f"checkpoints after step {step} cannot be set aside: {error}"
        fix = f"make {folder} writable, or remove them"
        raise ConfigError(
            "checkpoint.folder",
            f"{what}; the next resume would take them for this job's\n  fix: {fix}",
        ) from None


def clean_up(folder: Path, is_in_use: Callable[[str], bool] = lambda nonce: False) -> None:
    """Remove the leftovers of killed saves and deletions; warn of any that can't be removed.

    Args:
        is_in_use: whether a save with this nonce is under way.
    """
    for _, path, _, nonce in entries(folder):
        if not nonce or path.is_symlink() or is_in_use(nonce):
            continue
        # where it is gone, it is complete now, or somebody was faster
        words = "%s, left by a killed job, could not be removed"
        with only_warn(words, path), suppress(FileNotFoundError):
            shutil.rmtree(path)
