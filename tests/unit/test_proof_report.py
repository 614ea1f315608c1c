"""A proof on a console and in its files: also an unfinished one, and a case that cannot run."""

import json
import math
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from meshwright.commands.prove.bounds import BF16, BOUNDS, TIES
from meshwright.commands.prove.cases import build_case, reference_case
from meshwright.commands.prove.checked import Checked
from meshwright.commands.prove.compare import compare
from meshwright.commands.prove.compare_records import compare_records
from meshwright.commands.prove.measurement import COMPARED, Measurement, Reference, ShardComparison
from meshwright.commands.prove.metric_slack import WatchedMetrics
from meshwright.commands.prove.properties import Property
from meshwright.commands.prove.prove import Row, _why_not
from meshwright.commands.prove.report import cells, summary, write
from meshwright.commands.prove.shrink import HEAD_DIM, HIGHEST_LR, OWN_HEAD_DIM, PEAK_TFLOPS, shrink
from meshwright.commands.prove.verdict import LATER_GRADIENT, Verdict
from meshwright.config.job_config import JobConfig, Metrics
from meshwright.config.loader import load_config
from meshwright.system.errors import ConfigError
from meshwright.train.metric_table import METRICS, Metric
from meshwright.train.own_metrics import OwnMetrics
from meshwright.train.resolve_model import resolve_model
from tests.helpers.cli import command

prove = command("prove")


def small_job(*words: str) -> JobConfig:
    config = load_config([*words])
    return shrink(config, resolve_model(config)[1])


def test_an_unfinished_proof_proves_nothing(tmp_path) -> None:
    small = JobConfig()
    rows = [Row(reference_case(small), Verdict(), 1.0)]
    write(tmp_path, small, rows, num_cases=3)
    proof = json.loads((tmp_path / "proof.json").read_text())
    assert (proof["proved"], proof["num_cases"], len(proof["cases"])) == (False, 3, 1)
    assert proof["summary"] == "1 of 3 cases equal one process, 2 not run"
    assert proof["summary"] in (tmp_path / "proof.md").read_text()
    write(tmp_path, small, rows, num_cases=1)
    assert json.loads((tmp_path / "proof.json").read_text())["proved"] is True


def test_a_reference_that_differs_from_plain_pytorch_proves_nothing(tmp_path) -> None:
    small, checked = JobConfig(), Checked(not_checked=["float8.enable"])
    rows = [Row(reference_case(small), Verdict(), 1.0)]
    checked.number("loss", "of step 1", 2.0, 2.0 + 1e-7, 1e-5)
    write(tmp_path, small, rows, 1, checked)
    proof = json.loads((tmp_path / "proof.json").read_text())
    assert proof["proved"] is True
    assert proof["reference"]["verdict"] == "equal"
    assert proof["reference"]["not_checked"] == ["float8.enable"]
    row = "Reference against plain PyTorch: equal; loss 5.0e-08; not checked: float8.enable; 0.0 s."
    assert row in (tmp_path / "proof.md").read_text()
    for step in (2, 3):  # the first that is wrong is named
        checked.number("loss", f"of step {step}", 2.0, math.nan, 1e-5)
    write(tmp_path, small, rows, 1, checked)
    proof = json.loads((tmp_path / "proof.json").read_text())
    assert proof["proved"] is False
    failure = "loss of step 2: 2 instead of nan, relative error nan"
    assert proof["reference"]["failures"] == [failure]
    assert f"- reference: {failure}" in (tmp_path / "proof.md").read_text()


