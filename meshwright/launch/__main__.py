"""Starts the ranks of this machine through torchrun.

python -m meshwright.launch TORCHRUN_ARGUMENTS -m meshwright.train --job.config_file CONFIG ...
"""

import os
import signal

from meshwright.system.log import busy, log_to_console
from meshwright.system.modules import uncollected
from meshwright.system.processes import exit_when_asked

CPP_LOG = "TORCH_CPP_LOG_LEVEL"


def main() -> None:
    """Run the job. A request to stop before there is a rank ends it here."""
    exit_when_asked()
    # asks ranks for their stacks; sent to every process of the job, it must not end this one
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    log_to_console()
    # or torch prints a page of C++ at each try to reach a machine that isn't there yet
    is_given = CPP_LOG in os.environ
    os.environ.setdefault(CPP_LOG, "FATAL")
    with busy("loading torch"), uncollected():
        from meshwright.launch.torchrun import launch
    if not is_given:  # the ranks print theirs
        del os.environ[CPP_LOG]
    launch()


if __name__ == "__main__":
    main()
