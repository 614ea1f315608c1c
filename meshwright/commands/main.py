"""The command `meshwright`.

To add a command: a module with `add_options(parser)` and `run(given)`, and a line in `COMMANDS`.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

from meshwright import __version__
from meshwright.config.command_line import EVERY_KEY, Parser, add_config, parse
from meshwright.system.errors import (
    EXIT_CONFIG,
    EXIT_DATA,
    EXIT_INTERRUPTED,
    ConfigError,
    DataError,
    did_you_mean,
)
from meshwright.system.files import may_pass
from meshwright.system.log import print_error, steady_streams
from meshwright.system.modules import uncollected


class Command(NamedTuple):
    """A row of `COMMANDS`."""

    module: str
    """In this folder. Imported only for its command, and free of torch, which takes a second: what
    needs torch is imported by `run`."""
    purpose: str
    takes_config: bool = False
    """It takes CONFIG and --section.key: `read(given).config()` loads them."""
    suffix: str = ""
    """Of its functions `add_options` (none: no options) and `run`, which takes the parsed ones."""

    def function(self, name: str) -> Callable[..., None] | None:
        """Return one of its functions."""
        with uncollected():
            module = import_module(f"meshwright.commands.{self.module}")
        return getattr(module, f"{name}{self.suffix}", None)


COMMANDS = {
    "train": Command(
        "train",
        "check a config, tokenise its data and train on all GPUs, or on 2 CPU ranks",
        takes_config=True,
    ),
    "init": Command("init", "write a first TOML for your texts and this machine"),
    "check": Command("check", "check that a config can run", takes_config=True),
    "config": Command("config", "show every value of a config", takes_config=True),
    "config diff": Command("config", "list the keys in which two configs differ", suffix="_diff"),
    "schema": Command("config", "print the JSON Schema of a config, for editors", suffix="_schema"),
    "tokenize": Command(
        "data", "tokenise the data of a job", takes_config=True, suffix="_tokenize"
    ),
    "data": Command(
        "data",
        "describe the data of a job, print its samples, list and remove token caches",
        takes_config=True,
    ),
    "plan": Command(
        "plan.command",
        "plan memory, traffic and step time on devices that are not there",
        takes_config=True,
    ),
    "prove": Command(
        "prove.command",
        "train a config in small on many meshes, and compare each with one process",
        takes_config=True,
    ),
    "report": Command(
        "report",
        "write a run as one HTML file: curves, time, validation, resumes, skipped steps, config",
    ),
    "checkpoint ls": Command("checkpoint", "list checkpoints", suffix="_ls"),
    "checkpoint show": Command("checkpoint", "describe a checkpoint", suffix="_show"),
    "checkpoint verify": Command(
        "checkpoint", "compare every byte with its checksum", suffix="_verify"
    ),
    "checkpoint diff": Command("checkpoint", "compare two checkpoints", suffix="_diff"),
    "checkpoint merge": Command("checkpoint_merge", "average the weights of several steps"),
    "export": Command("export", "write a checkpoint for Hugging Face"),
    "generate": Command("generate", "generate text"),
}
"""By name, of one word or two."""


def build_parser(name: str, words: Sequence[str] = ()) -> Parser:
    """Return the parser of a command.

    Args:
        words: its command line, for the config keys that it names.
    """
    command = COMMANDS[name]
    parser = Parser(f"meshwright {name}", description=_sentence(command.purpose))
    if command.takes_config:
        add_config(parser, words)
        parser.epilog = EVERY_KEY
    if add_options := command.function("add_options"):
        add_options(parser)
    return parser


def run(words: Sequence[str]) -> None:
    """Run the command that `words` names.

    Raises:
        ConfigError: for a mistake of the user's.
    """
    for word in words:
        if word.encode("utf-8", "ignore").decode() != word:
            raise ConfigError("", f"{word!r} is no text in UTF-8\n  fix: set LC_ALL=C.UTF-8")
    name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
    if name not in COMMANDS:
        within = [command for command in COMMANDS if command.startswith(f"{name} ")]
        if within and words[1:2] in ([], ["--help"], ["-h"]):
            _print_commands(within)
            return
        wrong = " ".join(words[:2]) if within else name
        fix = did_you_mean(wrong, within or [*COMMANDS, "--help", "--version"])
        raise ConfigError("", f"unknown command {wrong}\n  fix: {fix}")
    rest = words[len(name.split()) :]
    given = parse(build_parser(name, rest), rest)
    command = COMMANDS[name].function("run")
    assert command is not None
    try:
        command(given)
    except OSError as error:
        if error.filename is None or may_pass(error):  # of stdout; or worth another start
            raise
        raise ConfigError("", f"{error.filename}: {error.strerror}") from None
    except ConfigError as error:
        if not COMMANDS[name].takes_config:
            raise
        # not at the top: pydantic takes 0.1 s, and a list of the commands needs none
        from meshwright.config.loader import with_lines

        raise with_lines(error, given) from None


def main() -> None:
    """Run one command; a `ConfigError` becomes its message and exit code 2, Ctrl-C code 130."""
    words = sys.argv[1:] or ["--help"]
    steady_streams()
    try:
        if words[0] in ("--help", "-h", "help"):
            _print_commands(list(COMMANDS))
        elif words[0] == "--version":
            print(f"meshwright {__version__}")
        else:
            run(words)
        sys.stdout.flush()
    except (ConfigError, DataError) as error:
        print_error(error)
        sys.exit(EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_DATA)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        # `| head` has seen enough; or `> FILE` on a full disk, for other files have names
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # without the traceback of a flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            sys.exit(128 + signal.SIGPIPE)
        print_error(f"stdout cannot be written: {error.strerror}\n  fix: make room there")
        sys.exit(EXIT_CONFIG)


def _print_commands(names: Sequence[str]) -> None:
    print("usage: meshwright COMMAND ...       meshwright COMMAND --help: its options\n")
    width = max(map(len, names))
    for name in names:
        print(f"  {name:{width}}  {_sentence(COMMANDS[name].purpose)}")
    if "train" in names:
        print("\n  --version          Print the version.")
        print("\nA first run, in minutes on a CPU: meshwright train debug_model")


def _sentence(purpose: str) -> str:
    return f"{purpose[0].upper()}{purpose[1:]}."


if __name__ == "__main__":
    main()
