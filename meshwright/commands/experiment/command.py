"""`meshwright experiment run | show | add`: the commands."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import tomli

from meshwright.commands.experiment.spec import Document, as_request, read_spec
from meshwright.commands.options import input_path, output_file, write_output
from meshwright.config.command_line import Parser
from meshwright.system.errors import ConfigError, StopRequested, check, code_of_request, numbered
from meshwright.system.log import align, log_to_console, logger

if TYPE_CHECKING:
    from meshwright.commands.experiment.state import State

AnyState = TypeVar("AnyState", bound="State")

EXIT_FAILED, EXIT_OPEN = 1, 3
"""A run crashed twice in a row; the seeds are used up, and an arm is open."""

NAMES = {"diverged": "worse: diverges", "identical": "identical: the same bits"}
"""Verdicts in words, where one isn't enough."""


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
    from meshwright.commands.experiment.arms import register
    from meshwright.commands.experiment.state import State

    document = read_spec(given.file)
    register(document)
    state = work(document, given, State)
    _print(state.summary(), is_json=given.json)
    if state.failed:
        sys.exit(EXIT_FAILED)
    if state.open_arms:
        sys.exit(EXIT_OPEN)


def work(document: Document, given: Namespace, make_state: Callable[..., AnyState]) -> AnyState:
    """Take the runs of a list until none is wanted, and return its state then. A request to stop
    ends the process, and the runs can be continued.

    Raises:
        ConfigError: if the list's runs are on GPUs, and this node has none, or the other way round.
    """
    # not at the top: see `run`
    from meshwright.commands.experiment.arms import has_gpus
    from meshwright.commands.experiment.registry import load
    from meshwright.commands.experiment.worker import Worker

    known = load(document)
    if known is not None and known.on_gpus != has_gpus():
        place = f"{document.folder}: its runs are on {'GPUs' if known.on_gpus else 'CPUs'}"
        fix = "start this worker on such a node, or choose a different folder"
        raise ConfigError("", f"{place}, which this node's wouldn't be\n  fix: {fix}")
    if not given.json:
        log_to_console()
    note = (lambda line: print(line, file=sys.stderr)) if given.json else logger.info
    try:
        return Worker(document, note, make_state).work()
    except StopRequested as asked:
        print(f"{asked}: stopped; run the same command again to go on", file=sys.stderr)
        sys.exit(code_of_request(str(asked)))


def run_show(given: Namespace) -> None:
    """Print the verdicts by now.

    Raises:
        ConfigError: if nothing has run.
    """
    # not at the top: see `run`
    from meshwright.commands.experiment.registry import load
    from meshwright.commands.experiment.results import read_results
    from meshwright.commands.experiment.state import State

    document = read_spec(given.file)
    experiment = load(document)
    if experiment is None:
        fix = f"meshwright experiment run {given.file}"
        raise ConfigError("", f"{document.folder}: holds no experiment yet\n  fix: {fix}")
    state = State(document, experiment, read_results(document, experiment))
    if given.output:
        # not at the top: it takes longer than all else
        from meshwright.commands.experiment.page import page

        write_output(given.output, page(state), "--output")
    _print(state.summary(), is_json=given.json)


def run_add(given: Namespace) -> None:
    """Add an arm; workers that run take it up.

    Raises:
        ConfigError: if it can't run or couldn't be judged.
    """
    # not at the top: see `run`
    from meshwright.commands.experiment.arms import register
    from meshwright.commands.experiment.registry import load

    document, table = read_spec(given.file), dict[str, Any]()
    for word in given.keys:
        key, equals, text = word.partition("=")
        check(bool(key and equals), "KEY=VALUE", word, "isn't one", "write section.key=value")
        table[key] = _value(text)
    request = as_request(given.name, "", table)
    known = load(document)
    is_new = known is None or given.name not in known.arms
    check(is_new, "NAME", given.name, "is an arm already", "give it a different name")
    arm = register(document, [request]).arms[given.name]
    print(f"{arm.name} is compared with {arm.on}")


def _value(text: str) -> Any:
    try:
        return tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        return text


def _print(summary: dict[str, Any], *, is_json: bool) -> None:
    if is_json:
        print(json.dumps(summary))
        return
    base = summary["base"]
    spread = f", spread {base['spread']:.2g}" if base["spread"] else ""
    mean = f"{base['mean']:.4f}{spread}" if base["mean"] is not None else "no run yet"
    print(f"{summary['metric']} after {summary['steps']:,} steps; base: {mean}")
    print(align([("arm", "pairs", "difference", "interval", "verdict"), *_rows(summary)]))
    if screening := summary["screening"]:
        dropped = ", ".join(screening["dropped"])
        print(f"screening: {len(screening['left'])} left, dropped: {dropped or 'none'}")
    for folder in summary["failed"]:
        print(f"failed: {folder}")


def _rows(summary: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for arm in summary["arms"]:
        word = NAMES.get(arm["verdict"], arm["verdict"])
        if word == "open":
            needed = arm["seeds_needed"]
            word += (
                f": {numbered(needed, 'seed')} at this spread" if needed else ": no end in sight"
            )
        if arm["unpaired"]:
            word += f" (paired by seed only: other {' and '.join(arm['unpaired'])})"
        is_bounded = arm["low"] is not None and arm["high"] is not None
        yield (
            arm["arm"],
            str(arm["num_pairs"]),
            "" if arm["mean"] is None else f"{arm['mean']:+.4f}",
            f"{arm['low']:+.4f} to {arm['high']:+.4f}" if is_bounded else "",
            word,
        )