def test_a_property_that_fails_is_named_and_nothing_is_proved(tmp_path) -> None:
    rows = [Row(reference_case(JobConfig()), Verdict(), 1.0)]
    causal = Property("causal", 0.0, 1e-5, "no logit changes")
    reach = Property("reach", 32, 0, "keys", ["layer 0: query 3 sees keys 0-4"])
    for properties in ([causal], [causal, reach]):
        write(tmp_path, JobConfig(), rows, 1, Checked(), properties)
        proof = json.loads((tmp_path / "proof.json").read_text())
        assert proof["proved"] is (properties == [causal])
        assert [one["verdict"] for one in proof["properties"]] == ["equal", "FAILED"][
            : len(properties)
        ]
    text = (tmp_path / "proof.md").read_text()
    assert "| causal | 0 | 1e-05 | equal | no logit changes |\n| reach | 32 | 0 | FAILED |" in text
    assert "- reach: layer 0: query 3 sees keys 0-4" in text


def test_parameters_that_differ_are_named_with_the_worst_first() -> None:
    checked, want = Checked(), {name: torch.ones(2) for name in "abcdef"}
    got = {name: tensor * (1 + 0.1 * index) for index, (name, tensor) in enumerate(want.items())}
    got["b"] = torch.tensor([math.nan, 1.0])
    del got["c"]
    checked.tensors("gradient", "at step 1", got, want, dict.fromkeys(want, 1e-3))
    assert [line.split(":")[0] for line in checked.failures] == [
        f"gradient of {name} at step 1" for name in "bcf"
    ]
    assert checked.failures[-1].endswith("relative error 5.0e-01, and 2 more")
    assert math.isnan(checked.errors["gradient"])
    assert Checked().verdict == "not checked"


def test_a_case_without_a_compiler_is_not_run(monkeypatch, tmp_path) -> None:
    small = small_job("--parallelism.data_parallel_shard_degree=2")
    compiled = build_case("compiled", small, {"dp_shard": 2}, compile={"enable": True})
    eager = build_case("mesh", small, {"dp_shard": 2})
    monkeypatch.setenv("CXX", "none")
    assert _why_not(eager) == ""
    reason = _why_not(compiled)
    assert reason == "there is no C++ compiler 'none' (CXX names another)"
    row = Row(compiled, Verdict(not_run=reason), 0.0)
    assert cells(row)[0::13] == (compiled.name, "not run")
    assert {*cells(row)[2:-1]} == {"-"}
    rows = [row, Row(eager, Verdict(), 1.0)]
    assert summary(rows, 2) == "1 of 2 cases equal one process, 1 not run"
    write(tmp_path, small, rows, num_cases=2)
    proof = json.loads((tmp_path / "proof.json").read_text())
    assert proof["proved"] is False
    assert [case["verdict"] for case in proof["cases"]] == ["not run", "equal"]
    with pytest.raises(ConfigError, match="mask_documents = true: .* there is no C.. compiler"):
        prove(["debug_model", "--training.mask_documents=true"])


