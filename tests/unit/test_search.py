"""The search of `meshwright plan --search`, with made-up figures in the place of simulations."""

import itertools
import json
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from meshwright.commands.plan import predict as predicting
from meshwright.commands.plan import search
from meshwright.commands.plan.candidates import MODES, Choice, Mesh, difference, legal
from meshwright.commands.plan.devices import GIB, Device, find_device
from meshwright.commands.plan.floors import (
    NONE,
    Floor,
    Parts,
    Shape,
    Work,
    _bytes_in_backward,
    _fsdp_seconds,
    floor_of,
    shape_of,
    traces,
    waiting,
)
from meshwright.commands.plan.predict import Figures, error_of_line, predict
from meshwright.commands.plan.rates import assumed
from meshwright.commands.plan.search import Board, fits_in
from meshwright.commands.plan.simulate import plan_job
from meshwright.config.job_config import JobConfig, changed
from meshwright.config.loader import load_config
from meshwright.config.training import ParameterGroup
from meshwright.train.preflight import Plan

H100 = find_device("h100")
RATES = assumed(H100)[1]
GIB_PER_LAYER = 5.0
DEBUG = "--job.config_file=train_configs/debug_model.toml"


@cache
def _plans() -> dict[Choice, Plan]:
    return dict(legal(_config(), 8, H100))


@cache
def _config() -> JobConfig:
    batch = ["--training.seq_len=256", "--training.global_batch_size=64"]
    batch.append("--training.local_batch_size=8")
    return load_config([DEBUG, *batch, "--training.mixed_precision_param=bfloat16"])


def _parts(shape: Shape, gib: float) -> Parts:
    """More bytes for modes that keep more, more seconds for those that do more."""
    tensor, _, size, mode = shape
    recomputes = MODES.index(mode)

    def work(seconds: float, kept: float) -> Work:
        backward = (2 + 0.5 * recomputes) * seconds
        return Work(seconds * size / tensor, backward * size / tensor, kept * size / tensor)

    return Parts(work(0.1, 0), work(1.0, gib * GIB * 0.5**recomputes), work(0.5, 0))


@cache
def _floors(gib: float) -> dict[Choice, Floor]:
    return {
        choice: floor_of(plan, _parts(shape_of(choice), gib), H100, RATES)
        for choice, plan in _plans().items()
    }


def _made_up(choice: Choice, gib: float) -> Figures:
    """More than the floors, by other factors on other meshes."""
    floor, mesh = _floors(gib)[choice], choice.mesh
    size = floor.num_bytes * (1.1 + 0.05 * mesh.pipeline) + GIB * choice.keeps_gathered
    seconds = floor.seconds * (1.05 + 0.02 * mesh.tensor) + 0.1 * (not choice.keeps_gathered)
    return Figures({"peak": size}, 1.0, seconds)


@pytest.mark.parametrize("gib", [0.1, 1.0, 5.0, 10.0, 30.0])
def test_what_is_left_out_is_never_the_best(gib) -> None:
    board = Board(_plans(), _floors(gib), H100)
    while (choice := board.next()) is not None:
        board.note(choice, _made_up(choice, gib))
    assert board.num_open == 0
    figures = {choice: _made_up(choice, gib) for choice in _plans()}
    fitting = [c for c, one in figures.items() if fits_in(one, _plans()[c], H100)]
    best = board.ranked()
    assert len(board.found) < len(_plans()) / 3
    assert bool(best) == bool(fitting)
    if fitting:
        assert best[0].figures.seconds == min(figures[c].seconds for c in fitting)


@pytest.mark.parametrize(("gib", "left"), [(200.0, 5), (1.0, 3)])
def test_a_simulation_decides_other_modes_of_its_mesh(gib, left) -> None:
    """Too large: only the mode that keeps more is out. It fits: the three that do more are."""
    mesh = Mesh(1, 1, 1, 1, "", 1)
    plans = {choice: plan for choice, plan in _plans().items() if choice.mesh == mesh}
    board = Board(plans, dict.fromkeys(plans, Floor(0.0, 0.0)), H100)
    assert board.num_open == 6
    board.note(Choice(mesh, "selective", True), Figures({"peak": gib * GIB}, 1.0, 1.0))
    assert board.num_open == left


