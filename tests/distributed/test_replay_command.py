"""`meshwright replay`: steps of jobs on real ranks come back, and planted documents are named."""

import json
import math
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from meshwright.commands.replay.compared import ComparedStep, ComparedSteps, relative
from meshwright.commands.replay.job import other_microbatch
from meshwright.commands.replay.printed import lines_of_replay
from meshwright.commands.replay.replay import Replayed
from meshwright.commands.replay.samples import (
    DocumentPart,
    SampleTable,
    StepSample,
    deviations_of,
    robust_deviations,
)
from meshwright.config.loader import load_config
from meshwright.datasets.cached_source import CachedSource
from meshwright.datasets.opening import open_data
from meshwright.datasets.samples import SampleRules
from meshwright.system.errors import ConfigError
from tests.helpers.cli import command
from tests.helpers.files import contents
from tests.helpers.jobs import CONFIG, ROOT, train_alone, train_on_ranks
from tests.helpers.slow import slow

replay = command("replay")

STAGES = """
[[training.stages]]
until_tokens = 4096
[[training.stages]]
seq_len = 32
"""

JOBS: dict[str, list[object]] = {
    "fsdp2 x tp, ema": [
        *("--parallelism.data_parallel_shard_degree", 2),
        *("--parallelism.tensor_parallel_degree", 2, "--checkpoint.average.decay", 0.9),
    ],
    "hsdp x pp, accumulation": [
        *("--parallelism.data_parallel_replicate_degree", 2),
        *("--parallelism.data_parallel_shard_degree", 1),
        *("--parallelism.pipeline_parallel_degree", 2),
    ],
    "fsdp2 x cp, packing": [
        *("--parallelism.data_parallel_shard_degree", 2),
        *("--parallelism.context_parallel_degree", 2, "--training.packing", "best_fit"),
    ],
    "experts": [
        *("--model.name", "qwen3_moe", "--model.args.head_dim", 8, "--model.args.n_experts", 4),
        *("--model.args.n_active", 2, "--model.args.expert_dim", 32),
        *("--parallelism.expert_parallel_degree", 2),
    ],
    "streamed, a step skipped": [
        *("--training.dataset_mode", "streamed", "--bad_steps.policy", "skip"),
        *("--bad_steps.spike_std", 0.5, "--bad_steps.spike_window", 2),
    ],
}

EVERYDAY = "hsdp x pp, accumulation"
INNER = "tensor_parallel pipeline_parallel"


def _results(capsys: pytest.CaptureFixture[str], *words: object) -> dict:
    capsys.readouterr()
    replay([*words, "--json"])
    return json.loads(capsys.readouterr().out)


def _differences(result: dict) -> list[tuple[float, float]]:
    """Relative ones of loss and norm, of every recorded step."""
    return [
        tuple(
            abs(step["taken"][name] / step["recorded"][name] - 1) for name in ("loss", "grad_norm")
        )
        for step in result["steps"]
        if step["recorded"]
    ]


