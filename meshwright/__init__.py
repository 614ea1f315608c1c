"""Meshwright: config-driven LLM pre-training on native PyTorch.

The names in `API` are the Python interface. Each is imported when it is first used, because torch
takes seconds: `import meshwright` takes milliseconds.
"""

import getpass
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.api.child_commands import export as export
    from meshwright.api.child_commands import plan as plan
    from meshwright.api.child_commands import prove as prove
    from meshwright.api.configs import load as load
    from meshwright.api.configs import read_metrics as read_metrics
    from meshwright.api.saved_models import generate as generate
    from meshwright.api.saved_models import load_model as load_model
    from meshwright.api.session import Session as Session
    from meshwright.api.session import Step as Step
    from meshwright.system.errors import ConfigError as ConfigError

__version__ = "0.1.0"

try:
    getpass.getuser()
except (KeyError, OSError):  # a container's user may have no name; torch 2.11 imports by it
    os.environ["LOGNAME"] = f"uid_{os.getuid()}"


API = {
    "load": "api.configs",
    "Session": "api.session",
    "Step": "api.session",
    "load_model": "api.saved_models",
    "generate": "api.saved_models",
    "export": "api.child_commands",
    "plan": "api.child_commands",
    "prove": "api.child_commands",
    "read_metrics": "api.configs",
    "ConfigError": "system.errors",
}
"""The module of each name, in this package."""


def __getattr__(name: str) -> Any:
    if name not in API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with import_module(f"{__name__}.system.processes").short_waiting():
        return getattr(import_module(f"{__name__}.{API[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *API]


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
