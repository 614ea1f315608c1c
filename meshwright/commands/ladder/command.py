"""`meshwright ladder run | show`: the commands."""

import json
import sys
from argparse import Namespace
from functools import partial
from typing import Any

from meshwright.commands.experiment.command import EXIT_FAILED, EXIT_OPEN, work
from meshwright.commands.experiment.command import add_options as add_options
from meshwright.commands.experiment.command import add_options_show as add_options_show
from meshwright.commands.ladder.text import HEAD, describe, row
from meshwright.commands.options import write_output
from meshwright.system.errors import ConfigError
from meshwright.system.log import align


def run(given: Namespace) -> None:
    """Train the rungs, fit the law, and predict.

    Raises:
        ConfigError: before any run, if one of the rungs can't run.
    """
    # not at the top: numpy and the tables of models take half a second
    from meshwright.commands.ladder.rungs import read_ladder
    from meshwright.commands.ladder.state import LadderState

    ladder = read_ladder(given.file)
    ladder.register()
    state = work(ladder.document, given, partial(LadderState, ladder=ladder))
    _print(summary := state.summary(), is_json=given.json)
    if state.failed:
        sys.exit(EXIT_FAILED)
    if summary["no_law"]:
        sys.exit(EXIT_OPEN)


def run_show(given: Namespace) -> None:
    """Print the rungs and the law by now.

    Raises:
        ConfigError: if nothing has run.
    """
    # not at the top: see `run`
    from meshwright.commands.experiment.registry import load
    from meshwright.commands.experiment.results import read_results
    from meshwright.commands.ladder.rungs import read_ladder
    from meshwright.commands.ladder.state import LadderState

    ladder = read_ladder(given.file)
    document = ladder.document
    experiment = load(document)
    if experiment is None:
        fix = f"meshwright ladder run {given.file}"
        raise ConfigError("", f"{document.folder}: holds no ladder yet\n  fix: {fix}")
    state = LadderState(document, experiment, read_results(document, experiment), ladder)
    if given.output:
        # not at the top: it takes longer than all else
        from meshwright.commands.ladder.page import page

        write_output(given.output, page(state), "--output")
    _print(state.summary(), is_json=given.json)


def _print(summary: dict[str, Any], *, is_json: bool) -> None:
    if is_json:
        print(json.dumps(summary))
        return
    if (law := summary["law"]) is not None:
        print(describe(law))
    print(align([HEAD, *map(row, summary["rungs"])]))
    if summary["no_law"]:
        print(f"no prediction: {summary['no_law']}")
    for folder in summary["failed"]:
        print(f"failed: {folder}")
