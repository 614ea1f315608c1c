"""Meshwright: config-driven LLM pre-training on native PyTorch."""

import getpass
import os
import sys

__version__ = "0.1.0"

try:
    getpass.getuser()
except (KeyError, OSError):  # a container's user may have no name; torch 2.11 imports by it
    os.environ["LOGNAME"] = f"uid_{os.getuid()}"


def exit_unless_linux() -> None:
    """End a command on a system that has no /proc, no flock and no gloo of torch's wheels.

    Importing the package ends nothing, because a notebook may do so anywhere.
    """
    if sys.platform != "linux":
        fix = "a Linux machine or container, or WSL 2"
        print(
            f"meshwright: it runs on Linux, and this is {sys.platform}\n  fix: {fix}",
            file=sys.stderr,
        )
        sys.exit(2)
