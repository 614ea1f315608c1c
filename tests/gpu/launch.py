"""Jobs by the launcher, on the GPUs that there are."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "tests/integration/tiny.toml"


def start(folder: Path, num_ranks: int, *words: str) -> subprocess.Popen[str]:
    """A small job of 20 steps in fp32, unless `words` say otherwise."""
    variables = {
        "VIRTUAL_ENV": sys.prefix,
        "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
        "CONFIG_FILE": str(CONFIG),
        "NGPU": str(num_ranks),
    }
    return subprocess.Popen(
        [str(ROOT / "run_llama_train.sh"), "--job.dump_folder", str(folder), *words],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(folder: Path, num_ranks: int, *words: str) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step."""
    job = start(folder, num_ranks, *words)
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 0, output
    return figures(folder)


def figures(folder: Path) -> dict[int, tuple[float, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: (row["loss/train"], row["optim/grad_norm"]) for row in rows}
