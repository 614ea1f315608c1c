"""A proof on a console and in its files: also an unfinished one, and a case that cannot run."""

import json
import math
from dataclasses import replace

import pytest

from meshwright.commands.prove.cases import build_case, reference_case
from meshwright.commands.prove.compare import Reference, Verdict, compare
from meshwright.commands.prove.measure import COMPARED, Measurement, ShardComparison
from meshwright.commands.prove.prove import Row, _why_not
from meshwright.commands.prove.report import COLUMNS, cells, line, summary, write
from meshwright.commands.prove.shrink import HIGHEST_LR, shrink
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.system.errors import ConfigError
from meshwright.train.resolve_model import resolve_model
from tests.helpers.cli import command

prove = command("prove")


def small_job(*words: str) -> JobConfig:
    config = load_config([*words])
    return shrink(config, resolve_model(config)[1])


def test_rows_fit_a_console_and_a_long_name_has_a_line_of_its_own(monkeypatch) -> None:
    row = ("mesh: dp_shard 2 x tp 2", *("1" * 6 for _ in COLUMNS[1:-1]), "FAILED")
    for columns in (80, 100):
        monkeypatch.setenv("MESHWRIGHT_COLUMNS", str(columns))
        table = "\n".join([line(" 1/87", COLUMNS), line(" 1/87", row)]).splitlines()
        assert all(len(text) <= columns for text in table)
        assert table[0].index("verdict") == table[-1].index("FAILED")
        assert len(table) == 2 + (columns == 80)
    monkeypatch.undo()
    row = ("mesh: dp_shard 2 x tp 2", *("1" * 7 for _ in COLUMNS[1:-1]), "FAILED")
    assert line("1/8", row).startswith(f"1/8  {row[0]}")
    assert line("1/8", row).endswith("FAILED")
    name = "InterleavedZeroBubble, reshard never: pp 2 x dp_shard 2"
    own_line, rest = line("1/8", (name, *row[1:])).splitlines()
    assert own_line == f"1/8  {name}"
    assert rest.index("FAILED") == line("1/8", row).index("FAILED")
    monkeypatch.setenv("MESHWRIGHT_COLUMNS", "40")
    name, rest = line("1/8", ("weights", *("1" for _ in COLUMNS[1:-1]), "FAILED")).splitlines()
    assert (name, rest.split()) == ("1/8  weights", ["1"] * 5 + ["FAILED"])


def test_an_unfinished_proof_proves_nothing(tmp_path) -> None:
    small = JobConfig()
    rows = [Row(reference_case(small), Verdict(), 1.0)]
    write(tmp_path, small, rows, num_cases=3)
    proof = json.loads((tmp_path / "proof.json").read_text())
    assert (proof["proved"], proof["num_cases"], len(proof["cases"])) == (False, 3, 1)
    assert "1 of 3 cases equal one process, 2 not run" in (tmp_path / "proof.md").read_text()
    write(tmp_path, small, rows, num_cases=1)
    assert json.loads((tmp_path / "proof.json").read_text())["proved"] is True


def test_a_case_without_a_compiler_is_not_run(monkeypatch, tmp_path) -> None:
    small = small_job("--parallelism.data_parallel_shard_degree=2")
    compiled = build_case("compiled", small, {"dp_shard": 2}, compile={"enable": True})
    eager = build_case("mesh", small, {"dp_shard": 2})
    monkeypatch.setenv("CXX", "none")
    assert _why_not(eager) == ""
    reason = _why_not(compiled)
    assert reason == "there is no C++ compiler 'none' (CXX names another)"
    row = Row(compiled, Verdict(not_run=reason), 0.0)
    assert cells(row)[0::12] == (compiled.name, "not run")
    assert {*cells(row)[2:-1]} == {"-"}
    rows = [row, Row(eager, Verdict(), 1.0)]
    assert summary(rows, 2) == "1 of 2 cases equal one process, 1 not run"
    write(tmp_path, small, rows, num_cases=2)
    assert json.loads((tmp_path / "proof.json").read_text())["proved"] is False
    with pytest.raises(ConfigError, match="mask_documents = true: .* there is no C.. compiler"):
        prove(["debug_model", "--training.mask_documents=true"])


def test_a_folder_that_cannot_be_written_to_is_found_before_the_first_case(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--output = .*/file/proof': cannot be written to"):
        prove(["debug_model", "--output", str(tmp_path / "file" / "proof")])


@pytest.mark.parametrize(("lr", "small"), [(3e-4, 3e-4), (1e-3, 1e-3), (5e-2, HIGHEST_LR)])
def test_the_small_job_has_a_rate_at_which_rounding_does_not_grow(lr, small) -> None:
    assert small_job(f"--optimizer.lr={lr}").optimizer.lr == small
    groups = '--optimizer.groups=[{parameters = ["output.weight"], lr_scale = 10.0}]'
    assert small_job(f"--optimizer.lr={lr}", groups).optimizer.lr == min(lr, HIGHEST_LR / 10)


@pytest.mark.parametrize(("gap", "is_named"), [(9e-6, False), (2e-5, True), (math.nan, True)])
def test_other_choices_are_named_where_scores_differ_by_more_than_rounding(gap, is_named) -> None:
    same = {"w": ShardComparison((0,), (1,), 0, 0.0)}
    seen = Measurement([2.0], [1.0], shards=dict.fromkeys(COMPARED, same))
    reference = Reference(seen, {"w": (1,)}, {kind: {"w": 1.0} for kind in COMPARED})
    failures = compare(reference, [replace(seen, choice_gap=gap)]).failures
    words = f"experts: chosen otherwise where scores differ by {gap:.1e}"
    assert failures == [words] * is_named


@pytest.mark.parametrize("place", ["one process", "rank 0"])
def test_a_state_that_does_not_follow_from_the_choices_is_named(place) -> None:
    """Of one process too: a mesh that takes its choices is right by itself."""
    same = {"w": ShardComparison((0,), (1,), 0, 0.0)}
    seen = Measurement([2.0], [1.0], shards=dict.fromkeys(COMPARED, same))
    wrong = replace(seen, wrong_counts=["layers.0.feed_forward.load"])
    alone, rank = (wrong, seen) if place == "one process" else (seen, wrong)
    reference = Reference(alone, {"w": (1,)}, {kind: {"w": 1.0} for kind in COMPARED})
    failures = compare(reference, [rank]).failures
    words = f"state: not as the choices add up: layers.0.feed_forward.load, on {place}"
    assert failures == [words]
