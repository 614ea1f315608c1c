"""When multinode_trainer.slurm takes its place in the queue again."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "multinode_trainer.slurm"
PROGRAMS = {
    "srun": 'exit "$CODE"',
    "scontrol": 'if [ "$1" = requeue ]; then echo again; else echo node1; fi',
    "squeue": "echo RUNNING",
}


@pytest.mark.parametrize(
    ("code", "seconds", "again"),
    [(0, 9999, False), (75, 10, True), (5, 10, True), (6, 1700, False), (6, 1801, True),
     (1, 9999, False), (137, 9999, False)],
)  # fmt: skip
def test_it_starts_again_only_if_that_may_help(tmp_path, code, seconds, again) -> None:
    for name, line in PROGRAMS.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "environment.sh").write_text("prepare_environment() { :; }\n")
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "node[1-2]"}
    slurm |= {"SLURM_NNODES": "2", "SLURM_JOB_ID": "17"}
    # bash counts on from the number in SECONDS
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CODE": str(code), "SECONDS": str(seconds)}
    job = subprocess.run(
        ["bash", SCRIPT], env=os.environ | slurm | given, capture_output=True, text=True
    )
    assert (job.returncode, job.stdout) == (code, "again\n" if again else "")
