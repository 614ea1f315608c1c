import gc
import os
import shutil
import signal
import tempfile

# before any library of Hugging Face is imported: tests are offline
os.environ["HF_HUB_OFFLINE"] = "1"
# one line of the console per message, so that tests can look for whole ones
os.environ["MESHWRIGHT_COLUMNS"] = "10000"
# before torch is: models this small are as fast on one thread, and others only spin beside it
os.environ["OMP_NUM_THREADS"] = "1"
# token caches are made once a session, and go with it
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="meshwright_tests_")

from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from meshwright.commands.prove.ranks import RankError, RankPool
from meshwright.system.log import logger
from meshwright.system.machine import hide_gpus
from tests.helpers.needs import skip_without_mesh_of_experts

RunOnRanks = Callable[..., list[Any]]

# a shell that starts tests in the background has it ignored, and the jobs of tests would, too
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _no_signal_is_ignored() -> None:
    """So do nohup with SIGHUP and such a shell with SIGQUIT. A handler is not inherited by programs
    that tests start, and still lets the tests themselves live on."""
    for number in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_configure(config: pytest.Config) -> None:
    """Have all tests but those of tests/gpu run as on a machine without GPUs, jobs included."""
    named = [Path(word.split("::")[0]).resolve() for word in config.args]
    if not any(path.is_relative_to(Path(__file__).parent / "gpu") for path in named):
        hide_gpus()


def pytest_collection_finish() -> None:
    """Full collections leave alone what stays: modules, and the tests themselves."""
    gc.freeze()


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["XDG_CACHE_HOME"])


@pytest.fixture(autouse=True, scope="session")
def _own_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Outputs go to a folder of the tests, since the checkout may be read-only; configs are found
    as from the checkout."""
    checkout, folder = Path(__file__).parents[1], tmp_path_factory.mktemp("working_folder")
    for name in ("assets", "tests", "train_configs"):
        (folder / name).symlink_to(checkout / name)
    os.chdir(folder)
    places = [str(checkout), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))  # for processes started there


@pytest.fixture(autouse=True)
def _logger_as_imported() -> None:
    """Messages reach caplog, and once, whatever tests before have made of the logger."""
    logger.handlers, logger.propagate = [], True


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    _close(pools)


def _close(pools: dict[int, RankPool]) -> None:
    for pool in pools.values():
        pool.close()
    pools.clear()


@pytest.fixture(autouse=True, scope="module")
def _no_idle_ranks(request: pytest.FixtureRequest, _pools: dict[int, RankPool]) -> None:
    """A rank that waits costs no time to speak of, but memory, which whole jobs need."""
    if request.path.parent.name != "distributed":
        _close(_pools)


@pytest.fixture
def on_ranks(_pools: dict[int, RankPool]) -> RunOnRanks:
    """`on_ranks(n, fn, *args)`: run on n gloo ranks, and return what each gave."""

    def run(world_size: int, fn: Callable[..., Any], *args: object) -> list[Any]:
        pool = _pools.pop(world_size, None) or RankPool(world_size)
        try:
            results = pool.run(fn, *args)
        except RankError as error:
            if "ShardPlacementResult" in str(error):  # which FSDP2 of torch 2.11 lacks
                skip_without_mesh_of_experts()
            raise
        _pools[world_size] = pool  # only if it is still in order
        return results

    return run


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("ranks") and "on_ranks" not in item.fixturenames:
        # a rank's copy would never be undone, and other tests run on the same ranks
        assert "monkeypatch" not in item.fixturenames, f"{item.nodeid}: patch in the test itself"
        item.fixturenames.append("on_ranks")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test marked `ranks(n)` runs on each of n ranks, with the same arguments.

    n may be the name of one of them that says it: a number or `ParallelDims`. Such a test cannot
    skip itself.
    """
    if (marker := pyfuncitem.get_closest_marker("ranks")) is None:
        return None
    given, test = pyfuncitem.funcargs, pyfuncitem.function
    (ranks,) = marker.args
    ranks = given[ranks] if isinstance(ranks, str) else ranks
    arguments = [given[name] for name in signature(test).parameters]
    given["on_ranks"](getattr(ranks, "num_ranks", ranks), test, *arguments)
    return True