def test_a_folder_that_cannot_be_written_to_is_found_before_the_first_case(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--output = .*/file/proof': cannot be written to"):
        prove(["debug_model", "--output", str(tmp_path / "file" / "proof")])


@pytest.mark.parametrize("lr", [3e-4, 5e-2])
def test_the_small_job_has_a_rate_at_which_rounding_does_not_grow(lr) -> None:
    assert small_job(f"--optimizer.lr={lr}").optimizer.lr == min(lr, HIGHEST_LR)
    groups = '--optimizer.groups=[{parameters = ["output.weight"], lr_scale = 10.0}]'
    assert small_job(f"--optimizer.lr={lr}", groups).optimizer.lr == min(lr, HIGHEST_LR / 10)


@pytest.mark.parametrize("steps", [0, 1, 200])
def test_the_small_job_warms_up(steps) -> None:
    """Or the first step is so large that rounding grows, and right meshes are accused."""
    assert small_job(f"--lr_scheduler.warmup_steps={steps}").lr_scheduler.warmup_steps == 2


def test_the_small_job_has_the_metrics_of_the_user_s_and_writes_none() -> None:
    words = ["grad_norm_by_group=true", "enable_wandb=true", "log_freq=7", "every_step=true"]
    small = small_job(*(f"--metrics.{word}" for word in words)).metrics
    assert small == Metrics(
        grad_norm_by_group=True, enable_tensorboard=False, peak_tflops=PEAK_TFLOPS
    )


@pytest.mark.parametrize(
    ("words", "width"),
    [
        ("", HEAD_DIM),
        ("--model.args.head_dim=32", HEAD_DIM),  # of 8 heads of 256, as they are without it
        ("--model.args.head_dim=64", OWN_HEAD_DIM),
    ],
)
def test_heads_of_the_small_job_have_a_width_of_their_own_if_the_model_s_have(words, width) -> None:
    small = small_job("--model.args.dim=256", *words.split())
    assert small.model.args["head_dim"] == width


SAME = {"w": ShardComparison((0,), (1,), 0, 0.0)}
RECORD = {"step": 1, "data/tokens": 8}
SEEN = Measurement([2.0], [1.0], [RECORD], shards=dict.fromkeys(COMPARED, SAME))
"""By one process or a rank, of a model with a parameter of one element."""
NORMS = {kind: {"w": 1.0} for kind in COMPARED}


@pytest.mark.parametrize(("gap", "is_named"), [(9e-6, False), (2e-5, True), (math.nan, True)])
def test_other_choices_are_named_where_scores_differ_by_more_than_rounding(gap, is_named) -> None:
    reference = Reference(SEEN, {"w": (1,)}, NORMS)
    failures = compare(reference, [replace(SEEN, choice_gap=gap)]).failures
    words = f"experts: chosen otherwise where scores differ by {gap:.1e}"
    assert failures == [words] * is_named


def test_every_quantity_that_differs_is_named() -> None:
    """On two ranks that hold a parameter of two elements, one each; the second is wrong."""

    def rank(number: int, *, different: int = 0, error: float = 0.0, **others: object):
        shard = ShardComparison((number,), (1,), different, error)
        shards = {kind: {"w": shard} for kind in COMPARED}
        samples = {(1, number): "hash"}
        figures = {"validation/loss": 2.0}
        seen = Measurement([2.0], [1.0], [RECORD], samples, shards, validation=figures)
        return replace(seen, **others)

    seen = replace(rank(0), samples={(1, 0): "hash", (1, 1): "hash"})
    reference, first = Reference(seen, {"w": (2,)}, NORMS), rank(0)
    assert compare(reference, [first, rank(1)]).failures == []
    wrong = {
        "initial w: ranks hold 1 of 2": first,
        "initial w: differs on rank 1": rank(1, different=1),
        "gradient of w: ": rank(1, error=1e-2),
        "update: wrong for 1 of 1": rank(1, error=1e-2),
        "batches: 1 samples differ": replace(rank(1), samples={(1, 1): "other"}),
        "loss: 2.001 instead of 2 at step 1": replace(rank(1), losses=[2.001]),
        "gradient norm: 1.01 instead of 1": replace(rank(1), grad_norms=[1.01]),
        "validation/loss: 2.001": replace(rank(1), validation={"validation/loss": 2.001}),
        "second validation: differs": rank(1, unlike_before=["loss"]),
        "checkpoint": rank(1, wrong_in_checkpoint=["w"]),
        "load": rank(1, wrong_after_load=["w"]),
        "data/tokens: 16 instead of 8 at step 1 on rank 1": rank(
            1, records=[RECORD | {"data/tokens": 16}]
        ),
        "resume": rank(1, wrong_after_resume=["w"]),
        "state: not as the choices add up: w, on rank 1": rank(1, wrong_counts=["w"]),
    }
    for words, second in wrong.items():
        failures = compare(reference, [first, second]).failures
        assert failures, words
        assert words in "\n".join(failures)


def test_a_row_says_within_which_bound_it_is_equal() -> None:
    """Of the parameter nearest to its bound: "w", whose error is smaller than that of "v"."""
    errors = {"v": 0.02, "w": 0.0139}
    shards = {name: ShardComparison((0,), (1,), 0, error**2) for name, error in errors.items()}
    seen = Measurement([2.0], [1.0], shards=dict.fromkeys(COMPARED, shards))
    roundings = {"gradients": {"v": 0.1, "w": 0.014}}
    norms = {kind: dict.fromkeys(errors, 1.0) for kind in COMPARED}
    reference = Reference(seen, dict.fromkeys(errors, (1,)), norms, roundings)
    verdict = compare(reference, [seen], BOUNDS["bf16"])
    row = Row(reference_case(JobConfig()), verdict, 1.0)
    assert "0.0139 of 0.028" in cells(row)
    assert verdict.errors["of"] == "w"
    assert verdict.failures == []


STORED = replace(BOUNDS["user types"], stored=2 * BF16, different=TIES)


@pytest.mark.parametrize(("num_different", "is_named"), [(3, False), (4, True)])
def test_gradients_in_bf16_differ_at_ties_alone(num_different, is_named) -> None:
    """A rounding more would show in half of the elements, at an error below the bound."""
    shard = ShardComparison((0,), (100,), num_different, 0.0)
    seen = Measurement([2.0], [1.0], shards={key: {"w": shard} for key in COMPARED})
    roundings = {kind: {"w": 0.0} for kind in ("gradients", "updates")}
    reference = Reference(seen, {"w": (100,)}, NORMS, roundings, {"w"})
    failures = compare(reference, [seen], STORED).failures
    words = "gradients in bfloat16: 4.0% of their elements differ, bound 3.1%"
    assert failures == ["initial w: differs on rank 0", *[words] * is_named]


@pytest.mark.parametrize(("error", "is_wrong"), [(9e-5, False), (1e-3, True)])
def test_gradients_in_fp32_beside_bf16_weights_differ_by_fp32_sums_alone(error, is_wrong) -> None:
    """Of "v", of a module in fp32, half of the elements may have another last bit, but their error
    is bounded as if all were in fp32; one rounding to bf16 is ten times as much. Of "w", in bf16,
    an error of two roundings is none, and each element counts, however many "v" has."""

    def failures(num_different: int) -> list[str]:
        shards = {
            "v": ShardComparison((0,), (1000,), 500, error**2),
            "w": ShardComparison((0,), (100,), num_different, (2 * BF16) ** 2),
        }
        seen = Measurement([2.0], [1.0], shards=dict.fromkeys(COMPARED, shards))
        norms = {kind: dict.fromkeys(shards, 1.0) for kind in COMPARED}
        roundings = {kind: dict.fromkeys(shards, 0.0) for kind in ("gradients", "updates")}
        shapes = {"v": (1000,), "w": (100,)}
        found = compare(Reference(seen, shapes, norms, roundings, {"w"}), [seen], STORED).failures
        return [line for line in found if line.startswith("gradient")]

    of_v = [f"gradient of v: relative error {error:.1e}, bound 1.0e-04"] * is_wrong
    of_w = "gradients in bfloat16: 4.0% of their elements differ, bound 3.1%"
    assert failures(3) == of_v
    assert failures(4) == [*of_v, of_w]


@pytest.mark.parametrize(
    ("num_different", "is_tied", "is_named"),
    [(50, True, False), (51, True, True), (3, False, False), (4, False, True)],
)
def test_a_tied_embedding_of_two_stages_is_rounded_again(num_different, is_tied, is_named) -> None:
    """Half of its elements may then differ, and an untied one's only at ties."""
    name = "tok_embeddings.weight"
    error = 5 * BF16 if is_tied else 2 * BF16
    shards = {name: ShardComparison((0,), (100,), num_different, error**2)}
    seen = Measurement([2.0], [1.0], shards=dict.fromkeys(COMPARED, shards))
    norms = {kind: dict.fromkeys(shards, 1.0) for kind in COMPARED}
    roundings = {kind: dict.fromkeys(shards, 0.0) for kind in ("gradients", "updates")}
    names = [name] if is_tied else [name, "output.weight"]
    shapes = dict.fromkeys(names, (100,))
    reference = Reference(seen, shapes, norms, roundings, {name})
    found = compare(reference, [seen], replace(STORED, tied=3 * BF16)).failures
    assert any(line.startswith("gradient") for line in found) is is_named


def test_an_update_in_narrower_types_may_differ_by_twice_its_rounding() -> None:
    bounds = replace(BOUNDS["user types"], update=0.1)
    for error, is_wrong in ((0.49, False), (0.51, True)):
        shards = {"w": ShardComparison((0,), (1,), 0, error**2)}
        seen = replace(SEEN, shards=SEEN.shards | {"updates": shards})
        reference = Reference(SEEN, {"w": (1,)}, NORMS, {"updates": {"w": 0.2}})
        failures = compare(reference, [seen], bounds).failures
        assert bool(failures) == is_wrong, failures


RATES = {"time/wps": 100.0, "time/tflops": 1e-3, "time/mfu_pct": 0.1}
FIGURES = {"step": 1, "data/tokens": 8, "optim/lr": 1e-3, "data/epochs/c4": 0.5}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        ({"data/tokens": 16}, "data/tokens: 16 instead of 8 at step 1 on rank 1"),
        ({"time/wps": 100.0}, "time/wps: 100 instead of 50 at step 1 on rank 1"),
        ({"time/mfu_pct": 0.1}, "time/mfu_pct: 0.1 instead of 0.05"),
        ({"optim/lr": 1e-3 * (1 + 1e-9)}, "optim/lr: "),
        ({"optim/lr": math.nan}, "optim/lr: nan instead of 0.001"),
        ({"data/epochs/c4": 0.25}, "data/epochs/c4: 0.25 instead of 0.5"),
        ({"data/epochs/wiki": 0.25}, "data/epochs/wiki: 0.25 instead of nan"),
        ({"optim/grad_norm/output": 1.0 + 1e-5}, ""),
        ({"optim/grad_norm/output": 1.0 + 1e-3}, "optim/grad_norm/output: 1.001 instead of 1"),
    ],
)
def test_every_figure_of_a_record_is_compared(change, says) -> None:
    """Two ranks, each with half of the rates of one process."""
    want = FIGURES | RATES | {"optim/grad_norm/output": 1.0}
    right = want | {name: rate / 2 for name, rate in RATES.items()}
    ranks = [[right], [right | change]]
    lines = compare_records([want], ranks, sums=1e-4, later_sums=1e-4, own=1e-4)
    assert len(lines) == bool(says)
    assert says in "".join(lines)


