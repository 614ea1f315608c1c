"""The search of `meshwright plan --search`, with made-up figures in the place of simulations."""

import tomllib
from collections.abc import Callable
from functools import cache

import pytest

from meshwright.commands.plan import predict as predicting
from meshwright.commands.plan import search
from meshwright.commands.plan.devices import GIB, estimated, find_device
from meshwright.commands.plan.predict import Figures, Need, predict
from meshwright.commands.plan.search import MODES, Candidate, Layer, Work, describe, estimate, legal
from meshwright.commands.plan.simulate import plan_job
from meshwright.config.changes import changed
from meshwright.config.job_config import JobConfig, differing
from meshwright.config.loader import load_config
from meshwright.train.resolve import ResolvedJob
from tests.helpers.needs import skip_without_mesh_of_experts

H100 = find_device("h100")
RATES = estimated(H100)
DEBUG = "--job.config_file=train_configs/debug_model.toml"


@cache
def _candidates() -> list[Candidate]:
    return list(legal(_config(), 8, H100))


@cache
def _plans() -> list[ResolvedJob]:
    return [plan for _, plan in _candidates()]


@cache
def _config() -> JobConfig:
    batch = ["--training.seq_len=256", "--training.global_batch_size=64"]
    batch.append("--training.local_batch_size=8")
    return load_config([DEBUG, *batch, "--training.mixed_precision_param=bfloat16"])


def test_candidates_are_legal_and_many() -> None:
    plans = _plans()
    assert len(plans) >= 100
    assert {plan.config.activation_checkpoint.mode for plan in plans} == {*MODES}
    assert {plan.dims.pp for plan in plans} > {1, 2}
    assert {plan.config.parallelism.keeps_gathered for plan in plans} == {True, False}
    assert len({describe(plan) for plan in plans}) == len(plans)
    assert {plan.config.training.global_batch_size for plan in plans} == {64}


def work(layer_s: float = 0.0, layer_gib: float = 0.0) -> Work:
    return Work([Layer(layer_s, layer_gib * GIB)], 0.0, 0.0)


def test_an_estimate_counts_the_sequences_and_layers_of_a_rank() -> None:
    """Layers of the debug model: 6. With pipelines, each rank has a part, and waits."""
    for plan in _plans():
        ranks, sequences = plan.dims.pp, 64 // plan.dims.dp
        twice, once = (estimate(plan, work(seconds), RATES)[0] for seconds in (2e-3, 1e-3))
        of_rank, added = 6 / ranks, twice - once
        schedule = plan.config.parallelism.pipeline_parallel_schedule
        if ranks in (1, 2) and not schedule.startswith("ZB"):
            per_rank = len(plan.pipeline_modules) // ranks
            idle = (ranks - 1) / (per_rank * plan.config.num_microbatches + ranks - 1)
            # stages need not be even: those of the first rank may have a layer less
            least = (of_rank - per_rank) * sequences * 1e-3 / (1 - idle)
            assert least <= added <= (of_rank + per_rank) * sequences * 1e-3 / (1 - idle)
            if ranks == 1:
                assert added == pytest.approx(6 * sequences * 1e-3)


def test_an_estimate_counts_the_update_of_a_rank_s_shards() -> None:
    """Once per step. Without a pipeline FSDP and tensor parallelism share all parameters out."""
    for plan in _plans():
        update = Work([Layer(0.0, 0.0)], 0.0, 1e-9)
        added = estimate(plan, update, RATES)[0] - estimate(plan, work(), RATES)[0]
        assert added > 0
        if plan.dims.pp == 1:
            assert added == pytest.approx(1e-9 * plan.model_args.table.num_params / 8)


