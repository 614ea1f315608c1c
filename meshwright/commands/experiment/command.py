"""`meshwright experiment run | show | add`: the commands, and what a ladder's share with them."""

import json
import sys
from argparse import Namespace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import tomli

from meshwright.commands.experiment.spec import Document, as_request, read_spec, without_dates
from meshwright.commands.options import input_path, output_file, write_output
from meshwright.config.command_line import Parser
from meshwright.system.errors import ConfigError, StopRequested, check, code_of_request
from meshwright.system.log import log_to_console, logger

if TYPE_CHECKING:
    from meshwright.commands.experiment.state import State

EXIT_FAILED, EXIT_OPEN = 1, 3
"""A run crashed twice in a row; the seeds are used up, and an arm is open."""


def add_options(parser: Parser) -> None:
    parser.add_argument(
        "file", type=input_path, metavar="FILE.toml", help="the experiment, or ladder"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, on one line")


def add_options_show(parser: Parser) -> None:
    add_options(parser)
    parser.add_argument(
        "--output", type=output_file, metavar="FILE", help="also write a page there, as HTML"
    )


def add_options_add(parser: Parser) -> None:
    parser.add_argument("file", type=input_path, metavar="FILE.toml", help="the experiment")
    parser.add_argument("name", metavar="NAME", help="of the new arm, and of its folder")
    parser.add_argument(
        "keys",
        nargs="+",
        metavar="KEY=VALUE",
        help="section.key=value, as in the TOML; also base=, ranks=, from=, on= as in [arms.NAME]",
    )


def run(given: Namespace) -> None:
    """Take runs until every arm is decided or has all of its seeds.

    Raises:
        ConfigError: before any run, if one of the arms can't run or couldn't be judged.
    """
    # not at the top: numpy and the tables of models take half a second
    from meshwright.commands.experiment.state import State

    work(read_spec(given.file), given, State)


def run_show(given: Namespace) -> None:
    """Print the verdicts by now.

    Raises:
        ConfigError: if nothing has run.
    """
    # not at the top: see `run`
    from meshwright.commands.experiment.state import State

    show(State.of(read_spec(given.file)), given)


def run_add(given: Namespace) -> None:
    """Add an arm; workers that run take it up. The same arm may be added again.

    Raises:
        ConfigError: if it can't run or couldn't be judged.
    """
    # not at the top: see `run`
    from meshwright.commands.experiment.arms import register

    document, table = read_spec(given.file), dict[str, Any]()
    for word in given.keys:
        key, equals, text = word.partition("=")
        is_new = bool(key and equals) and key not in table
        fix = "write section.key=value, each key once"
        check(is_new, "KEY=VALUE", word, "isn't one", fix)
        try:
            table[key] = without_dates(tomli.loads(f"value = {text}")["value"])
        except tomli.TOMLDecodeError:
            table[key] = text
    arm = register(document, [as_request(given.name, "", table)]).arms[given.name]
    print(f"{arm.name} is compared with {arm.on}")


def work(document: Document, given: Namespace, kind: "type[State]") -> None:
    """Take the runs of a list until none is wanted, and print its state then. Ends the process with
    the command's exit code.

    Raises:
        ConfigError: before any run, if one can't run, or would be on GPUs where the others aren't.
    """
    # not at the top: see `run`
    from meshwright.commands.experiment.arms import has_gpus, register
    from meshwright.commands.experiment.worker import Worker

    if (on_gpus := register(document).on_gpus) != has_gpus():
        place = f"{document.folder}: its runs are on {'GPUs' if on_gpus else 'CPUs'}"
        fix = "start this worker on such a node, or choose a different folder"
        raise ConfigError("", f"{place}, which this node's wouldn't be\n  fix: {fix}")
    if not given.json:
        log_to_console()
    note = (lambda line: print(line, file=sys.stderr)) if given.json else logger.info
    try:
        state = Worker(document, note, kind).work()
    except StopRequested as asked:
        print(f"{asked}: stopped; run the same command again to go on", file=sys.stderr)
        sys.exit(code_of_request(str(asked)))
    show(state, given)
    if state.failed:
        sys.exit(EXIT_FAILED)
    if state.is_open:
        sys.exit(EXIT_OPEN)


def show(state: "State", given: Namespace) -> None:
    """Print a state, and write its page if that is asked for."""
    if output := getattr(given, "output", None):
        # not at the top: it takes longer than all else
        page = import_module(f"meshwright.commands.{state.COMMAND}.page").page(state)
        write_output(output, page, "--output")
    print(json.dumps(state.summary()) if given.json else state.text())
