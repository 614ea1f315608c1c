"""The search of `meshwright plan --search`, with made-up figures in the place of simulations."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest

from meshwright.commands.plan import predict as predicting
from meshwright.commands.plan import search
from meshwright.commands.plan.devices import GIB, estimated, find_device
from meshwright.commands.plan.predict import Figures, Need, predict
from meshwright.commands.plan.search import MODES, Choice, Work, difference, estimate, legal
from meshwright.commands.plan.simulate import plan_job
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.train.preflight import Plan

H100 = find_device("h100")
RATES = estimated(H100)
DEBUG = "--job.config_file=train_configs/debug_model.toml"
WORK = Work(1e-3, 1e-3, 1e-12, GIB / 8, GIB / 8)


@cache
def _plans() -> dict[Choice, Plan]:
    return dict(legal(_config(), 8, H100))


@cache
def _config() -> JobConfig:
    batch = ["--training.seq_len=256", "--training.global_batch_size=64"]
    batch.append("--training.local_batch_size=8")
    return load_config([DEBUG, *batch, "--training.mixed_precision_param=bfloat16"])


def test_choices_are_legal_and_many() -> None:
    plans = _plans()
    assert len(plans) >= 100
    assert {choice.recomputation for choice in plans} == {"none", "selective", "full"}
    assert {choice.pipeline for choice in plans} > {1, 2}
    assert {choice.keeps_gathered for choice in plans} == {True, False}
    assert len({str(choice) for choice in plans}) == len(plans)
    for choice, plan in plans.items():
        assert plan.config.training.global_batch_size == 64
        assert (plan.dims.tp, plan.dims.pp) == (choice.tensor, choice.pipeline)
        policy = plan.config.parallelism.fsdp_reshard_after_forward
        keeps = policy == "never" or (policy == "default" and plan.dims.pp > 1)
        assert choice.keeps_gathered == keeps


def _estimated(choice: Choice, work: Work = WORK) -> tuple[float, float]:
    return estimate(_plans()[choice], work, RATES)


def test_an_estimate_counts_the_sequences_and_layers_of_a_rank() -> None:
    """Layers of the debug model: 6. With pipelines, each rank has a part, and waits."""
    layers = replace(WORK, rest_s=0.0, update_s=0.0)
    for choice, plan in _plans().items():
        sequences = 64 // plan.dims.dp
        twice = _estimated(choice, replace(layers, layer_s=2e-3))[0]
        added = twice - _estimated(choice, layers)[0]
        of_rank = 6 / choice.pipeline
        if choice.pipeline in (1, 2) and not choice.schedule.startswith("ZB"):
            per_rank = len(plan.stage_modules) // choice.pipeline
            idle = (choice.pipeline - 1) / (per_rank * plan.num_microbatches + choice.pipeline - 1)
            # stages need not be even: those of the first rank may have a layer less
            least = (of_rank - per_rank) * sequences * 1e-3 / (1 - idle)
            assert least <= added <= (of_rank + per_rank) * sequences * 1e-3 / (1 - idle)
            if choice.pipeline == 1:
                assert added == pytest.approx(6 * sequences * 1e-3)


def test_an_estimate_counts_the_microbatches_in_flight() -> None:
    """1F1B: one per rank. Interleaved1F1B: 3 p - 1 stages' forwards, of 2 per rank."""
    nothing = replace(WORK, layer_bytes=0.0, rest_bytes=0.0)
    kept = replace(nothing, layer_bytes=100.0 * GIB)
    for choice, plan in _plans().items():
        ranks, count = plan.dims.pp, plan.num_microbatches
        in_flight = {
            "": 1.0,
            "1F1B": min(ranks, count),
            "Interleaved1F1B": min((3 * ranks - 1) / 2, count),
        }.get(choice.schedule)
        if in_flight is not None:
            names = [name for part in plan.stage_modules[::ranks] for name in part]
            layers = sum("layers." in name for name in names)
            size = in_flight * layers * choice.local_batch_size * 100 * GIB
            assert _estimated(choice, kept)[1] == pytest.approx(size, abs=0.5 * GIB)
            assert _estimated(choice, nothing)[1] < 0.5 * GIB


def test_parameters_that_are_kept_are_gathered_once_per_microbatch() -> None:
    """Others twice. They are bf16; gradients, reduced once per step, are fp32."""
    nothing = Work(0.0, 0.0, 0.0, 0.0, 0.0)
    seen = 0
    for choice, plan in _plans().items():
        if choice.keeps_gathered and choice.pipeline == 1 and plan.dims.dp_shard > 1:
            freed = _estimated(replace(choice, keeps_gathered=False), nothing)[0]
            kept, count = _estimated(choice, nothing)[0], plan.num_microbatches
            assert freed / kept == pytest.approx((count * 4 + 4) / (count * 2 + 4))
            seen += 1
    assert seen > 10