def test_a_metric_of_zero_equals_itself_within_any_bound() -> None:
    """As a router loss that is off, of steps after the first in bf16, whose bound is infinite."""
    name = "experts/sequence_balance_loss"
    wanted = [{"step": step, name: 0.0} for step in (1.0, 2.0)]
    bounds = {"sums": 1e-4, "later_sums": math.inf, "own": math.inf}
    assert not compare_records(wanted, [wanted], **bounds)
    (line,) = compare_records(wanted, [[wanted[0], {"step": 2.0, name: math.nan}]], **bounds)
    assert line == f"{name}: nan instead of 0 at step 2.0 on rank 0"


def test_a_metric_of_yours_is_compared_where_nothing_is_rounded(monkeypatch) -> None:
    """In bf16 a count, for example, may differ by any amount; but it's a number."""
    monkeypatch.setitem(METRICS, "zeros", Metric(lambda parts, options: None))
    wanted, off = [[{"step": 1.0, "zeros": value}] for value in (0.0, 0.5)]
    (line,) = compare_records(wanted, [off], sums=1e-4, later_sums=1e-4, own=1e-4)
    assert line == "zeros: 0.5 instead of 0 at step 1.0 on rank 0"
    assert not compare_records(wanted, [off], sums=1e-4, later_sums=1e-4, own=math.inf)
    off[0]["zeros"] = math.nan
    assert compare_records(wanted, [off], sums=1e-4, later_sums=1e-4, own=math.inf)


