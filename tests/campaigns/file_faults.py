"""Faults of the file system under a job, for `interruptions.py --file-faults`.

Each is a function that starts the job into a folder, does harm, and gives back the exit codes that
are right. What the job must then still be is checked by the caller: every figure and tensor equal,
every checkpoint whole, nothing of the user's gone.
"""

import errno
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from meshwright.checkpoint import listing
from meshwright.system.errors import EXIT_CONFIG, EXIT_SAVE

SHIM = Path(__file__).parent / "faulty_files"
NUMBERS = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
ROOM = "16m"
"""Of the small disk: a checkpoint of the job has 1.8 MB, and three are kept."""


class Start(Protocol):
    """A start of the job; see `interruptions.Start`."""

    folder: Path
    console: Path
    is_over: bool
    has_begun: bool
    is_saving: bool

    def ranks(self) -> list[int]: ...
    def end(self) -> int: ...
    def kill(self) -> None: ...


Starter = Callable[..., Start]
"""(folder, **environment) -> a start of the job."""
Fault = Callable[[Starter, Path, random.Random], str]
"""Runs the job, to its end if it can; in words, what was done. Raises `WrongError`."""


class WrongError(Exception):
    """The job did not do what it should."""


def expect(start: Start, codes: tuple[int, ...], said: str = "") -> int:
    """Wait for the end of a start; return its exit code, which is one of `codes`.

    Args:
        said: a regular expression that has to be found on the console, unless the code is 0.
    """
    code = start.end()
    console = start.console.read_text()
    if code not in codes:
        raise WrongError(f"exit code {code}, not one of {codes}\n{console}")
    if code and said and not re.search(said, console, re.DOTALL):
        raise WrongError(f"{said!r} is not on the console\n{console}")
    return code


def wait_for_steps(start: Start, chance: random.Random) -> None:
    """Return at a random time of the steps, often in a save."""
    while not (start.is_over or start.has_begun):
        time.sleep(0.01)
    end = time.monotonic() + chance.uniform(0, 1.5)
    while not start.is_over and time.monotonic() < end:
        time.sleep(0.01)
    if chance.random() < 0.5:
        while not (start.is_over or start.is_saving):
            time.sleep(0.001)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own for the checkpoints, until the end."""
    checkpoints = folder / "checkpoint"
    checkpoints.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", checkpoints], check=True)
    try:
        yield checkpoints
    finally:
        kept = folder / "kept"
        shutil.copytree(checkpoints, kept, symlinks=True)
        subprocess.run(["umount", "--lazy", checkpoints], check=True)
        checkpoints.rmdir()
        kept.rename(checkpoints)


def full(begin: Starter, folder: Path, chance: random.Random) -> str:
    """The disk fills up, and is emptied again."""
    with small_disk(folder) as checkpoints:
        start = begin(folder)
        times = 0
        while not start.is_over and times < 3:
            wait_for_steps(start, chance)
            with open(checkpoints / "filler", "wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))
            time.sleep(chance.uniform(0.2, 1.5))
            (checkpoints / "filler").unlink()
            times += 1
        if expect(start, (0, EXIT_SAVE), "could not be written: .*No space left"):
            expect(begin(folder), (0,))
    return f"full {times} times"


def read_only(begin: Starter, folder: Path, chance: random.Random) -> str:
    """The file system becomes read-only, and writable again."""
    with small_disk(folder) as checkpoints:
        start = begin(folder)
        wait_for_steps(start, chance)
        # refused while a file is open for writing
        while not start.is_over and _remount(checkpoints, "ro"):
            time.sleep(0.001)
        time.sleep(chance.uniform(0.5, 2))
        _remount(checkpoints, "rw")
        if expect(start, (0, EXIT_SAVE), "could not be written: .*Read-only"):
            expect(begin(folder), (0,))
    return "read-only for a while"


def _remount(checkpoints: Path, how: str) -> int:
    words = ["mount", "-o", f"remount,{how}", checkpoints]
    return subprocess.run(words, check=False, capture_output=True).returncode


def _with_shim(fault: str, begin: Starter, folder: Path, chance: random.Random, said: str) -> str:
    """Run with the shim, be killed once, and run on with it."""
    start = begin(folder, FILE_FAULT=fault)
    wait_for_steps(start, chance)
    if chance.random() < 0.5:
        start.kill()
        start.end()
        start = begin(folder, FILE_FAULT=fault)
    expect(start, (0,))
    if said not in start.console.read_text():
        raise WrongError(f"{said!r} is not on the console\n{start.console.read_text()}")
    return fault


def slow(begin: Starter, folder: Path, chance: random.Random) -> str:
    """Flushing, renaming and deleting take long."""
    return _with_shim(f"slow:{chance.uniform(0.05, 0.3):.2f}", begin, folder, chance, "")


def no_flock(begin: Starter, folder: Path, chance: random.Random) -> str:
    """A file system without flock."""
    fault = f"no_flock:{chance.choice(NUMBERS)}"
    return _with_shim(fault, begin, folder, chance, "has no flock")


def no_folder_fsync(begin: Starter, folder: Path, chance: random.Random) -> str:
    """A file system that flushes no folders; or no files either."""
    kind = chance.choice(("no_folder_fsync", "no_fsync"))
    fault = f"{kind}:{chance.choice(NUMBERS)}"
    return _with_shim(fault, begin, folder, chance, "cannot flush a folder to the disk")


def stray_files(begin: Starter, folder: Path, chance: random.Random) -> str:
    """Files and folders of the user's, with names like ours."""
    checkpoints = folder / "checkpoint"
    checkpoints.mkdir(parents=True)
    names = [
        *("step-5.unfinished", "step-10.deleted", "x.unfinished", "step-007", "step-10", "step-99"),
        *("step-15.aside0", "step-5", "job.lock.x", "checkpoint.json"),
    ]
    chosen = chance.sample(names, 4)
    start = begin(folder) if chance.random() < 0.5 else None
    if start is not None:
        wait_for_steps(start, chance)
    left = []
    for name in chosen:
        path = checkpoints / name
        if path.exists():
            continue
        # a folder with a checkpoint's name and nothing else there is damage, and refused as such
        is_refused = listing.step_of(name) is not None and start is None
        if chance.random() < 0.5 and not is_refused:
            path.mkdir()
            path = path / "notes"
        path.write_text(f"the user's {name}")
        left.append(name)
    expect(start or begin(folder), (0,))
    contents = [path.read_text() for path in checkpoints.rglob("*") if _is_users(path)]
    for name in left:
        if f"the user's {name}" not in contents:
            raise WrongError(f"the user's {name} is gone; there is {contents}")
    return "stray files"


