"""`meshwright plan` as a user calls it."""

import json
import subprocess
import sys
import tomllib
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.planning import PUBLISHED, plan_published
from meshwright.commands.main import run
from meshwright.commands.plan import predict, search
from meshwright.commands.plan.devices import ERRORS, estimated, find_device
from meshwright.commands.plan.search import legal
from meshwright.commands.plan.simulate import plan_job
from meshwright.config.changes import changed
from meshwright.config.loader import load_config
from meshwright.system.errors import ConfigError
from meshwright.system.processes import in_processes
from tests.helpers.needs import skip_without_mesh_of_experts

PRESETS = Path(__file__).parents[2] / "train_configs"
DEBUG = PRESETS / "debug_model.toml"
IBM_7B = "IBM, Llama 2 7B, HSDP 12 x 8, nothing recomputed"
SMALL = [
    *("--model.args.n_layers=2", "--training.seq_len=128", "--training.local_batch_size=8"),
    *("--model.tokenizer_path=no/such/tokenizer.json", "--training.dataset=c4"),
]


@pytest.mark.slow
def test_a_plan_of_a_job_that_does_not_fit_has_remedies(tmp_path) -> None:
    """Without a tokenizer and data."""
    words = ["--world-size", "2", "--device", "0.4", "--json"]
    command = [sys.executable, "-m", "meshwright.commands.main", "plan", str(DEBUG), *words, *SMALL]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"planning for {DEBUG} on 2 ranks ...")
    found = json.loads(done.stdout)
    purposes = found["ranks"][0]["peak"]["by_purpose"]
    for key in ("parameters", "optimizer", "gradients", "activations"):
        assert found[f"{key}_bytes"] == purposes[key]
    assert found["fits"] is False
    assert found["step_seconds"] is found["mfu"] is found["ranks"][0]["time"] is None
    assert found["tokens_per_step"] == 2 * 8 * 128
    assert {"selective", "full"} <= {
        mode for one in found["remedies"] for mode in ("selective", "full") if mode in one["change"]
    }
    assert all(one["peak_bytes"] < found["peak_bytes"] for one in found["remedies"])


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--device=h100", "--world-size=2", "--rank=2"], "must be below 2, the number of ranks"),
        (["--device", "h100", "--world-size", "3"], "global_batch_size"),
        (["--device=h100", "--world-size=2", "--search", "--html=a"], "--html = .* a --search"),
        (["--device=h100", "--world-size=2", "--search", "--all-stages"], "--all-stages = true"),
        (["--device=h100", "--world-size=2", "--imbalance=0.5"], "so at least 1"),
        (["--device=h100", "--world-size=2", "--imbalance=1.5"], "at most 1.0 times the mean"),
        (
            ["--device=h100", "--world-size=2", "--search", "--imbalance=1.5"],
            "--imbalance = 1.5: the model has no experts",
        ),
        (
            # 64 / 6, rounded down: the fix must be one that is taken
            [
                *("--device=h100", "--world-size=16", "--imbalance=20", "--model.name=olmoe"),
                *("--model.flavor=olmoe_1b_7b", "--model.args.n_active=6"),
                *("--parallelism.expert_parallel_degree=16", "--training.global_batch_size=32"),
            ],
            "fix: --imbalance 10.666$",
        ),
        (["--device=4", "--world-size=2", "--search"], "--device = .* no known rates to rank by"),
        (
            ["--device=h100", "--world-size=2", "--activation_checkpoint.mode=memory_budget"],
            "only the compiler knows",
        ),
    ],
)
def test_mistakes_are_named(words, what) -> None:
    if "3" in words:
        words = [*words, "--training.global_batch_size=16"]
    if "--imbalance=20" in words:
        skip_without_mesh_of_experts()
    with pytest.raises(ConfigError, match=what):
        run(["plan", str(DEBUG), *words])


def test_the_worst_rank_of_a_pipeline_has_the_verdict(capsys) -> None:
    """The first has one layer, the last five and the loss."""
    layers = [f"layers.{i}" for i in range(6)]
    parts = [["tok_embeddings", layers[0]], [*layers[1:], "norm", "output"]]
    words = [
        *("--parallelism.pipeline_parallel_degree=2", "--training.global_batch_size=96"),
        *("--training.local_batch_size=48", "--training.seq_len=2048"),
        f"--parallelism.module_fqns_per_model_part={json.dumps(parts)}",
        *("--world-size=2", "--json", "--no-remedies", "--device=10"),
    ]
    run(["plan", str(DEBUG), *words])
    found = json.loads(capsys.readouterr().out)
    first, last = found["ranks"]
    assert [first["verdict"], last["verdict"]] == ["fits", "does not fit"]
    assert [found["fits"], found["verdict"], found["rank"]] == [False, "does not fit", 1]
    assert found["peak_bytes"] == last["peak"]["num_bytes"]


def test_an_estimated_time_has_an_error(tmp_path, capsys) -> None:
    words = ["plan", str(DEBUG), *SMALL, "--world-size=1", "--device=h100", "--no-remedies"]
    run([*words, "--json", "--html", str(tmp_path / "a.html")])
    found = json.loads(capsys.readouterr().out)
    purposes = found["ranks"][0]["peak"]["by_purpose"]
    assert found["peak_bytes"] == sum(purposes.values())
    assert (tmp_path / "a.html").read_text().count("<polygon") == len(purposes)
    assert 0 < found["step_seconds"] == found["ranks"][0]["time"]["seconds"] < 100
    assert 0 < found["mfu"] <= 1
    assert found["step_seconds_error"] == ERRORS["H100"]
    assert "bound" not in found
    run(words)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step:")]
    assert f"{found['step_seconds']:.4g} s (+-15 %)" in line