def test_a_metric_whose_sum_cancels_has_the_rounding_of_its_summands(monkeypatch) -> None:
    def measure(parts, options) -> torch.Tensor:
        sums = [shard.gradient.sum() for shard in parts.shards]
        tokens = sum(batch.tokens.numel() for batch in parts.batches)
        return torch.stack([sum(sums, torch.zeros(())), torch.tensor(float(tokens))])

    monkeypatch.setitem(METRICS, "mean", Metric(measure, lambda sums, _: sums[0] / sums[1]))
    count = Metric(lambda parts, _: torch.tensor([len(parts.shards)]))
    monkeypatch.setitem(METRICS, "count", count)
    weight = torch.nn.Parameter(torch.zeros(16, 4))
    weight.grad = torch.full((16, 4), 500.0)
    weight.grad[8:] = -500.0
    weight.grad[0, 0] += 0.25  # so that 16,000 and -16,000 leave 1/4
    model = Mock(named_parameters_once=lambda: [("weight", weight)])
    meshes = Mock(**{"tp.get_local_rank.return_value": 0, "pp.get_local_rank.return_value": 0})
    batch = Mock(tokens=torch.zeros(2, 5))
    watched = WatchedMetrics(OwnMetrics({}))
    sums = watched.measure(model, [batch], meshes, torch.device("cpu"))
    results = watched.results(sums)
    assert float(results["mean"]) == pytest.approx(0.025)
    # of the sum 32,000.25 over 10 tokens, and of the tokens what the result has
    assert watched.slack["mean"] == pytest.approx(3200.05, rel=1e-3)
    assert watched.slack["count"] == 0
    wanted, off = [[{"step": 1.0, "mean": value}] for value in (0.025, 0.026)]
    bounds = {"sums": 1e-6, "later_sums": 1e-6, "own": 1e-6}
    assert compare_records(wanted, [off], **bounds)
    assert not compare_records(wanted, [off], **bounds, slack=[watched.slack])
    off[0]["mean"] = 0.03
    assert compare_records(wanted, [off], **bounds, slack=[watched.slack])


