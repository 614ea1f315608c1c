"""The command `meshwright`."""

import sys
from collections.abc import Callable, Sequence

from meshwright.cli import check_job, show_config
from meshwright.errors import EXIT_CONFIG, ConfigError, did_you_mean

COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "check": (check_job.main, check_job.USAGE),
    "config": (show_config.main, show_config.USAGE),
}


def main() -> None:
    """Run one command; a `ConfigError` becomes its message and exit code 2."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        print("usage: meshwright COMMAND ...\n")
        for _, usage in COMMANDS.values():
            print(f"  meshwright {usage}")
        return
    try:
        if name not in COMMANDS:
            raise ConfigError("", f"unknown command {name}\n  fix: {did_you_mean(name, COMMANDS)}")
        COMMANDS[name][0](arguments)
    except ConfigError as error:
        print(f"meshwright: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)


if __name__ == "__main__":
    main()