@pytest.mark.parametrize(("mode", "left"), [("selective", 7), ("full", 5)])
def test_larger_microbatches_are_too_large_as_well_if_they_add_gradients_up(mode, left) -> None:
    """With 2 sequences one is too large: so is one of 4, in this mode and in one that keeps more.
    One of 8 is the whole batch, and adds its gradients to no others."""
    plans = {
        choice: _plans()[choice]
        for size in (1, 2, 4, 8)
        for name in ("selective", "full")
        for choice in [Choice(Mesh(1, 1, 1, 1, "", size), name, True)]
    }
    board = Board(plans, dict.fromkeys(plans, Floor(0.0, 0.0)), H100)
    assert board.num_open == 8
    too_large = Figures({"peak": 200.0 * GIB}, 1.0, 1.0)
    board.note(Choice(Mesh(1, 1, 1, 1, "", 2), mode, True), too_large)
    assert board.num_open == left


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


def test_nothing_of_which_the_floor_does_not_fit_is_simulated() -> None:
    board = Board(_plans(), _floors(1.0), Device("", 1.5))
    assert board.num_too_large == len(_plans())
    assert board.next() is None


def test_the_first_rank_of_a_pipeline_keeps_microbatches_in_flight() -> None:
    """1F1B: one per rank. Interleaved1F1B: 3 p - 1 stages' forwards, of 2 per rank."""
    layer = Parts(NONE, Work(0.0, 0.0, float(GIB)), NONE)
    for choice, plan in _plans().items():
        ranks, count = plan.dims.pp, plan.num_microbatches
        in_flight = {
            "": 1.0,
            "1F1B": min(ranks, count),
            "Interleaved1F1B": min((3 * ranks - 1) / 2, count) if count >= 2 * ranks else count,
        }.get(choice.mesh.schedule)
        if in_flight is not None:
            names = [name for part in plan.stage_modules[::ranks] for name in part]
            kept = in_flight * sum("layers." in name for name in names) * GIB
            floor = floor_of(plan, layer, H100, RATES).num_bytes
            assert 0 <= floor - kept < 0.5 * GIB


def test_a_pipeline_keeps_gradients_whole_and_copies_that_it_gathers() -> None:
    """Of a parameter: fp32, and bf16 unless it is freed or was whole from the start."""
    for choice, plan in _plans().items():
        if choice.mesh.pipeline > 1:
            is_gathered = choice.keeps_gathered and plan.dims.dp_shard > 1
            assert _bytes_in_backward(plan) == (6 if is_gathered else 4)


def test_parameters_that_are_kept_are_gathered_once_per_microbatch() -> None:
    """Others twice, but for the last layer. They are bf16; gradients, reduced once a step, fp32."""
    nothing = Parts(NONE, NONE, NONE)
    for choice, plan in _plans().items():
        if choice.keeps_gathered and choice.mesh.pipeline == 1 and plan.dims.dp_shard > 1:
            again = _plans()[replace(choice, keeps_gathered=False)]
            kept, freed = (floor_of(one, nothing, H100, RATES).seconds for one in (plan, again))
            count = plan.num_microbatches
            gathers = count * (2 - 1 / plan.model_args.n_layers)
            assert freed / kept == pytest.approx((gathers * 2 + 4) / (count * 2 + 4))


def test_one_rank_needs_no_link() -> None:
    plan = plan_job(_config(), 1, is_gpu=False)
    assert _fsdp_seconds(plan, H100, replace(RATES, link=0.0)) == 0


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
        one = _made_up(choices[id(config)], GIB_PER_LAYER)
        return replace(one, line=(one, one))

    monkeypatch.setattr(search, "legal", lambda *_: plans.items())
    monkeypatch.setattr(search, "processes", lambda workers: _AtOnce())
    monkeypatch.setattr(search, "find_floors", lambda *_: _floors(GIB_PER_LAYER))
    monkeypatch.setattr(search, "predict_config", figures)
    monkeypatch.setattr(search, "_measure", figures)
    monkeypatch.setattr(search, "error_of_line", lambda *_: 0.0)
    return choices