def test_an_error_that_is_no_number_is_the_worst() -> None:
    """Of a tensor between two others, whose errors are finite, and of the first step."""
    errors = {"a": 0.1, "b": math.nan, "c": 0.2}
    shards = {name: ShardComparison((0,), (1,), 0, error) for name, error in errors.items()}
    seen = Measurement([2.0, 2.0], [1.0, 1.0], shards=dict.fromkeys(COMPARED, shards))
    seen = replace(seen, validation={"validation/loss": 2.0, "validation/perplexity": 8.0})
    norms = {kind: dict.fromkeys(errors, 1.0) for kind in COMPARED}
    shapes = dict.fromkeys(errors, (1,))
    figures = {"validation/loss": math.nan, "validation/perplexity": 9.0}
    wrong = replace(seen, losses=[math.nan, 3.0], validation=figures)
    ranks = [replace(wrong, losses=[3.0, 3.0]), wrong, replace(wrong, losses=[3.0, 3.0])]
    verdict = compare(Reference(seen, shapes, norms), ranks)
    assert verdict.errors["of"] == "b"
    for name in ("gradient", "update", LATER_GRADIENT, "loss", "validation"):
        assert math.isnan(verdict.errors[name])
    names = [line.split(":")[0] for line in verdict.failures if line.startswith("gradient of")]
    assert [name.split()[2] for name in names] == 2 * ["b", "c", "a"]
    (update,) = (line for line in verdict.failures if line.startswith("update"))
    assert "most for b" in update


def test_a_state_that_does_not_follow_from_the_choices_of_one_process_is_named() -> None:
    """A mesh that takes its choices is right by itself."""
    wrong = replace(SEEN, wrong_counts=["layers.0.feed_forward.load"])
    words = "state: not as the choices add up: layers.0.feed_forward.load, on one process"
    assert compare(Reference(wrong, {"w": (1,)}, NORMS), [SEEN]).failures == [words]
