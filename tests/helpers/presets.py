"""The presets for GPUs, and the line in the header of each that holds its plan."""

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from meshwright.commands.plan.devices import GIB, estimated, find_device
from meshwright.commands.plan.predict import predict
from meshwright.commands.plan.simulate import plan_job
from meshwright.config.loader import load_config

ROOT = Path(__file__).parents[2]
DEVICE = "h100"
SIZE = re.compile(r"^# .*, (\d+) GPUs? of 80 GB\.$", re.MULTILINE)
PLAN = re.compile(r"^# Plan: .*\n#   .*\n", re.MULTILINE)
PEAK = re.compile(r"^# Plan: ([\d.]+) GiB .* (\d{4}-\d\d-\d\d), config (\w+)$", re.MULTILINE)


def presets() -> Iterator[tuple[Path, int]]:
    """Those for GPUs of 80 GB, with their number."""
    for path in sorted((ROOT / "train_configs").glob("*.toml")):
        size = SIZE.search(path.read_text())
        if size is not None:
            yield path, int(size[1])


def fingerprint(text: str) -> str:
    """A hash of the config without its comments."""
    values = json.dumps(tomllib.loads(text), sort_keys=True)
    return hashlib.sha256(values.encode()).hexdigest()[:8]


def command(path: Path, ranks: int) -> str:
    """That prints the plan."""
    return f"meshwright plan train_configs/{path.name} --world-size {ranks} --device {DEVICE}"


def peak_gib(path: Path, ranks: int) -> float:
    """The peak of tensors on rank 0, from two shallow depths."""
    config = load_config([f"--job.config_file={path}"])
    device = estimated(find_device(DEVICE))
    job = plan_job(config, ranks, is_gpu=True)
    return predict(job, 0, device).peak_bytes / GIB


def with_plan(path: Path, text: str, ranks: int, peak: float, today: str) -> str:
    """The file's text with its plan in the header."""
    lines = (
        f"# Plan: {peak:.1f} GiB of tensors at the peak, not compiled; {today}, config "
        f"{fingerprint(text)}\n#   {command(path, ranks)}\n"
    )
    text = PLAN.sub("", text, count=1)
    end = re.search(r"^(?!#)", text, re.MULTILINE)
    assert end is not None
    return text[: end.start()] + lines + text[end.start() :]
