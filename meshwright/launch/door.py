"""torchrun with the job's own exit code, and without its report of what the job has said.

python -m meshwright.launch.door TORCHRUN_ARGUMENTS train.py --job.config_file CONFIG ...
"""

import os
import signal
from types import FrameType

from meshwright.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from meshwright.launch.process import stop_signals
from meshwright.log import busy, log_to_console


def main() -> None:
    """Run the job. What asks it to stop before there is a rank ends it here."""
    for number in stop_signals():
        signal.signal(number, _end)
    # asks ranks for their stacks; who sends it to all that runs train.py means no harm
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    log_to_console()
    with busy("loading torch"):
        from meshwright.launch.torchrun import launch
    launch()


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_STOPPED)


if __name__ == "__main__":
    main()
