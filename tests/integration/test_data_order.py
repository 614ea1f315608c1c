"""A mixture that is killed and resumed on other meshes, on real processes: the same samples."""

import json
import signal
from pathlib import Path

import pytest

from tests.helpers.jobs import CONFIG, ROOT, ended, records, start_on_ranks, wait_for
from tests.integration.test_data import write_texts


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    """A TOML with a mixture of a cached and a streamed source, both soon used up."""
    folder = tmp_path_factory.mktemp("mixture")
    write_texts(folder / "small", 0, 1, 8)
    write_texts(folder / "large", 1, 4, 2)
    (folder / "job.toml").write_text(f"""
extends = "{CONFIG}"

[training]
dataset = ""
stream_shards = 4
shuffle_window = 3
steps = 18

[[training.datasets]]
name = "cached"
dataset = "json"
dataset_path = "small"
weight = 0.6

[[training.datasets]]
name = "streamed"
dataset = "json"
dataset_path = "large"
dataset_mode = "streamed"
weight = 0.4

[checkpoint]
interval = 2
""")
    return folder / "job.toml"


def train_noting(config: Path, folder: Path, ranks: int, kill_at: int | None = None) -> None:
    """Train and note what is read; kill the first rank once `kill_at` steps are reported."""
    notes = folder / "notes"
    notes.mkdir(parents=True, exist_ok=True)
    job = start_on_ranks(
        folder / "out",
        ranks=ranks,
        config=config,
        script=ROOT / "tests/helpers/holding_train.py",
        NOTES=notes,
        HF_DATASETS_CACHE=config.parent / "hf_cache",
        **({} if kill_at is None else {"HOLD_AFTER": 8 * kill_at}),
    )
    if kill_at is None:
        ended(job.wait(), 0)
        return
    metrics = folder / "out" / "metrics.jsonl"

    def is_there() -> bool:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return bool(lines) and json.loads(lines[-1])["step"] >= kill_at

    wait_for(is_there, f"step {kill_at}", 120)
    job.ranks[0].send_signal(signal.SIGKILL)
    assert job.wait().returncode == -signal.SIGKILL


def notes_of(folder: Path) -> dict[tuple[int, int], str]:
    """Hash by step and slot; a step that was taken again must have read the same."""
    found: dict[tuple[int, int], str] = {}
    for path in (folder / "notes").iterdir():
        for line in path.read_text().splitlines():
            step, slot, digest = line.split()
            assert found.setdefault((int(step), int(slot)), digest) == digest
    return found


@pytest.mark.slow
def test_killed_and_resumed_on_other_meshes_the_stream_is_the_same(mixture, tmp_path) -> None:
    """2 -> 4 -> 1 ranks, killed twice, over epoch boundaries of both sources."""
    train_noting(mixture, tmp_path / "whole", ranks=1)
    want = notes_of(tmp_path / "whole")
    last = records(tmp_path / "whole/out")[-1]
    assert last["data/epochs/cached"] > 2
    assert last["data/epochs/streamed"] >= 1
    for ranks, kill_at in ((2, 3), (4, 10), (1, None)):
        train_noting(mixture, tmp_path / "killed", ranks, kill_at)
    got = notes_of(tmp_path / "killed")
    assert got == want
    assert len(want) == 18 * 8
    for folder in ("whole", "killed"):
        assert [row["step"] for row in records(tmp_path / folder / "out")] == list(range(1, 19))
    for mine, theirs in zip(
        records(tmp_path / "killed/out"), records(tmp_path / "whole/out"), strict=True
    ):
        assert mine["loss/train"] == pytest.approx(theirs["loss/train"], rel=1e-5)
