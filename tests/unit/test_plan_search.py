"""The search of `meshwright plan --search`, with made-up figures in the place of simulations."""

import json
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.planning import predict as predicting
from meshwright.planning import search
from meshwright.planning.board import Board, least_seconds, waiting
from meshwright.planning.choices import Choice, Mesh, difference, legal
from meshwright.planning.devices import GIB, Device, find_device
from meshwright.planning.job import plan_job
from meshwright.planning.predict import Figures, depth_of_rank, error_of_line, predict
from meshwright.planning.remedies import changed
from meshwright.planning.timing import assumed
from meshwright.preflight import Plan

H100 = find_device("h100")
BEST, RATES = assumed(H100)
DEBUG = "--job.config_file=train_configs/debug_model.toml"


@cache
def _plans() -> dict[Choice, Plan]:
    return dict(legal(_config(), 8, H100))


@cache
def _config() -> JobConfig:
    return load_config([DEBUG, "--training.seq_len=256", "--training.global_batch_size=64"])[0]


def _made_up(choice: Choice, gib: float) -> Figures:
    """More of everything for what keeps more or does more, as simulations have it."""
    plan, mesh = _plans()[choice], choice.mesh
    recomputes, gathers_again = choice.speed
    frugal = 0.5**recomputes * (0.8 if gathers_again else 1.0)
    size = gib * mesh.local_batch_size / mesh.tensor * frugal + 8 / mesh.pipeline
    seconds = least_seconds(plan, H100, RATES) * (1.2 + 0.05 * mesh.tensor)
    seconds *= 1 + 0.1 * recomputes * (plan.config.activation_checkpoint.mode != "full")
    return Figures({"peak": size * GIB}, 1.0, seconds * (1 + 0.05 * gathers_again))


@pytest.mark.parametrize("gib", [1.0, 30.0, 60.0, 120.0, 600.0])
def test_what_is_left_out_is_never_the_best(gib) -> None:
    board = Board(_plans(), H100, RATES)
    while (choice := board.next()) is not None:
        board.note(choice, _made_up(choice, gib))
    every = Board(_plans(), H100, RATES)
    for choice in _plans():
        every.note(choice, _made_up(choice, gib))
    best, known = board.ranked(), every.ranked()
    assert len(board.found) < len(_plans()) / 3
    assert bool(best) == bool(known)
    if known:
        assert best[0].figures.seconds == known[0].figures.seconds


def test_choices_are_legal_and_many() -> None:
    plans = _plans()
    assert len(plans) >= 100
    assert {choice.mode for choice in plans} == {"none", "selective", "full"}
    assert {choice.mesh.pipeline for choice in plans} > {1, 2}
    assert {choice.keeps_gathered for choice in plans} == {True, False}
    for choice, plan in plans.items():
        assert plan.config.training.global_batch_size == 64
        assert (plan.dims.tp, plan.dims.pp) == (choice.mesh.tensor, choice.mesh.pipeline)
        policy = plan.config.parallelism.fsdp_reshard_after_forward
        keeps = policy == "never" or (policy == "default" and plan.dims.pp > 1)
        assert choice.keeps_gathered == keeps


def test_a_pipeline_waits_at_least_as_its_schedule_says() -> None:
    for choice, plan in _plans().items():
        ranks, count = plan.dims.pp, plan.num_microbatches
        if choice.mesh.schedule == "1F1B":
            assert waiting(plan) == (ranks - 1) / (count + ranks - 1)
        elif not choice.mesh.schedule:
            assert waiting(plan) == 0


def test_nothing_of_which_the_weights_do_not_fit_is_best() -> None:
    board = Board(_plans(), Device("", 1e-3), RATES)
    choice = board.next()
    board.note(choice, _made_up(choice, 1.0))
    assert board.ranked() == []


def test_the_toml_to_paste_holds_only_what_differs() -> None:
    old = JobConfig()
    new = changed(old, {"parallelism": {"tensor_parallel_degree": 8}, "training": {"steps": 5}})
    assert difference(old, new) == "[parallelism]\ntensor_parallel_degree = 8\n"


