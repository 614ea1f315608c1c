"""`meshwright ladder run | show`: the commands."""

from argparse import Namespace

from meshwright.commands.experiment.command import add_options as add_options
from meshwright.commands.experiment.command import add_options_show as add_options_show
from meshwright.commands.experiment.command import show, work


def run(given: Namespace) -> None:
    """Train the rungs, fit the law, and predict.

    Raises:
        ConfigError: before any run, if one of the rungs can't run.
    """
    # not at the top: numpy and the tables of models take half a second
    from meshwright.commands.ladder.rungs import read_ladder
    from meshwright.commands.ladder.state import LadderState

    work(read_ladder(given.file), given, LadderState)


def run_show(given: Namespace) -> None:
    """Print the rungs and the law by now.

    Raises:
        ConfigError: if nothing has run.
    """
    # not at the top: see `run`
    from meshwright.commands.ladder.rungs import read_ladder
    from meshwright.commands.ladder.state import LadderState

    show(LadderState.of(read_ladder(given.file)), given)