def test_an_estimate_counts_the_microbatches_in_flight() -> None:
    """1F1B: one per rank. Interleaved1F1B: 3 p - 1 stages' forwards, of 2 per rank."""
    for plan in _plans():
        ranks, count = plan.dims.pp, plan.config.num_microbatches
        schedule = plan.config.parallelism.pipeline_parallel_schedule if ranks > 1 else ""
        in_flight = {
            "": 1.0,
            "1F1B": min(ranks, count),
            "Interleaved1F1B": min((3 * ranks - 1) / 2, count),
        }.get(schedule)
        if in_flight is not None:
            names = [name for part in plan.pipeline_modules[::ranks] for name in part]
            layers = sum("layers." in name for name in names)
            size = in_flight * layers * plan.config.training.local_batch_size * 100 * GIB
            found = estimate(plan, work(layer_gib=100), RATES)[1]
            assert found == pytest.approx(size, abs=0.5 * GIB)
            assert estimate(plan, work(), RATES)[1] < 0.5 * GIB


def test_layers_of_a_model_repeat_those_that_were_measured() -> None:
    """The second and the fourth of every two are free."""
    (plan,) = (
        p
        for p in _plans()
        if describe(p).startswith("FSDP only; microbatch 8; recomputation none, gathered")
    )
    half = Work([Layer(1e-3, GIB), Layer(0.0, 0.0)], 0.0, 0.0)
    found, whole = (estimate(plan, one, RATES) for one in (half, work(1e-3, 1.0)))
    base = estimate(plan, work(), RATES)
    for index in (0, 1):
        assert 2 * (found[index] - base[index]) == pytest.approx(
            whole[index] - base[index], rel=0.1
        )


def test_parameters_that_are_kept_are_gathered_once_per_microbatch() -> None:
    """Others twice. They are bf16; gradients, reduced once per step, are fp32."""
    by_words = {describe(plan): plan for plan in _plans()}
    seen = 0
    for words, plan in by_words.items():
        if plan.config.parallelism.keeps_gathered and plan.dims.pp == 1 and plan.dims.dp_shard > 1:
            other = by_words[words.removesuffix(", gathered parameters kept")]
            kept, freed = (estimate(one, work(), RATES)[0] for one in (plan, other))
            count = plan.config.num_microbatches
            assert freed / kept == pytest.approx((count * 4 + 4) / (count * 2 + 4))
            seen += 1
    assert seen > 10


def test_the_toml_to_paste_holds_only_what_differs() -> None:
    update = {"parallelism": {"tensor_parallel_degree": 8}, "training": {"seq_len": 2048}}
    old = JobConfig()
    assert old.training.seq_len == 2048
    assert differing(old, update) == {"parallelism": {"tensor_parallel_degree": 8}}


@pytest.fixture
def asked(monkeypatch) -> list[ResolvedJob]:
    """The candidates that a search simulates, in their order; figures are made up.

    What recomputes less is estimated to be faster, and does not fit without recomputation.
    """
    found, plans = [], {id(plan.config): plan for plan in _plans()}

    def seconds(plan: ResolvedJob) -> float:
        return 1.0 + MODES.index(plan.config.activation_checkpoint.mode) + 0.01 * plan.dims.tp

    def at_once(tasks: list[tuple], function: Callable, *_: object) -> list[Need]:
        assert function is search.need_of
        needs = []
        for config, *_ in tasks:
            found.append(plan := plans[id(config)])
            fits = config.activation_checkpoint.mode != "none"
            late = 0.1 * (plan.dims.tp == 1)  # the estimate did not see it
            needs.append(Need(GIB, "fits" if fits else "tight", seconds(plan) + late))
        return needs

    monkeypatch.setattr(search, "legal", lambda *_: _candidates())
    estimates = [(seconds(plan), 1.0 * GIB) for plan in _plans()]
    monkeypatch.setattr(search, "estimate_all", lambda *_: estimates)
    monkeypatch.setattr(search, "in_processes", at_once)
    return found


