"""`meshwright prove` finds nothing where nothing is wrong, and the mistake where there is one."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.models.llama import FLAVORS
from meshwright.parallelisms.pipeline_split import SCHEDULES
from meshwright.preflight import preflight
from meshwright.proof.cases import KEYS, default_cases, every_mesh
from meshwright.proof.compare import Reference, Verdict, compare
from meshwright.proof.measure import Measurement, measure, record_reference
from meshwright.proof.prove import Row, prove, read_reference
from meshwright.proof.shrink import largest_tp, shrink
from tests.helpers.faults import FAULTS

PRESETS = Path(__file__).parents[2] / "train_configs"
ARGS = FLAVORS["debugmodel"]
SMALL = shrink(JobConfig(), ARGS)


@pytest.fixture(scope="module")
def reference_file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("proof") / "reference.pt"


@pytest.fixture
def reference(on_ranks, reference_file) -> Reference:
    (seen,) = on_ranks(1, record_reference, SMALL, reference_file)
    return read_reference(seen, reference_file)


def measure_with(fault: str, config: JobConfig, world_size: int, file: Path) -> Measurement:
    with FAULTS[fault]():
        return measure(config, world_size, file)


def case_on(small: JobConfig = SMALL, **mesh: int):
    wanted = {KEYS[axis]: degree for axis, degree in mesh.items()}
    for case in every_mesh(small, ARGS):
        parallelism = case.config.parallelism
        if all(getattr(parallelism, key) == wanted.get(key, 1) for key in KEYS.values()):
            return case
    raise AssertionError(mesh)


@pytest.fixture
def verdict_of(on_ranks, reference, reference_file):
    def run(case, fault: str = "none") -> Verdict:
        n = case.world_size
        return compare(reference, on_ranks(n, measure_with, fault, case.config, n, reference_file))

    return run


@pytest.mark.parametrize(
    "mesh", [{"dp_shard": 2, "tp": 2}, {"pp": 2, "cp": 2}, {"dp_replicate": 2, "dp_shard": 2}]
)
def test_a_sound_mesh_is_equal(verdict_of, mesh) -> None:
    verdict = verdict_of(case_on(**mesh))
    assert verdict.failures == []
    assert 0 < verdict.loss_error < 1e-6  # it did compute, in another order
    assert 0 < verdict.gradient_error < 1e-5
    assert verdict.worst_gradient


def test_gradients_times_eight(verdict_of) -> None:
    verdict = verdict_of(case_on(dp_shard=2), "gradients_times_eight")
    text = "\n".join(verdict.failures)
    assert "gradient norm" in text
    assert verdict.gradient_error == pytest.approx(7, rel=1e-3)
    assert "gradient of tok_embeddings.weight: relative error 7.0e+00" in text
    assert verdict.num_different_weights == verdict.num_different_samples == 0


def test_a_missing_sum_on_tp(verdict_of) -> None:
    verdict = verdict_of(case_on(tp=2), "no_sum_over_tp")
    assert verdict.num_different_weights == verdict.num_different_samples == 0
    assert re.search(r"loss: .* at step 1 ", "\n".join(verdict.failures))


def test_the_same_initial_values_on_every_tp_rank(verdict_of) -> None:
    verdict = verdict_of(case_on(tp=2), "same_values_on_every_tp_rank")
    wrong = [text for text in verdict.failures if text.startswith("initial ")]
    assert "initial layers.0.attention.wq.weight: differs on rank 1" in wrong
    assert not any("norm" in text for text in wrong)  # held whole, and right


def test_norm_gradients_that_miss_the_other_ranks_tokens(verdict_of) -> None:
    verdict = verdict_of(case_on(tp=2), "norm_gradients_of_own_tokens")
    gradients = [text for text in verdict.failures if text.startswith("gradient of")]
    assert any("layers.1.ffn_norm.weight" in text for text in gradients)
    assert all("norm.weight" in text for text in gradients)
    assert verdict.num_different_weights == 0


def test_swapped_microbatches(verdict_of) -> None:
    case = case_on(dp_shard=2)
    training = case.config.training.model_copy(update={"local_batch_size": 2})
    config = case.config.model_copy(update={"training": training})
    verdict = verdict_of(dataclasses.replace(case, config=config), "swapped_microbatches")
    (failure,) = verdict.failures  # the sum over microbatches, and so all else, is the same
    assert failure.startswith("batches: 160 samples differ; the first is sample 0 of step 1, on ")


def test_labels_off_by_one_at_a_cp_boundary(verdict_of) -> None:
    verdict = verdict_of(case_on(cp=2), "labels_shifted_after_the_cut")
    assert verdict.num_different_weights == verdict.num_different_samples == 0
    assert re.search(r"^loss: .* at step 1 ", "\n".join(verdict.failures), re.MULTILINE)


def break_off(config: JobConfig, world_size: int, file: Path) -> Measurement:
    if config.parallelism.tensor_parallel_degree == 2:
        raise ValueError("no such luck")
    return measure(config, world_size, file)


def test_the_command_goes_on_after_a_case_that_stops(tmp_path, monkeypatch, capsys) -> None:
    rows: list[Row] = []

    def prove_with_a_break(*given: object) -> Iterator[Row]:
        for row in prove(*given, break_off):
            rows.append(row)
            yield row

    arguments = ["--output", str(tmp_path), "--parallelism.tensor_parallel_degree", "2"]
    monkeypatch.setattr("sys.argv", ["meshwright", "prove", *arguments])
    cases = [case_on(tp=2), case_on(dp_shard=2)]
    monkeypatch.setattr("meshwright.cli.prove.default_cases", lambda *_: cases)
    monkeypatch.setattr("meshwright.cli.prove.prove", prove_with_a_break)
    with pytest.raises(SystemExit) as exit_code:
        main()
    assert exit_code.value.code == 1
    out = capsys.readouterr().out
    assert "no such luck" in out
    assert "1 of 2 cases equal one process" in out
    proof = json.loads((tmp_path / "proof.json").read_text())
    assert proof["proved"] is False
    assert [bool(case["failures"]) for case in proof["cases"]] == [True, False]
    page = (tmp_path / "proof.html").read_text()
    assert "1 of 2 cases equal one process" in page
    assert "no such luck" in page

    monkeypatch.setattr("meshwright.cli.prove.prove", lambda *_: iter(rows[1:]))
    main()
    assert "1 of 1 cases equal one process" in capsys.readouterr().out
    assert json.loads((tmp_path / "proof.json").read_text())["proved"] is True


@pytest.mark.parametrize("preset", sorted(PRESETS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_case_of_every_preset_can_run(preset) -> None:
    text = preset.read_text()
    config, _ = load_config(["--job.config_file", str(preset)])
    args = FLAVORS[config.model.flavor]
    small = shrink(config, args)
    cases = default_cases(config, small, args) + every_mesh(small, args)
    assert len({case.name for case in cases}) > 16
    assert max(case.world_size for case in cases) == 8
    for case in cases:
        plan = preflight(case.config, case.world_size)
        assert plan.config.training.global_batch_size == 8
    own = next(case for case in cases if case.name.startswith("as configured"))
    for key in ("tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree"):
        is_used = getattr(config.parallelism, key) > 1
        assert (getattr(own.config.parallelism, key) > 1) == is_used, text


def test_a_ring_is_proved_as_configured_and_where_gpus_have_it_by_default() -> None:
    axes = [f"--parallelism.{KEYS[axis]}=2" for axis in ("pp", "dp_shard", "cp", "tp")]
    for attention in ("ring", "auto"):
        config, _ = load_config([*axes, f"--parallelism.context_parallel_attention={attention}"])
        args = FLAVORS[config.model.flavor]
        cases = default_cases(config, shrink(config, args), args)
        assert any(case.name == "ring attention: cp 2" for case in cases)
        for case in cases:
            plan = preflight(case.config, case.world_size)
            if case.name.startswith("as configured"):
                want = attention if plan.dims.cp > 1 else "auto"
                assert case.config.parallelism.context_parallel_attention == want


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_has_microbatches_enough(schedule) -> None:
    axes = [f"--parallelism.{key}=2" for key in KEYS.values()]
    words = [*axes, f"--parallelism.pipeline_parallel_schedule={schedule}"]
    config, _ = load_config([*words, "--compile.enable=false"])
    args = FLAVORS[config.model.flavor]
    cases = default_cases(config, shrink(config, args), args)
    for case in cases:
        preflight(case.config, case.world_size)
    own = [case.config.parallelism for case in cases if case.name.startswith("as configured")]
    for key in KEYS.values():
        assert any(getattr(parallelism, key) == 2 for parallelism in own)


def test_what_is_kept_and_what_is_not() -> None:
    tied = FLAVORS["llama3_1b"]
    config, _ = load_config(
        ["--training.seed=7", "--optimizer.lr=3e-4", "--model.flavor=llama3_1b"]
    )
    plan = preflight(shrink(config, tied), 1)
    assert plan.config.training.seed == 7
    assert plan.config.optimizer.lr == 3e-4
    assert plan.model_args.tie_embeddings
    assert plan.model_args.rope_scaling == tied.rope_scaling
    assert plan.model_args.vocab_size % 2
    assert plan.model_args.n_heads > plan.model_args.n_kv_heads
    assert plan.model_args.n_kv_heads % largest_tp(tied) == 0


def test_a_config_that_cannot_run_is_not_proved(monkeypatch, capsys) -> None:
    arguments = ["prove", "--parallelism.tensor_parallel_degree", "3"]
    monkeypatch.setattr("sys.argv", ["meshwright", *arguments])
    with pytest.raises(SystemExit) as exit_code:
        main()
    assert exit_code.value.code == 2
    assert "does not divide n_heads = 8" in capsys.readouterr().err