def test_the_toml_to_paste_holds_only_what_differs() -> None:
    update = {"parallelism": {"tensor_parallel_degree": 8}, "training": {"seq_len": 2048}}
    old = JobConfig()
    assert old.training.seq_len == 2048
    assert difference(old, update) == "[parallelism]\ntensor_parallel_degree = 8\n"


@pytest.fixture
def asked(monkeypatch) -> list[Choice]:
    """The choices that a search simulates, in their order; figures are made up.

    What recomputes less is estimated to be faster, and does not fit without recomputation.
    """
    plans, found = _plans(), []
    choices = {id(plan.config): choice for choice, plan in plans.items()}

    def seconds(choice: Choice) -> float:
        return 1.0 + MODES.index(choice.recomputation) + 0.01 * choice.tensor

    def at_once(tasks: list[tuple], function: Callable, _: int) -> Iterator[tuple[int, Need]]:
        assert function is search.need_of
        for index, (config, *_) in enumerate(tasks):
            choice = choices[id(config)]
            found.append(choice)
            fits = choice.recomputation != "none"
            late = 0.1 * (choice.tensor == 1)  # the estimate did not see it
            verdict = "fits" if fits else "tight"
            yield index, Need(GIB, GIB, verdict, seconds(choice) + late)

    def estimates(*_: object) -> dict[Choice, tuple[float, float]]:
        return {c: (seconds(c), 1.0 * GIB) for c in plans}

    monkeypatch.setattr(search, "legal", lambda *_: plans.items())
    monkeypatch.setattr(search, "estimate_all", estimates)
    monkeypatch.setattr(search, "in_processes", at_once)
    return found


def test_a_search_simulates_the_fastest_until_eight_fit_and_ranks_them(asked) -> None:
    found = search.find(_config(), 8, RATES, 2)
    plans = _plans()
    without = [choice for choice in plans if choice.recomputation == "none"]
    assert found.candidates == len(plans)
    assert found.simulated == len(asked) == len(set(asked))
    assert set(without) < set(asked)
    assert len(found.ranked) == search.SIMULATED == len(asked) - len(without)
    assert {choice.recomputation for choice in asked} == {"none", "selective"}
    speeds = [one.tokens_per_second for one in found.ranked]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] == pytest.approx(64 * 256 / found.ranked[0].step_seconds)
    best = next(one for one in asked if str(one) == found.ranked[0].candidate)
    assert found.toml == difference(_config(), best.update(64))
    assert found.toml.rstrip() in search.to_text(found)


def test_nothing_is_simulated_that_is_estimated_not_to_fit(asked, monkeypatch) -> None:
    plans = _plans()
    large = dict.fromkeys(plans, (1.0, 200.0 * GIB))
    monkeypatch.setattr(search, "estimate_all", lambda *_: large)
    with pytest.raises(search.ConfigError, match=f"none of {len(plans)} candidates fits"):
        search.find(_config(), 8, RATES, 2)
    assert asked == []


EVERY_2ND = (
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=2",
)


@pytest.mark.parametrize(("layers", "words"), [(24, []), (24, EVERY_2ND), (25, EVERY_2ND)])
def test_layers_are_added_along_the_line_through_two_depths(layers, words, monkeypatch) -> None:
    depths = []

    def linear(plan: Plan, *_: object) -> Figures:
        depth = plan.model_args.n_layers
        recomputed = sum(i % predicting.period(plan.config) == 0 for i in range(depth))
        depths.append(depth)
        return Figures({"a": 100 + 7 * depth, "b": 3 * depth + recomputed}, 1.0, 1 + 2 * depth)

    monkeypatch.setattr(predicting, "measure", linear)
    config = load_config([DEBUG, f"--model.args.n_layers={layers}", *words])
    plan = plan_job(config, 2, is_gpu=True)
    found = predict(plan, 0, RATES)
    assert max(depths) < 12
    whole = linear(plan)
    assert found.peaks == pytest.approx(whole.peaks)
    assert found.seconds == pytest.approx(whole.seconds)


@pytest.mark.parametrize(
    "words",
    [
        ["--parallelism.pipeline_parallel_degree=2"],
        ['--model.frozen=["layers.20.*"]'],  # shallow models lack it
    ],
)
def test_all_layers_are_simulated_of_pipelines_and_of_named_layers(words, monkeypatch) -> None:
    depths = []
    monkeypatch.setattr(
        predicting, "measure", lambda plan, *_: depths.append(plan.model_args.n_layers)
    )
    config = load_config([DEBUG, "--model.args.n_layers=24", *words])
    predict(plan_job(config, 2, is_gpu=True), 0, RATES)
    assert depths == [24]
