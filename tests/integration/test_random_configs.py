"""Configs that nobody chose equal one process."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.jobs import ROOT, environment

OPTIONS = ("--configs=2", "--seed=11", "--most-ranks=2")


@pytest.mark.slow
def test_random_configs_equal_one_process(tmp_path: Path) -> None:
    """The shortest of what `tests/campaigns/random_configs.py` does for an hour."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.campaigns.random_configs", *OPTIONS],
        env=environment(TMPDIR=tmp_path, PYTHONPATH=ROOT),
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" equal ") == 2
    assert result.stdout.endswith("2 configs, seed 11: 0 wrong\n")
