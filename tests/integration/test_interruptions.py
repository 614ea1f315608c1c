"""A job that is killed and stopped at random moments goes on as if nothing had been."""

import subprocess
import sys
from pathlib import Path

from tests.integration.test_launcher import ROOT, environment

OPTIONS = ("--kills=1", "--stops=1", "--steps=80", "--seed=51")


def test_kills_and_stops_change_no_bit(tmp_path: Path) -> None:
    """The shortest of what `benchmarks/interruptions.py` does for an hour."""
    result = subprocess.run(
        [sys.executable, ROOT / "benchmarks/interruptions.py", *OPTIONS],
        env=environment(TMPDIR=tmp_path, PYTHONPATH=ROOT),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all as they should be" in result.stdout