def test_a_compiled_job_is_planned_by_its_eager_blocks_at_rates_of_its_own(capsys) -> None:
    found = []
    large = ["--training.seq_len=4096", "--training.local_batch_size=16", "--model.args.n_layers=2"]
    for is_on in ("false", "true"):
        words = ["--world-size=1", "--device=h100", "--json", f"--compile.enable={is_on}"]
        run(["plan", str(DEBUG), *large, *words])
        found.append(json.loads(capsys.readouterr().out))
    eager, compiled = found
    assert compiled["peak_bytes"] == eager["peak_bytes"]
    assert compiled["step_seconds"] < eager["step_seconds"]


def test_masked_documents_are_planned_for_gpus(capsys) -> None:
    words = ["--training.mask_documents=true", "--world-size=1", "--device=h100", "--json"]
    run(["plan", str(DEBUG), *SMALL, *words])
    flops = json.loads(capsys.readouterr().out)["ranks"][0]["flops"]
    assert flops["attention, backward"] > flops["attention, forward"] > 0


@pytest.mark.slow
def test_a_search_prints_the_best_and_its_toml(monkeypatch, capsys) -> None:
    monkeypatch.setattr(search, "SIMULATED", 2)
    monkeypatch.setattr(search, "legal", lambda *job: islice(legal(*job), 24))
    words = ["--world-size", "2", "--device", "h100", "--search", "--workers", "2", "--json"]
    run(["plan", str(DEBUG), *words, "--training.global_batch_size=32", *SMALL])
    found = json.loads(capsys.readouterr().out)
    assert found["simulated"] == len(found["ranked"]) == 2
    assert found["candidates"] == 24
    speeds = [row["tokens_per_second"] for row in found["ranked"]]
    assert speeds == sorted(speeds, reverse=True)
    assert set(tomllib.loads(found["toml"])) <= {"parallelism", "activation_checkpoint", "training"}


@pytest.mark.slow
def test_an_estimate_is_near_the_simulation() -> None:
    """Of a mesh, a pipeline and the modes; benchmarks/results/plans.md has more."""
    words = ["--model.args.dim=2048", "--model.args.n_layers=2", "--model.args.vocab_size=2048"]
    h100 = estimated(find_device("h100"))
    config = load_config([str(DEBUG), "--training.seq_len=2048", *words])
    wanted = {
        "FSDP only; microbatch 4; recomputation full",
        "tp 2; microbatch 4; recomputation full",
        "pp 2, 1F1B; microbatch 4; recomputation none, gathered parameters kept",
    }
    config = changed(config, {"training": {"global_batch_size": 16}})
    plans = [plan for _, plan in legal(config, 2, h100) if search.describe(plan) in wanted]
    assert len(plans) == 3
    estimates = search.estimate_all(plans, h100, 2)
    tasks = [(plan.config, 2, h100) for plan in plans]
    needs = in_processes(tasks, predict.need_of, 2)
    for (seconds, num_bytes), need in zip(estimates, needs, strict=True):
        assert seconds / need.seconds == pytest.approx(1, abs=0.1)
        # of two layers, so the loss has most of it; above 1 the best might be left out
        assert 0.3 < num_bytes / need.peak_bytes <= 1


def peaks(words: list[str]) -> tuple[int, int]:
    """Predicted from two depths, and of all layers."""
    device, config = estimated(find_device("h100")), load_config(words)
    plan = plan_job(config, 4, is_gpu=True)
    first, whole = (one(plan, 0, device) for one in (predict.predict, predict.measure))
    assert first.peaks != whole.peaks  # it was not simulated whole
    return first.peak_bytes, whole.peak_bytes


@pytest.mark.slow
def test_two_shallow_depths_have_the_peak_of_all_layers() -> None:
    """Of three microbatches, whose gradients grow with the layers, too."""
    words = ["--training.global_batch_size=12", "--training.local_batch_size=2"]
    words += ["--parallelism.tensor_parallel_degree=2", "--activation_checkpoint.mode=full"]
    tasks = [([str(DEBUG), "--model.args.n_layers=10", *words],)]
    ((predicted, whole),) = in_processes(tasks, peaks, 1)
    assert predicted == pytest.approx(whole, rel=1e-4)


@pytest.mark.slow
def test_published_steps_take_the_estimated_time() -> None:
    """Within the printed error, and memory within a tenth; the benchmark has all of them."""
    rows = [one for one in PUBLISHED if one.name in ("torchtitan, 8B, FSDP 128, compiled", IBM_7B)]
    assert len(rows) == 2
    planned = in_processes([(one,) for one in rows], plan_published, 2)
    for one, (speed, gib) in zip(rows, planned, strict=True):
        assert one.tokens_per_s / speed == pytest.approx(1, abs=ERRORS["H100"])
        assert not one.gib or gib / one.gib == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("words", "num_lines"), [([], 2), (["--json"], 1)])
def test_a_line_fits_the_console_and_json_stays_whole(
    words, num_lines, monkeypatch, capsys
) -> None:
    text = " ".join(["tokens/s"] * 12)
    monkeypatch.setenv("MESHWRIGHT_COLUMNS", "80")
    monkeypatch.setattr("meshwright.commands.plan.report.plan", lambda *_: text)
    run(["plan", "debug_model", "--world-size", "2", "--device", "cpu", *words])
    assert len(capsys.readouterr().out.splitlines()) == num_lines
