"""The command `meshwright`.

To add a command: a module with `add_options(parser)` and `run(given)`, and a row in `GROUPS`.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from textwrap import fill, indent
from typing import NamedTuple

import meshwright
from meshwright.config.command_line import EVERY_KEY, Parser, add_config, parse
from meshwright.system import errors
from meshwright.system.log import print_error, steady_streams
from meshwright.system.modules import uncollected
from meshwright.system.retries import may_pass


class Command(NamedTuple):
    """A row of `GROUPS`."""

    module: str
    """In this folder. Imported only for its command, and free of torch, which takes a second: what
    needs torch is imported by `run`."""
    purpose: str
    example: str
    """Words after `meshwright NAME`, which its `--help` shows as one that works."""
    takes_config: bool = False
    """It takes CONFIG and --section.key: `read(given).config()` loads them."""
    takes_run: bool = False
    """It takes RUN, a dump folder, in the place of CONFIG."""
    suffix: str = ""
    """Of its functions `add_options` (none: no options) and `run`, which takes the parsed ones."""

    def function(self, name: str) -> Callable[..., None] | None:
        with uncollected():
            module = import_module(f"meshwright.commands.{self.module}")
        return getattr(module, f"{name}{self.suffix}", None)


GROUPS = {
    "Start": {
        "init": Command(
            "init", "write a first TOML for your text data and this machine", "--from my_texts"
        ),
        "check": Command(
            "check",
            "find every mistake in a config, before anything starts",
            "my_job.toml --ngpu 8",
            takes_config=True,
        ),
        "train": Command(
            "train",
            "check a config, tokenize its data and train on all GPUs, or on 2 CPU ranks",
            "my_job.toml --ngpu 2 --training.steps 100",
            takes_config=True,
        ),
    },
    "Configs": {
        "config": Command(
            "config",
            "show every value of a config",
            "my_job.toml --optimizer.lr 1e-3",
            takes_config=True,
        ),
        "config diff": Command(
            "config",
            "list the keys in which two configs differ",
            "debug_model my_job.toml",
            suffix="_diff",
        ),
        "schema": Command(
            "config",
            "print the JSON Schema of a config, for editors",
            "my_job.toml > schema.json",
            takes_config=True,
            suffix="_schema",
        ),
    },
    "Data": {
        "data": Command(
            "data",
            "describe the data of a config, print its samples, list and remove token caches",
            "my_job.toml --step 1",
            takes_config=True,
        ),
        "tokenize": Command(
            "data",
            "tokenize the data of a config",
            "my_job.toml",
            takes_config=True,
            suffix="_tokenize",
        ),
    },
    "Memory and parallelism": {
        "plan": Command(
            "plan.command",
            "estimate memory, traffic and step time on GPUs that you don't have",
            "llama3_8b --world-size 8 --device h100",
            takes_config=True,
        ),
        "prove": Command(
            "prove.command",
            "check that parallel training matches one process, with a small copy of a config",
            "my_job.toml --parallelism.tensor_parallel_degree 2",
            takes_config=True,
        ),
    },
    "Runs": {
        "experiment run": Command(
            "experiment.command",
            "train the arms of an experiment until each has a verdict",
            "lr.toml",
        ),
        "experiment show": Command(
            "experiment.command",
            "print the verdicts of an experiment",
            "lr.toml --json",
            suffix="_show",
        ),
        "experiment add": Command(
            "experiment.command",
            "add an arm to an experiment",
            "lr.toml hotter optimizer.lr=x2 on=hot",
            suffix="_add",
        ),
        "ladder run": Command(
            "ladder.command",
            "train models of growing size, and predict the loss of the next by a scaling law",
            "ladder.toml",
        ),
        "ladder show": Command(
            "ladder.command",
            "print the rungs of a ladder, its law and its predictions",
            "ladder.toml --json",
            suffix="_show",
        ),
        "report": Command(
            "report",
            "write runs as one HTML page: curves, speed, validation, resumes, skipped steps",
            "outputs/my_job outputs/debug_model --output both.html",
        ),
        "replay": Command(
            "replay.command",
            "take a step of a run again: compare it with the record, and name its samples",
            "outputs/my_job --step 53",
            takes_run=True,
        ),
        "diverge": Command(
            "diverge.command",
            "find where two runs part: a key, a document, a module or an element of a tensor",
            "outputs/my_job outputs/debug_model",
        ),
    },
    "Checkpoints": {
        "checkpoint ls": Command("checkpoint", "list checkpoints", "outputs/my_job", suffix="_ls"),
        "checkpoint show": Command(
            "checkpoint",
            "describe a checkpoint, or print its config",
            "outputs/my_job --config",
            suffix="_show",
        ),
        "checkpoint verify": Command(
            "checkpoint",
            "compare every byte with its checksum",
            "outputs/my_job",
            suffix="_verify",
        ),
        "checkpoint diff": Command(
            "checkpoint",
            "compare the weights of two checkpoints",
            "outputs/my_job outputs/debug_model",
            suffix="_diff",
        ),
        "checkpoint merge": Command(
            "checkpoint_merge",
            "average the weights of several steps",
            "outputs/my_job --steps 60,80 --out outputs/merged",
        ),
    },
    "Models": {
        "generate": Command(
            "generate", "generate text", 'outputs/my_job --prompt "Once upon a time"'
        ),
        "export": Command(
            "export", "write a checkpoint for Hugging Face", "outputs/my_job my_model"
        ),
    },
}
"""By the group of `meshwright --help` and by name, of one word or two."""

COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def example(name: str) -> str:
    """Return a command line that works, for help and docs."""
    return f"meshwright {name} {COMMANDS[name].example}"


def build_parser(name: str, words: Sequence[str] = ()) -> Parser:
    """Return the parser of a command.

    Args:
        words: its command line, for the config keys that it names.
    """
    command = COMMANDS[name]
    parser = Parser(f"meshwright {name}", description=fill(_sentence(command.purpose), 78))
    parser.epilog = f"example:\n  {example(name)}"
    if command.takes_config or command.takes_run:
        add_config(parser, words, is_run=command.takes_run)
        parser.epilog += f"\n\n{EVERY_KEY}"
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
            raise errors.ConfigError("", f"{word!r} is no text in UTF-8\n  fix: set LC_ALL=C.UTF-8")
    name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
    if f"{name} run" in COMMANDS and words[1:] and words[1].endswith(".toml"):
        # `run` is what such a command is for
        name, words = f"{name} run", [name, "run", *words[1:]]
    if name not in COMMANDS:
        within = [command for command in COMMANDS if command.startswith(f"{name} ")]
        if within and words[1:2] in ([], ["--help"], ["-h"]):
            print(f"usage: meshwright {name} COMMAND ...\n")
            _print_purposes(within)
            print(f"\n`meshwright {name} COMMAND --help` has options and an example.")
            return
        wrong = " ".join(words[:2]) if within else name
        fix = errors.did_you_mean(wrong, within or [*COMMANDS, "--help", "--version"])
        raise errors.ConfigError("", f"unknown command {wrong}\n  fix: {fix}")
    rest = words[len(name.split()) :]
    given = parse(build_parser(name, rest), rest)
    command = COMMANDS[name].function("run")
    assert command is not None
    try:
        command(given)
    except OSError as error:
        if error.filename is None or may_pass(error):  # of stdout; or worth a new start
            raise
        raise errors.ConfigError("", f"{error.filename}: {error.strerror}") from None
    except errors.ConfigError as error:
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
            _print_groups()
        elif words[0] == "--version":
            print(f"meshwright {meshwright.__version__}")
        else:
            run(words)
        sys.stdout.flush()
    except (errors.ConfigError, errors.DataError) as error:
        print_error(error)
        sys.exit(errors.EXIT_CONFIG if isinstance(error, errors.ConfigError) else errors.EXIT_DATA)
    except KeyboardInterrupt:
        sys.exit(errors.EXIT_INTERRUPTED)
    except OSError as error:
        # `| head` has seen enough; or `> FILE` on a full disk, for other files have names
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # without the traceback of a flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            sys.exit(128 + signal.SIGPIPE)
        print_error(f"stdout cannot be written: {error.strerror}\n  fix: make room there")
        sys.exit(errors.EXIT_CONFIG)


def _print_groups() -> None:
    print(
        "usage: meshwright COMMAND ...\n\n`meshwright COMMAND --help` has options and an example."
    )
    for title, group in GROUPS.items():
        print(f"\n{title}")
        _print_purposes(list(group))
    print("\n--version prints the version.")
    print("\nA first run, in minutes on a CPU: meshwright train debug_model")


def _print_purposes(names: Sequence[str]) -> None:
    width = max(map(len, COMMANDS)) + 4
    for name in names:
        text = fill(_sentence(COMMANDS[name].purpose), 78 - width)
        print(indent(f"  {name}".ljust(width) + text, " " * width, lambda line: line[0] != " "))


def _sentence(purpose: str) -> str:
    return f"{purpose[0].upper()}{purpose[1:]}."


if __name__ == "__main__":
    main()
