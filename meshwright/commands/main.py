"""The command `meshwright`.

To add a command: a function in `arguments.py` that declares its options, and a line in `COMMANDS`.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import NamedTuple

from meshwright import __version__
from meshwright.commands import options as arguments
from meshwright.config.command_line import EVERY_KEY, Parser, add_config, parse
from meshwright.system.errors import (
    EXIT_CONFIG,
    EXIT_DATA,
    EXIT_INTERRUPTED,
    ConfigError,
    DataError,
    did_you_mean,
)
from meshwright.system.log import print_error
from meshwright.system.modules import uncollected


class Command(NamedTuple):
    """A row of `COMMANDS`."""

    run: str
    """`module:function` that takes the parsed options (a Namespace). Imported only when it is
    called: some import torch, which takes a second."""
    add_arguments: Callable[[Parser], None]
    purpose: str
    takes_config: bool = False
    """It takes CONFIG and --section.key: `load_given(given)` loads them."""


COMMANDS = {
    "train": Command(
        "meshwright.commands.train:run",
        arguments.train,
        "check a config, tokenise its data and train on all GPUs, or on 2 CPU ranks",
        True,
    ),
    "check": Command(
        "meshwright.commands.check:run", arguments.ranks, "check that a config can run", True
    ),
    "config": Command(
        "meshwright.commands.config:run", arguments.config, "show every value of a config", True
    ),
    "config migrate": Command(
        "meshwright.commands.config:run_migrate",
        arguments.nothing,
        "translate a TOML of torchtitan 0.2.2, with a note for each key",
        True,
    ),
    "config diff": Command(
        "meshwright.commands.config:run_diff",
        arguments.config_diff,
        "list the keys in which two configs differ",
    ),
    "schema": Command(
        "meshwright.commands.config:run_schema",
        arguments.nothing,
        "print the JSON Schema of a config, for editors",
    ),
    "tokenize": Command(
        "meshwright.commands.tokenize_data:run",
        arguments.tokenize,
        "tokenise the data of a job",
        True,
    ),
    "plan": Command(
        "meshwright.commands.plan.command:run",
        arguments.plan,
        "plan memory, traffic and step time on devices that are not there",
        True,
    ),
    "prove": Command(
        "meshwright.commands.prove.command:run",
        arguments.prove,
        "train a config in small on many meshes, and compare each with one process",
        True,
    ),
    "report": Command(
        "meshwright.commands.report:run",
        arguments.report,
        "write a run as one HTML file: curves, time, validation, resumes, skipped steps, config",
    ),
    "checkpoint ls": Command(
        "meshwright.commands.checkpoint:run_ls", arguments.checkpoint_ls, "list checkpoints"
    ),
    "checkpoint show": Command(
        "meshwright.commands.checkpoint:run_show",
        arguments.checkpoint_show,
        "describe a checkpoint",
    ),
    "checkpoint verify": Command(
        "meshwright.commands.checkpoint:run_verify",
        arguments.checkpoint_verify,
        "compare every byte with its checksum",
    ),
    "checkpoint diff": Command(
        "meshwright.commands.checkpoint_diff:run",
        arguments.checkpoint_diff,
        "compare two checkpoints",
    ),
    "export": Command(
        "meshwright.commands.export:run", arguments.export, "write a checkpoint for Hugging Face"
    ),
    "generate": Command("meshwright.commands.generate:run", arguments.generate, "generate text"),
    "completion": Command(
        "meshwright.commands.completion:run", arguments.completion, "print a script for bash or zsh"
    ),
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
    command.add_arguments(parser)
    return parser


def run(words: Sequence[str]) -> None:
    """Run the command that `words` names.

    Raises:
        ConfigError: for a mistake of the user's.
    """
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
    given = parse(build_parser(name, rest), rest)  # before the import: --help needs none
    with uncollected():
        command = resolve_name(COMMANDS[name].run)
    try:
        command(given)
    except ConfigError as error:
        if not COMMANDS[name].takes_config:
            raise
        # not at the top: pydantic takes 0.1 s, more than `--help` needs for all else
        from meshwright.config.loader import with_lines

        raise with_lines(error, given) from None


def main() -> None:
    """Run one command; a `ConfigError` becomes its message and exit code 2, Ctrl-C code 130."""
    words = sys.argv[1:] or ["--help"]
    try:
        if words[0] in ("--help", "-h", "help"):
            _print_commands(list(COMMANDS))
        elif words[0] == "--version":
            print(f"meshwright {__version__}")
        else:
            run(words)
        sys.stdout.flush()
    except ConfigError as error:
        print_error(error)
        sys.exit(EXIT_CONFIG)
    except DataError as error:
        print_error(error)
        sys.exit(EXIT_DATA)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # `| head` has seen enough; without the traceback of a flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


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
