"""What the launcher does about signals."""

import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from meshwright.cli.torchrun import _ask_to_stop
from meshwright.errors import EXIT_STOPPED


def test_ranks_are_asked_to_stop_if_there_are_any(tmp_path: Path) -> None:
    """Else it waits for other machines, and no one would hear of it."""
    request = tmp_path / "stop"
    with pytest.raises(SystemExit, match=str(EXIT_STOPPED)):
        _ask_to_stop(request, signal.SIGTERM)
    (tmp_path / "logs_of_ranks").mkdir()
    _ask_to_stop(request, signal.SIGUSR1)
    assert request.read_text() == "SIGUSR1"
    with pytest.raises(SignalException):
        _ask_to_stop(request, signal.SIGTERM)