@pytest.mark.parametrize("name", [EVERYDAY, *slow(*(name for name in JOBS if name != EVERYDAY))])
def test_a_step_of_four_ranks_comes_back_on_one_process(name, tmp_path: Path, capsys) -> None:
    """Within rounding, and to the bit on the mesh of the run, whose files stay as they are."""
    run = tmp_path / "run"
    train_on_ranks(run, *JOBS[name], "--training.steps", 13, ranks=4)
    before = contents(run)
    result = _results(capsys, run, "--step", 13)
    assert [step["taken"]["step"] for step in result["steps"]] == [11, 12, 13]
    differences = _differences(result)
    assert len(differences) == 3
    assert all(loss < 1e-6 and norm < 1e-5 for loss, norm in differences), differences
    assert result["first_other_step"] is None
    result = _results(capsys, run, "--step", 13, "--ngpu", 4)
    assert _differences(result) == [(0, 0)] * 3
    assert [step["twin"] for step in result["steps"]] == [None] * 3  # none is needed
    assert contents(run) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "dtype", "of_loss", "of_norm"),
    [
        (f"data_parallel_shard {INNER}", "float32", 1e-6, 1e-5),
        (f"context_parallel {INNER}", "float32", 1e-6, 1e-5),
        # bf16 keeps 8 bits: 4e-3 a value, of which the mean over 512 tokens leaves 2e-4
        (f"data_parallel_shard {INNER}", "bfloat16", 1e-3, 4e-2),
    ],
)
def test_a_step_of_eight_ranks_comes_back_on_one_and_on_two(
    axes: str, dtype: str, of_loss: float, of_norm: float, tmp_path: Path, capsys
) -> None:
    keys = [f"--parallelism.{axis}_degree" for axis in axes.split()]
    mesh = [word for key in keys for word in (key, 2)]
    words = ["--training.mixed_precision_param", dtype, "--training.steps", 7]
    train_on_ranks(tmp_path / "run", *mesh, *words, ranks=8)
    plain = [word for key in keys if "data" not in key for word in (key, 1)]
    for ranks, own in ((1, []), (2, plain)):
        result = _results(capsys, tmp_path / "run", "--step", 7, "--ngpu", ranks, *own)
        differences = _differences(result)
        assert len(differences) == 2
        assert all(loss < of_loss and norm < of_norm for loss, norm in differences), differences
        assert result["first_other_step"] is None


def test_a_step_of_a_later_stage_comes_back(tmp_path: Path, capsys) -> None:
    """Stage 2 begins with the checkpoint of the end of stage 1, step 8; the run with none."""
    config = tmp_path / "stages.toml"
    config.write_text(CONFIG.read_text().replace("../../assets", str(ROOT / "assets")) + STAGES)
    words = ["--training.steps", 14, "--checkpoint.keep_latest_k", 0]
    train_on_ranks(tmp_path / "run", *words, config=config)
    for step, first in ((14, 11), (10, 9), (7, 6), (3, 1)):
        result = _results(capsys, tmp_path / "run", "--step", step)
        assert result["steps"][0]["taken"]["step"] == first
        assert all(loss < 1e-6 and norm < 1e-5 for loss, norm in _differences(result))
        assert result["steps"][-1]["recorded"]["step"] == step
    (tmp_path / "run/checkpoint/step-8").rename(tmp_path / "away")
    with pytest.raises(ConfigError, match="no checkpoint of stage 2, .* after step 8, is before"):
        replay([tmp_path / "run", "--step", 9])


def _write_documents(folder: Path) -> None:
    """256 of Python's library; document 137 is of random Chinese characters."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:170]
    texts = [file.read_text(errors="ignore") for file in files]
    pieces = [text[at : at + 2000] for text in texts for at in (0, 2000, 4000)]
    found = [piece for piece in pieces if len(piece) > 1500][:256]
    assert len(found) == 256
    characters = random.Random(1).choices(range(0x4E00, 0x9FA5), k=700)
    found[137] = "".join(map(chr, characters))
    lines = (json.dumps({"text": text}) + "\n" for text in found)
    (folder / "texts.jsonl").write_text("".join(lines))


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 60 steps, some of which have read a part of the document."""
    folder = tmp_path_factory.mktemp("spoilt")
    _write_documents(folder)
    data = ["--training.dataset", "json", "--training.dataset_path", folder / "texts.jsonl"]
    words = ["--checkpoint.interval", 10, "--checkpoint.keep_latest_k", 0]
    words += ["--training.global_batch_size", 16, "--training.local_batch_size", 16]
    train_alone(folder / "run", *data, *words, "--optimizer.lr", 1.5e-2, "--training.steps", 60)
    return folder / "run"


def _steps_with(run: Path, number: int) -> list[int]:
    """The late steps that have a sample of nothing but that document."""
    config = load_config([str(run / "config.toml")])
    (source,) = open_data("training", config)
    assert isinstance(source, CachedSource)
    samples = source.samples(SampleRules(config.training.seq_len + 1, config.training.seed))
    return [
        step
        for step in range(35, 61)
        for index in range(16 * (step - 1), 16 * step)
        if {source.cache.document_at(at).number for at, _ in samples.ranges(index)} == {number}
    ]


