"""Whole jobs by the launcher, by ranks without it and by one process; and their records."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.system.errors import EXIT_CONFIG
from tests.helpers.forked import Forked, ForkedRanks

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "run_llama_train.sh"
CONFIG = ROOT / "tests/integration/tiny.toml"


def environment(**variables: object) -> dict[str, str]:
    """This interpreter's, as an active one; without what would change a run."""
    ours = ("OMP_", "CUDA_VISIBLE", "PYTHONUNBUFFERED")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return kept | {
        "VIRTUAL_ENV": sys.prefix,
        "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
        "CONFIG_FILE": str(CONFIG),
        "CUDA_VISIBLE_DEVICES": "",
        **{name: str(value) for name, value in variables.items()},
    }


def command(folder: Path, *overrides: object) -> list[str]:
    return [str(LAUNCHER), "--job.dump_folder", str(folder), *map(str, overrides)]


Done = subprocess.CompletedProcess


def ended(done: Done, code: int) -> Done:
    """Check the exit code; a mistake of the user's is one error, without a traceback."""
    assert done.returncode == code, done.stdout + done.stderr
    if code == EXIT_CONFIG:
        assert done.stderr.count("meshwright:") == 1, done.stderr
        assert "Traceback" not in done.stderr + done.stdout
    return done


def launch(folder: Path, *overrides: object, code: int = 0, **variables: object) -> Done:
    """As users start a job: bash, check, tokenise, torchrun, ranks. Each imports torch: 20 s of a
    core, where `train_on_ranks` takes 4."""
    done = subprocess.run(
        command(folder, *overrides),
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=180,
        cwd="/",  # it works from anywhere
    )
    return ended(done, code)


def train_on_ranks(folder: Path, *overrides: object, code: int = 0, **options: object) -> Done:
    """Train by ranks alone, for what the launcher has no part in; options of `start_on_ranks`."""
    return ended(start_on_ranks(folder, *overrides, **options).wait(), code)


def start_on_ranks(
    folder: Path,
    *overrides: object,
    ranks: int = 2,
    config: Path = CONFIG,
    script: Path = ROOT / "train.py",
    **variables: object,
) -> ForkedRanks:
    words = ["--job.config_file", config, "--job.dump_folder", folder, *overrides]
    return ForkedRanks(ranks, [script, *words], environment(OMP_NUM_THREADS=1, **variables))


def train_alone(
    folder: Path, *overrides: object, code: int = 0, config: Path = CONFIG, **variables: object
) -> Done:
    """Train by one process, for what a second rank has no part in either."""
    words = ["--job.config_file", config, "--job.dump_folder", folder, *overrides]
    job = Forked([ROOT / "train.py", *words], environment(OMP_NUM_THREADS=1, **variables))
    return ended(job.wait(), code)


def ranks_of(folder: Path) -> list[int]:
    """Processes that train into `folder`, launchers and shells aside."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        is_rank = b"meshwright.train" in words[:5] or any(
            w.endswith(b"/train.py") for w in words[:3]
        )
        if is_rank and str(folder).encode() in words:
            found.append(int(path.parent.name))
    return found


def records(folder: Path, name: str = "metrics") -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step; fails if a step is there twice."""
    rows = records(folder)
    by_step = {row["step"]: (row["loss/train"], row["optim/grad_norm"]) for row in rows}
    assert len(by_step) == len(rows)
    return by_step


def assert_close(got: dict[int, tuple[float, float]], want: dict) -> None:
    assert got.keys() == want.keys()
    for step, figures in got.items():
        assert figures == pytest.approx(want[step], rel=1e-5), f"step {step}"


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, f"{what} did not come about in {seconds} s"
        time.sleep(0.02)
    return result