def _is_users(path: Path) -> bool:
    """Whether it is none of the files of a checkpoint."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(10) == b"the user's"


def links(begin: Starter, folder: Path, chance: random.Random) -> str:
    """The folder is a link; a checkpoint was moved elsewhere; links that lead nowhere."""
    elsewhere = folder.with_name(f"{folder.name}_elsewhere")
    elsewhere.mkdir()
    folder.mkdir()
    checkpoints = folder / "checkpoint"
    checkpoints.symlink_to(elsewhere)
    (elsewhere / "step-15").symlink_to("nowhere")
    (elsewhere / "step-20.unfinished").symlink_to("step-20.unfinished")
    start = begin(folder)
    wait_for_steps(start, chance)
    start.kill()
    start.end()
    moved = listing.saved_steps(checkpoints)
    if moved:
        newest = listing.step_folder(elsewhere, moved[-1])
        target = folder / "moved"
        shutil.move(newest, target)
        newest.symlink_to(target)
    expect(begin(folder), (0,))
    if moved and not (folder / "moved" / "checkpoint.json").is_file():
        raise WrongError("a checkpoint that was linked was deleted where it lies")
    return "links" + (", of a checkpoint too" if moved else "")


def two_jobs(begin: Starter, folder: Path, chance: random.Random) -> str:
    """A second job beside the first; or after it was killed, at once."""
    first = begin(folder)
    wait_for_steps(first, chance)
    if chance.random() < 0.5:
        first.kill()
        second = begin(folder, console=folder.with_suffix(".second.log"))
        expect(second, (0,))
        first.end()
        return "a job right after one that was killed"
    second = begin(folder, console=folder.with_suffix(".second.log"))
    code = expect(second, (0, EXIT_CONFIG), "another job uses ")
    first_code = expect(first, (0,))
    if code == first_code == 0 and "nothing to do" not in second.console.read_text():
        raise WrongError(f"both jobs trained\n{second.console.read_text()}")
    return "two jobs at once"


def blind_rank(begin: Starter, folder: Path, chance: random.Random) -> str:
    """One rank does not see the folder that the others see."""
    start = begin(folder)
    wait_for_steps(start, chance)
    while not (start.is_over or listing.saved_steps(folder / "checkpoint")):
        time.sleep(0.01)
    start.kill()
    start.end()
    blind = begin(folder, FILE_FAULT=f"blind:{folder / 'checkpoint'}")
    expect(blind, (EXIT_CONFIG,), "on a file system that all nodes share")
    expect(begin(folder), (0,))
    return "a rank that does not see the folder"


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        *(full, read_only, slow, no_flock, no_folder_fsync, stray_files, links, two_jobs),
        blind_rank,
    )
}
NEED_ROOT = (full, read_only, blind_rank)


def possible() -> list[str]:
    """Names of the faults that this user can plant."""
    return [name for name, fault in FAULTS.items() if os.geteuid() == 0 or fault not in NEED_ROOT]