def test_the_bad_document_is_named_by_the_step_and_by_a_scan(spoilt: Path, capsys) -> None:
    step = _steps_with(spoilt, 137)[-1]
    table = _results(capsys, spoilt, "--step", step)["table"]
    worst = table["samples"][0]
    assert worst["documents"][0]["name"] == "json 137"
    assert worst["documents"][0]["place"] == f"{spoilt.parent}/texts.jsonl:138"
    assert worst["grad_norm"] > 1.2 * table["samples"][1]["grad_norm"]
    assert worst["deviations"] > 2.5
    scan = _results(capsys, spoilt, "--scan", "--step", 31, "--samples", 4)
    assert scan["num_documents"] == 256
    assert scan["highest"][0]["name"] == "json 137"
    assert scan["highest"][0]["place"] == f"{spoilt.parent}/texts.jsonl:138"
    assert [len(scan[end]) for end in ("highest", "lowest")] == [4, 4]
    assert scan["lowest"][0]["deviations"] < 0
    newest = _results(capsys, spoilt, "--scan", "--samples", 2)  # of a run without a step left
    assert newest["num_documents"] == 256
    assert newest["highest"][0]["loss"] != scan["highest"][0]["loss"]


def test_samples_that_stand_out_are_told_with_their_documents(spoilt, capsys, monkeypatch) -> None:
    monkeypatch.setattr("meshwright.commands.replay.samples.STANDS_OUT", 2.5)
    replay([spoilt, "--step", _steps_with(spoilt, 137)[-1]])
    out = capsys.readouterr().out
    assert "equal to the record in every bit" in out
    assert re.search(r"without samples? [\d, ]+ the gradient norm would be 0\.", out)
    assert re.search(rf"  json 137 +{spoilt.parent}/texts.jsonl:138\n +costliest tokens of s", out)
    assert f"meshwright data {spoilt}/config.toml --documents json 137" in out


def test_a_record_that_is_not_the_run_s_is_seen(spoilt: Path, tmp_path: Path, capsys) -> None:
    """By a hundredth of a per mille in one figure: the code of the run could be another."""
    for path in spoilt.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "steps.jsonl").unlink()
    rows = [json.loads(line) for line in (spoilt / "steps.jsonl").read_text().splitlines()]
    rows[23]["grad_norm"] *= 1 + 1e-5
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit, match="1"):
        replay([tmp_path, "--step", 24])
    out = " ".join(capsys.readouterr().out.split())
    assert "the gradient norm of step 23 by 1.0e-05, and rounding" in out
    assert "steps 21 to 23 not as recorded: loss" in out


def test_a_start_with_a_fresh_optimizer_is_replayed_with_one(tmp_path: Path, capsys) -> None:
    words = ["--checkpoint.interval", 2, "--checkpoint.keep_latest_k", 0]
    train_alone(tmp_path, *words, "--training.steps", 2)
    fresh = ["--checkpoint.exclude_from_loading", '["optimizer"]']
    train_alone(tmp_path, *words, *fresh, "--training.steps", 4)
    assert _differences(_results(capsys, tmp_path, "--step", 4)) == [(0, 0)] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "^RUN: not given\n  fix: name a dump folder"),
        (["nowhere", "--step", 1], "RUN_DIR = 'nowhere': no such folder"),
        (["RUN"], "^--step = None: not given"),
        (["RUN", "--step", 61], "^--step = 61: the run has taken 60 steps\n  fix: .* 1 to 60"),
        (["RUN", "--step", 0], "^--step = 0"),
        (["RUN", "--step", 5, "--ngpu", 0], "^--ngpu = 0: must be positive"),
        (["RUN", "--step", 5, "--optimizer.lrr", 1], "unknown key optimizer.lrr"),
        (
            ["RUN", "--step", 15, "--model.args.dim", 64],
            "model.args.dim = 64: checkpoint .*step-10",
        ),
    ],
)
def test_what_cannot_be_replayed_is_one_error(spoilt: Path, words, message) -> None:
    with pytest.raises(ConfigError, match=message):
        replay([spoilt if word == "RUN" else word for word in words])