def test_a_search_ranks_what_may_fit_by_tokens_per_second(made_up) -> None:
    found = search.find(_config(), 8, H100, RATES, 2)
    assert found.num_legal == len(_plans())
    alone = sum(choice.mesh.tensor == 1 for choice in _plans())
    assert found.num_too_large >= alone
    assert found.num_open == 0
    assert found.corrected == 0
    best = found.ranked[0]
    assert found.winner_bytes == best.figures.peak_bytes
    printed = json.loads(search.to_json(_config(), found, "data sheet"))
    speeds = [row["tokens_per_second"] for row in printed["ranked"]]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] == 64 * 256 / best.figures.seconds
    assert printed["toml"] == difference(_config(), changed(_config(), best.choice.update(64)))
    assert f"tensor_parallel_degree = {best.choice.mesh.tensor}\n" in printed["toml"]


def test_of_a_pipeline_that_fits_the_last_stage_is_simulated_too(made_up, monkeypatch) -> None:
    asked: dict[Choice, list[int]] = {}

    def figures(config: JobConfig, _: int, rank: int, *__: object) -> Figures:
        choice = made_up[id(config)]
        asked.setdefault(choice, []).append(rank)
        return _made_up(choice, GIB_PER_LAYER)

    monkeypatch.setattr(search, "predict_config", figures)
    search.find(_config(), 8, H100, RATES, 2)
    assert {2, 4} & {choice.mesh.pipeline for choice in asked}
    for choice, ranks in asked.items():
        fits = fits_in(_made_up(choice, GIB_PER_LAYER), _plans()[choice], H100)
        degree = choice.mesh.pipeline
        assert ranks == ([0, 8 - 8 // degree] if degree > 1 and fits else [0])


@pytest.mark.parametrize("error", [0.0, 0.01])
def test_the_winner_fits_with_all_of_its_layers(made_up, monkeypatch, error) -> None:
    """Whether the line through two depths was found wrong before or not."""
    first = search.find(_config(), 8, H100, RATES, 2)
    best = first.ranked[0]

    def whole(config: JobConfig, *_: object) -> Figures:
        if made_up[id(config)] == best.choice:
            return Figures({"peak": 200.0 * GIB}, 1.0, best.figures.seconds)
        return _made_up(made_up[id(config)], GIB_PER_LAYER)

    def off(config: JobConfig, *_: object) -> float:
        return error * (made_up[id(config)] == best.choice)

    monkeypatch.setattr(search, "_measure", whole)
    monkeypatch.setattr(search, "error_of_line", off)
    found = search.find(_config(), 8, H100, RATES, 2)
    assert found.ranked[0].choice == first.ranked[1].choice
    assert found.corrected == (error > 0)


def test_what_is_corrected_is_ranked_anew(made_up, monkeypatch) -> None:
    def slower(config: JobConfig, *_: object) -> Figures:
        one = _made_up(made_up[id(config)], GIB_PER_LAYER)
        return replace(one, seconds=100 * one.seconds)

    monkeypatch.setattr(search, "_measure", slower)
    monkeypatch.setattr(search, "error_of_line", lambda *_: 0.01)
    found = search.find(_config(), 8, H100, RATES, 2)
    assert found.corrected == search.CHECKED < len(found.ranked)
    seconds = [one.figures.seconds for one in found.ranked]
    assert seconds == sorted(seconds)


def test_what_is_corrected_and_does_not_fit_is_not_ranked(made_up, monkeypatch) -> None:
    """With one worker: which of two that are as fast comes first depends on who is done first."""
    first = search.find(_config(), 8, H100, RATES, 1).ranked
    large = Figures({"peak": 200.0 * GIB}, 1.0, first[1].figures.seconds)

    def is_second(config: JobConfig, *_: object) -> bool:
        return made_up[id(config)] == first[1].choice

    def whole(config: JobConfig, *_: object) -> Figures:
        return large if is_second(config) else _made_up(made_up[id(config)], GIB_PER_LAYER)

    monkeypatch.setattr(search, "_measure", whole)
    monkeypatch.setattr(search, "error_of_line", is_second)
    found = search.find(_config(), 8, H100, RATES, 1)
    assert found.corrected == 1
    choices = [one.choice for one in first]
    assert [one.choice for one in found.ranked] == [choices[0], *choices[2:]]


def test_of_both_ends_the_larger_peak_and_the_longer_time_count() -> None:
    first, last = Figures({"a": 9.0}, 1.0, 1.0), Figures({"a": 8.0}, 1.0, 2.0)
    most = search._most([first, last])
    assert (most.peak_bytes, most.seconds) == (9, 2.0)


EVERY_2ND = (
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=2",
)


def stages(*sizes: int) -> str:
    """A pipeline's stages of so many layers each, as an option."""
    numbers = itertools.count()
    parts = [[f"layers.{next(numbers)}" for _ in range(size)] for size in sizes]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return f"--parallelism.module_fqns_per_model_part={json.dumps(parts)}"


INTERLEAVED = (
    "--parallelism.pipeline_parallel_degree=2",
    "--parallelism.pipeline_parallel_schedule=Interleaved1F1B",
)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (24, []),
        (24, EVERY_2ND),
        (25, EVERY_2ND),
        (24, ["--parallelism.pipeline_parallel_degree=2"]),
        # its first stage has fewer layers than the rank's other, because it has the embedding
        (24, [*INTERLEAVED, "--model.args.vocab_size=4096"]),
        (38, [*INTERLEAVED, *EVERY_2ND]),  # stages of 9, 10, 10 and 9: its other begins at 19
        (30, [*INTERLEAVED, *EVERY_2ND, stages(9, 2, 11, 8)]),  # it begins at 11
    ],
)
def test_layers_are_added_along_the_line_through_two_depths(layers, words, monkeypatch) -> None:
    def linear(plan: Plan, _: int, rank: int, *__: object) -> Figures:
        assert rank == 0
        names = [name for part in plan.stage_modules[:: plan.dims.pp] for name in part]
        numbers = [int(name.split(".")[1]) for name in names if "layers." in name]
        recomputed = sum(number % predicting.period(plan.config) == 0 for number in numbers)
        depth = len(numbers)
        peaks = {"a": 100 + 7 * depth, "b": 3 * depth + recomputed}
        return Figures(peaks, 1.0, 1 + 2 * depth, rank)

    monkeypatch.setattr(predicting, "measure", linear)
    config = load_config([DEBUG, f"--model.args.n_layers={layers}", *words])
    plan = plan_job(config, 2, is_gpu=True)
    found, whole = predict(plan, 2, 0, H100, RATES), linear(plan, 2, 0)
    assert found.line is not None
    assert found.peaks == pytest.approx(whole.peaks)
    assert found.seconds == pytest.approx(whole.seconds)
    assert error_of_line(config, 2, found, H100, RATES) == pytest.approx(0)


@pytest.mark.parametrize("section", ["groups", "frozen"])
def test_shapes_without_a_trace_have_the_floor_of_their_parameters(section) -> None:
    """Shallow models lack the layer that a pattern names, or would count frozen gradients."""
    group = ParameterGroup(parameters=["layers.5.*"], lr_scale=2.0)
    keys = {
        "groups": {"optimizer": {"groups": [group]}},
        "frozen": {"model": {"frozen": ["tok_embeddings.*"]}},
    }
    config = changed(_config(), keys[section])
    choice, plan = next(legal(config, 8, H100))
    assert traces(config, [shape_of(choice)], H100, RATES) == {}
    floor = floor_of(plan, None, H100, RATES)
    assert floor.num_bytes == sum(plan.least_bytes.values())
    assert 0 < floor.seconds < 1e-6
