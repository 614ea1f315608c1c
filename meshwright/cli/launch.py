"""torchrun with the job's own exit code, and without its report of what the job has said.

python -m meshwright.cli.launch TORCHRUN_ARGUMENTS train.py --job.config_file CONFIG ...
"""

import os
import signal

from meshwright.errors import EXIT_STOPPED
from meshwright.supervise import STOP_SIGNALS


def main() -> None:
    """Run the job. What asks it to stop before there is a rank ends it here."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: os._exit(EXIT_STOPPED))
    # asks ranks for their stacks; who sends it to all that runs train.py means no harm
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    from meshwright.cli.torchrun import launch  # takes seconds, for torch

    launch()


if __name__ == "__main__":
    main()
