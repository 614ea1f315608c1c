"""The launcher before there are ranks."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from meshwright.errors import EXIT_STOPPED


def running_with(word: str) -> list[str]:
    """Process numbers of those that have `word` among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if word.encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found


def test_a_signal_before_there_are_ranks_ends_the_preparation_too(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    os.mkfifo(config)
    command = ("meshwright.launch.door", "--prepare", "1", "train.py", "--job.config_file")
    door = subprocess.Popen([sys.executable, "-m", *command, str(config)])
    with config.open("w"):  # once the preparation reads it, which then waits
        door.terminate()
        assert door.wait(30) == EXIT_STOPPED
        until = time.monotonic() + 10
        while running_with(str(config)) and time.monotonic() < until:
            time.sleep(0.01)
        assert not running_with(str(config))
