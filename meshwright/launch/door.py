"""torchrun with the job's own exit code, and without its report of what the job has said.

python -m meshwright.launch.door [--prepare RANKS] TORCHRUN_ARGUMENTS train.py --job.config_file ...

Importing torch takes torchrun a second or more. With --prepare another process meanwhile checks the
job for so many ranks and tokenises what is not yet; no rank starts before that has succeeded.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from types import FrameType

from meshwright.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from meshwright.launch.process import CHECKED, stop_signals


def main() -> None:
    """Run the job. What asks it to stop before there is a rank ends it here."""
    preparation: subprocess.Popen[bytes] | None = None

    def end(number: int, frame: FrameType | None) -> None:
        if preparation is not None and preparation.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(preparation.pid, signal.SIGKILL)  # with those that tokenise for it
        os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_STOPPED)

    def end_if_failed(number: int = 0, frame: FrameType | None = None) -> None:
        if preparation is not None and (code := preparation.poll()):
            os._exit(code if code > 0 else 128 - code)

    for number in stop_signals():
        signal.signal(number, end)
    # asks ranks for their stacks; who sends it to all that runs train.py means no harm
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if sys.argv[1] == "--prepare":
        _, ranks = sys.argv.pop(1), sys.argv.pop(1)
        signal.signal(signal.SIGCHLD, end_if_failed)  # at once, not after the import
        preparation = _prepare(ranks, sys.argv[sys.argv.index("--job.config_file") :])
    from meshwright.launch.torchrun import launch  # takes seconds, for torch

    if preparation is not None:
        preparation.wait()
        end_if_failed()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ[CHECKED] = "1"
    launch()


def _prepare(ranks: str, config: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "meshwright.cli.prepare", ranks, *config]
    return subprocess.Popen(command, process_group=0)  # Ctrl-C is for this process to heed


if __name__ == "__main__":
    main()
