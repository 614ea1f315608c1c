"""Signals and parents of a job's processes."""

import ctypes
import os
import signal
import sys
from types import FrameType

from meshwright.errors import EXIT_INTERRUPTED, EXIT_STOPPED

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
"""Signals that Slurm and others send some time before they kill; and Ctrl-C."""
FROM_LAUNCHER = "MESHWRIGHT_STOP_FILE"
"""Environment variable of the ranks that names a file on their machine: the launcher writes the
name of the signal there that it was sent. It does not pass the signal on: torchrun sends SIGTERM to
the ranks of a job that has failed, and a rank could not tell which it is."""
LAUNCHER = "MESHWRIGHT_LAUNCHER"
"""Environment variable of the ranks: process number of the launcher that started them."""
HOST_SETTINGS = "MESHWRIGHT_HOST_SETTINGS"
"""Environment variable of the ranks: the variables that the launcher has chosen for the machine."""
HEARTBEATS = "MESHWRIGHT_HEARTBEATS"
"""Environment variable of the ranks: folder on their machine where the launcher looks for their
last phase."""
CHECKED = "MESHWRIGHT_CHECKED"
"""Environment variable of the ranks: `meshwright check` has written to the same console."""
GPUS_EXPECTED = "MESHWRIGHT_GPUS"
"""Environment variable of the ranks: GPUs of this machine, as the launcher counted them."""
OTHER_MALLOC = ("LD_PRELOAD", "GLIBC_TUNABLES")
"""Environment variables by which users choose an allocator of memory on CPUs, or settings of
glibc's. The launcher and the ranks then choose none."""

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def stop_signals() -> list[signal.Signals]:
    """Return those to heed: a shell without job control has its background ignore Ctrl-C."""
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return [n for n in STOP_SIGNALS if n != signal.SIGINT or not is_ignored]


def exit_when_asked() -> None:
    """End this process at once when it is asked to stop: there is nothing to save yet."""
    for number in stop_signals():
        signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_STOPPED)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, SIGKILL included (Linux only).

    Args:
        parent: process number of who started it: it may have died by now.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