class _AtOnce(Executor):
    """Calls in this process."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args))
        return future


@pytest.fixture
def made_up(monkeypatch) -> dict[int, Choice]:
    """The choices by their configs' ids; a search that takes made-up figures. The sums of weights,
    gradients and optimizer do not fit without tensor parallelism, though each alone does."""
    plans = {
        choice: replace(plan, least_bytes=dict.fromkeys("abc", 30 * GIB / choice.mesh.tensor))
        for choice, plan in _plans().items()
    }
    choices = {id(plan.config): choice for choice, plan in plans.items()}

    def figures(config: JobConfig, *_: object) -> Figures:
        one = _made_up(choices[id(config)], 30.0)
        return replace(one, line=(one, one))

    monkeypatch.setattr(search, "legal", lambda *_: plans.items())
    monkeypatch.setattr(search, "processes", lambda workers: _AtOnce())
    monkeypatch.setattr(search, "predict_config", figures)
    monkeypatch.setattr(search, "_measure", figures)
    monkeypatch.setattr(search, "error_of_line", lambda *_: 0.0)
    return choices


def test_a_search_ranks_what_may_fit_by_tokens_per_second(made_up) -> None:
    found = search.find(_config(), 8, H100, RATES, 2)
    assert found.num_legal == len(_plans())
    assert found.num_too_large == sum(choice.mesh.tensor == 1 for choice in _plans())
    assert found.corrected == 0
    best = found.ranked[0]
    assert found.winner_bytes == best.figures.peak_bytes
    printed = json.loads(search.to_json(_config(), found, "data sheet"))
    speeds = [row["tokens_per_second"] for row in printed["ranked"]]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] == 64 * 256 / best.figures.seconds
    assert printed["toml"] == difference(_config(), changed(_config(), best.choice.update(64)))
    assert f"tensor_parallel_degree = {best.choice.mesh.tensor}\n" in printed["toml"]


@pytest.mark.parametrize("error", [0.0, 0.01])
def test_the_winner_fits_with_all_of_its_layers(made_up, monkeypatch, error) -> None:
    """Whether the line through two depths was found wrong before or not."""
    first = search.find(_config(), 8, H100, RATES, 2)
    best = first.ranked[0]

    def whole(config: JobConfig, *_: object) -> Figures:
        if made_up[id(config)] == best.choice:
            return Figures({"peak": 200.0 * GIB}, 1.0, best.figures.seconds)
        return _made_up(made_up[id(config)], 30.0)

    def off(config: JobConfig, *_: object) -> float:
        return error * (made_up[id(config)] == best.choice)

    monkeypatch.setattr(search, "_measure", whole)
    monkeypatch.setattr(search, "error_of_line", off)
    found = search.find(_config(), 8, H100, RATES, 2)
    assert found.ranked[0].choice == first.ranked[1].choice
    assert found.corrected == (error > 0)


def test_what_is_corrected_is_ranked_anew(made_up, monkeypatch) -> None:
    def slower(config: JobConfig, *_: object) -> Figures:
        one = _made_up(made_up[id(config)], 30.0)
        return replace(one, seconds=100 * one.seconds)

    monkeypatch.setattr(search, "_measure", slower)
    monkeypatch.setattr(search, "error_of_line", lambda *_: 0.01)
    found = search.find(_config(), 8, H100, RATES, 2)
    assert found.corrected == search.CHECKED < len(found.ranked)
    seconds = [one.figures.seconds for one in found.ranked]
    assert seconds == sorted(seconds)


def test_of_both_ends_the_larger_peak_and_the_longer_time_count() -> None:
    first, last = Figures({"a": 9.0}, 1.0, 1.0), Figures({"a": 8.0}, 1.0, 2.0)
    most = search._most([first, last])
    assert (most.peak_bytes, most.seconds) == (9, 2.0)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"],
        ["--parallelism.pipeline_parallel_degree=2"],
    ],
)
def test_layers_are_added_along_the_line_through_two_depths(words, monkeypatch) -> None:
    def linear(plan: Plan, _: int, rank: int, *__: object) -> Figures:
        depth = depth_of_rank(plan, rank)
        return Figures({"a": 100 + 7 * depth, "b": 3 * depth}, 1.0, 1 + 2 * depth, rank)

    monkeypatch.setattr(predicting, "measure", linear)
    config, _ = load_config([DEBUG, "--model.args.n_layers=24", *words])
    plan = plan_job(config, 2, is_gpu=True)
    found, whole = predict(plan, 2, 0, H100, RATES), linear(plan, 2, 0)
    assert found.line is not None
    assert found.peaks == pytest.approx(whole.peaks)
    assert found.seconds == pytest.approx(whole.seconds)
    assert error_of_line(config, 2, found, H100, RATES) == pytest.approx(0)


def test_a_step_takes_longer_than_its_bound() -> None:
    words = ["--model.args.dim=2048", "--model.args.n_layers=2", "--model.args.vocab_size=2048"]
    config, _ = load_config([DEBUG, "--training.seq_len=2048", *words])
    meshes = [(1, 1, ""), (2, 1, ""), (1, 2, "1F1B")]
    with predicting.processes(2) as pool:
        simulated = []
        for tensor, pipeline, schedule in meshes:
            choice = Choice(Mesh(tensor, 1, pipeline, 1, schedule, 4), "full", False)
            plan = plan_job(changed(config, choice.update(16)), 2, is_gpu=True)
            simulated.append((plan, search._whole(plan, 2, H100, BEST, pool)))
        for plan, ends in simulated:
            seconds = max(end.result().seconds for end in ends)
            assert 1 < seconds / least_seconds(plan, H100, BEST) < 2
