"""Signals to whole jobs: the cells of `tests/campaigns/signals.py` that decide most."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.campaigns import signals
from tests.helpers.jobs import ROOT, environment

CELLS = (
    signals.Cell("INT", "group", "step", "pipe"),  # Ctrl-C ends `| tee`, too
    signals.Cell("HUP", "group", "step", "terminal"),  # a window is closed
    signals.Cell("TERM", "launcher", "setup", "nohup"),
    signals.Cell("USR1", "launcher", "export", "nohup"),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[signals.Cell, signals.Result]:
    """The cells wait more than they compute."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        patch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("signals")))
        with ThreadPoolExecutor(2) as pool:
            done = pool.map(lambda cell: signals.run(cell, ROOT, ranks=1, save_s=1.0), CELLS)
            return dict(zip(CELLS, done, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=" ".join)
def test_a_signal_saves_the_step_and_leaves_no_process(results, cell: signals.Cell) -> None:
    assert signals.fault(cell, results[cell]) == "", results[cell]
