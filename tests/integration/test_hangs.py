"""A rank that does not go on, in a whole job; the rest is in tests/unit/test_hang.py."""

import subprocess
import sys

import pytest

from tests.integration.test_launcher import ROOT, environment


@pytest.mark.slow
def test_a_rank_that_is_stopped_in_a_save_is_named_in_time() -> None:
    """Where no timeout of a collective would find it for an hour."""
    words = ["--ranks", "2", "--limit", "5", "--cases", "save:stop"]
    result = subprocess.run(
        [sys.executable, "-m", "tests.campaigns.hangs", *words],
        env=environment(PYTHONPATH=ROOT),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].split()[:4] == ["save", "stop", "0", "save"]