def test_a_search_simulates_the_fastest_until_eight_fit_and_ranks_them(asked) -> None:
    found = search.find(_config(), 8, RATES, 2)
    words = {describe(plan): update for update, plan in _candidates()}
    without = {name for name in words if "recomputation none" in name}
    names = [describe(plan) for plan in asked]
    assert found.candidates == len(words)
    assert found.simulated == len(names) == len({*names})
    assert without < {*names}
    assert len(found.ranked) == search.SIMULATED == len(names) - len(without)
    assert {plan.config.activation_checkpoint.mode for plan in asked} == {"none", "selective"}
    speeds = [one.tokens_per_second for one in found.ranked]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] == pytest.approx(64 * 256 / found.ranked[0].step_seconds)
    assert tomllib.loads(found.toml) == differing(_config(), words[found.ranked[0].candidate])
    assert found.toml.rstrip() in search.to_text(found)


def test_nothing_is_simulated_that_is_estimated_not_to_fit(asked, monkeypatch) -> None:
    large = [(1.0, 200.0 * GIB)] * len(_plans())
    monkeypatch.setattr(search, "estimate_all", lambda *_: large)
    with pytest.raises(search.ConfigError, match=f"none of {len(large)} candidates fits"):
        search.find(_config(), 8, RATES, 2)
    assert asked == []


EVERY_2ND = (
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=2",
)


@pytest.mark.parametrize(("layers", "words"), [(24, []), (24, EVERY_2ND), (25, EVERY_2ND)])
def test_layers_are_added_along_the_line_through_two_depths(layers, words, monkeypatch) -> None:
    depths = []

    def linear(plan: ResolvedJob, *_: object) -> Figures:
        depth = plan.model_args.n_layers
        recomputed = sum(i % predicting.period(plan.config) == 0 for i in range(depth))
        depths.append(depth)
        return Figures({"a": 100 + 7 * depth, "b": 3 * depth + recomputed}, 1 + 2 * depth)

    monkeypatch.setattr(predicting, "measure", linear)
    config = load_config([DEBUG, f"--model.args.n_layers={layers}", *words])
    plan = plan_job(config, 2, is_gpu=True)
    found = predict(plan, 0, RATES)
    assert max(depths) < 12
    whole = linear(plan)
    assert found.peaks == pytest.approx(whole.peaks)
    assert found.seconds == pytest.approx(whole.seconds)


def test_all_layers_are_simulated_of_pipelines_and_of_named_layers(monkeypatch) -> None:
    """Shallow models lack the latter."""
    depths = []
    note = lambda plan, *_: depths.append(plan.model_args.n_layers)  # noqa: E731
    monkeypatch.setattr(predicting, "measure", note)
    for word in ("--parallelism.pipeline_parallel_degree=2", '--model.frozen=["layers.20.*"]'):
        config = load_config([DEBUG, "--model.args.n_layers=24", word])
        predict(plan_job(config, 2, is_gpu=True), 0, RATES)
    assert depths == [24, 24]


def test_a_search_of_experts_tries_their_degrees(monkeypatch) -> None:
    skip_without_mesh_of_experts()
    monkeypatch.setattr(search, "MODES", ("none",))
    words = ["--job.config_file=train_configs/debug_qwen3_moe.toml"]
    words += ["--parallelism.expert_parallel_degree=2", "--training.seq_len=128"]
    config = load_config([*words, "--training.global_batch_size=32"])
    found = list(legal(config, 4, H100))
    degrees = {pp: {p.dims.ep for _, p in found if p.dims.pp == pp} for pp in (1, 2, 4)}
    assert degrees == {1: {1, 2, 4}, 2: {1, 2}, 4: {1}}  # 1, the config's, the most
    assert len({describe(plan) for _, plan in found}) == len(found)
    update, plan = next(pair for pair in found if pair[1].dims.ep == 4)
    assert "ep 4" in describe(plan)
    work = search.measure_work(changed(config, update), RATES)  # on few ranks, but no fewer
    assert all(layer.seconds > 0 and layer.num_bytes > 0 for layer in work.layers)
