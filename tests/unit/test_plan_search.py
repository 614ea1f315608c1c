"""The search of `meshwright plan --search`, with made-up figures in the place of simulations."""

from functools import cache

import pytest

from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.planning.choices import Choice, difference, legal
from meshwright.planning.devices import GIB, Device, find_device
from meshwright.planning.predict import Figures
from meshwright.planning.remedies import changed
from meshwright.planning.search import Board, least_seconds, waiting
from meshwright.planning.timing import assumed
from meshwright.preflight import Plan

H100 = find_device("h100")
RATES = assumed(H100)[1]


@cache
def _plans() -> dict[Choice, Plan]:
    words = ["--job.config_file=train_configs/debug_model.toml", "--training.seq_len=256"]
    config, _ = load_config([*words, "--training.global_batch_size=64"])
    return dict(legal(config, 8, H100))


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
