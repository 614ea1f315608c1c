"""Meshwright: config-driven LLM pre-training on native PyTorch."""

import getpass
import os
import sys

__version__ = "0.1.0"

if sys.platform != "linux":
    words = f"meshwright: it runs on Linux, and this is {sys.platform}\n  fix: "
    print(words + "a Linux machine or container, or WSL 2", file=sys.stderr)
    sys.exit(2)
try:
    getpass.getuser()
except (KeyError, OSError):  # a container's user may have no name; torch 2.11 imports by it
    os.environ["LOGNAME"] = f"uid_{os.getuid()}"
