"""A job that is killed and stopped at random moments goes on as if nothing had been."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.jobs import ROOT, environment

CAMPAIGNS = {
    "kills and stops": ("--kills=1", "--stops=1", "--steps=80", "--seed=51"),
    "files": ("--file-faults=1", "--only=two_jobs", "--steps=20", "--seed=1"),
}


@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_no_interruption_changes_a_bit(tmp_path: Path, campaign: str) -> None:
    """The shortest forms of an hour of `benchmarks/interruptions.py`."""
    result = subprocess.run(
        [sys.executable, ROOT / "benchmarks/interruptions.py", *CAMPAIGNS[campaign]],
        env=environment(TMPDIR=tmp_path, PYTHONPATH=ROOT),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all as they should be" in result.stdout
