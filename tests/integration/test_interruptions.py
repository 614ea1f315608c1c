"""A job that is killed, or finds files of others, goes on as if nothing had been."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.jobs import ROOT, environment

CAMPAIGN = (
    *("--kills=1", "--file-faults=1", "--only=stray_files"),
    *("--steps=30", "--seed=51"),
)


@pytest.mark.slow
def test_no_interruption_changes_a_bit(tmp_path: Path) -> None:
    """The shortest form of an hour of `tests/campaigns/interruptions.py`."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.campaigns.interruptions", *CAMPAIGN],
        env=environment(TMPDIR=tmp_path, PYTHONPATH=ROOT),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all as they should be" in result.stdout