def _row(step: int, loss: float | None, grad_norm: float | None = 1.0) -> dict:
    return {"step": step, "loss": loss, "grad_norm": grad_norm}


def test_values_that_are_not_finite_equal_no_finite_ones() -> None:
    nan, inf = math.nan, math.inf
    pairs = [(nan, 1.0), (inf, nan), (1.0, nan), (2.0, 2.0)]
    assert [relative(*pair) for pair in pairs] == [inf, 0, inf, 0]
    broken = ComparedStep(_row(1, nan, nan), _row(1, 2.0))
    assert not broken.is_equal
    assert ComparedSteps("float32", [broken]).not_as_recorded is broken
    assert ComparedStep(_row(1, nan, nan), _row(1, None, None)).is_equal, "null in a record"


def test_a_sample_without_a_finite_loss_stands_out_and_one_without_targets_does_not() -> None:
    counted = torch.ones(6, 4, dtype=torch.bool)
    counted[5] = False
    means = torch.tensor([2.0, 2.1, 1.9, 2.05, math.nan, 0.0])
    *others, broken, empty = deviations_of(means, counted).tolist()
    assert (broken, empty) == (math.inf, 0)
    assert max(map(abs, others)) < 3.5
    assert not deviations_of(torch.full((6,), math.nan), counted).any()  # it's not one of them
    assert robust_deviations(torch.empty(0)).tolist() == []


@pytest.mark.parametrize(
    ("size", "of_rank", "other"),
    [(1, 12, 2), (2, 12, 1), (6, 12, 3), (12, 12, 6), (3, 9, 1), (9, 9, 1), (1, 9, 0)],
)
def test_the_twin_has_other_microbatches_that_still_divide_the_batch(size, of_rank, other) -> None:
    training = Mock(local_batch_size=size, global_batch_size=2 * of_rank)
    job = Mock(**{"resolved.config.training": training, "meshes.dp.size.return_value": 2})
    assert other_microbatch(job) == other


@pytest.mark.parametrize(
    ("first", "advice"),
    [(1, "--job.dump_folder NEW"), (5, "--checkpoint.rewind_to 5")],
)
def test_the_advice_goes_back_only_where_there_is_a_checkpoint(first: int, advice: str) -> None:
    part = DocumentPart("json 137", 100, 8.0, "a.jsonl:138")
    sample = StepSample(0, 8.0, 7.0, None, 0.0, [part], [])
    steps = [ComparedStep(_row(step, 2.0), None) for step in range(first, 7)]
    replayed = Replayed("float32", steps, SampleTable([sample], [0], None))
    lines = [*lines_of_replay(replayed, [], "out/run")]
    assert f"  meshwright train CONFIG {advice} \\" in lines


def _compared(recorded: float, twin: Callable[[int], float]) -> ComparedSteps:
    steps = [
        ComparedStep(_row(n, 2.0), _row(n, 2.0 * (1 + recorded)), _row(n, 2.0 * (1 + twin(n))))
        for n in range(1, 11)
    ]
    return ComparedSteps("float32", steps)


def test_the_bound_is_ten_times_the_rounding_and_growth_beyond_the_horizon_is_told() -> None:
    assert _compared(9e-6, lambda step: 1e-6).not_as_recorded is None
    other = _compared(1.1e-5, lambda step: 1e-6).not_as_recorded
    assert other is not None
    assert other.taken["step"] == 1
    assert _compared(0, lambda step: 1e-6).beyond_horizon is None
    grown = _compared(0, lambda step: 1e-8 * 4**step)
    assert grown.beyond_horizon is not None
    assert grown.beyond_horizon.taken["step"] == 9
    assert [step.taken["step"] for step in grown.comparable] == [*range(1, 9)]
    assert max(grown.bounds) < 1e-2, "of the steps before"
