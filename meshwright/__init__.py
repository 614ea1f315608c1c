"""Meshwright: config-driven LLM pre-training on native PyTorch."""

import getpass
import os

__version__ = "0.1.0"

try:
    getpass.getuser()
except (KeyError, OSError):  # a container's user may have no name; torch 2.11 imports by it
    os.environ["LOGNAME"] = f"uid_{os.getuid()}"
