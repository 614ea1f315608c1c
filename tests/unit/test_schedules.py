"""The learning rate at every step, against a formula and by hand."""

import math

import pytest
import torch
from transformers import get_scheduler

from meshwright.commands.prove.plain_optimizer import schedule
from meshwright.config.loader import load_config
from meshwright.config.training import LRScheduler
from meshwright.system.errors import ConfigError
from meshwright.train.facts import look
from meshwright.train.optim import registry, schedules
from meshwright.train.optim.registry import SCHEDULES
from meshwright.train.optim.schedules import learning_rate, warmup_stable_decay
from meshwright.train.resolve import resolve
from meshwright.train.resolve_model import TABLES
from tests.campaigns.new_user import example

STEPS, WARMUP = 100, 10


def ours(**options) -> list[float]:
    schedule = LRScheduler(warmup_steps=WARMUP, **options)
    return [warmup_stable_decay(step, STEPS, schedule) for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("min_lr_factor", [0.0, 0.1])
@pytest.mark.parametrize(
    ("decay_type", "left"),
    [
        ("linear", lambda done: 1 - done),
        ("sqrt", lambda done: 1 - math.sqrt(done)),
        ("cosine", lambda done: (1 + math.cos(math.pi * done)) / 2),
    ],
)
@pytest.mark.parametrize("decay_ratio", [None, 0.3])
def test_rates_follow_torchtitans_formula(decay_type, left, min_lr_factor, decay_ratio) -> None:
    """Its formula, whose steps begin at 0: the decay would end at a step after the last."""
    decay_steps = STEPS - WARMUP if decay_ratio is None else round(STEPS * decay_ratio)
    stable_until = STEPS + 1 - decay_steps
    want = []
    for current_step in range(STEPS):
        if current_step < WARMUP:
            factor = (current_step + 1) / WARMUP
        elif current_step < stable_until:
            factor = 1.0
        else:
            factor = left((current_step + 1 - stable_until) / decay_steps)
            factor = min_lr_factor + (1 - min_lr_factor) * factor
        want.append(factor)
    got = ours(decay_type=decay_type, min_lr_factor=min_lr_factor, decay_ratio=decay_ratio)
    assert got == pytest.approx(want, abs=1e-12)
    assert got[-1] > min_lr_factor


@pytest.mark.parametrize("decay_type", ["linear", "cosine"])
def test_rates_are_transformers_but_for_a_warmup_that_is_a_step_behind(decay_type) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(decay_type, optimizer, WARMUP, STEPS)
    theirs = []
    for _ in range(STEPS):
        theirs += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    assert theirs[0] == 0
    assert ours(decay_type=decay_type)[:WARMUP] == pytest.approx(theirs[1 : WARMUP + 1], abs=1e-12)
    assert ours(decay_type=decay_type)[WARMUP:] == pytest.approx(theirs[WARMUP:], abs=1e-12)


def test_schedules_without_warmup_or_decay_or_of_few_steps() -> None:
    def rate(step: int, steps: int, **options) -> float:
        return warmup_stable_decay(step, steps, LRScheduler(min_lr_factor=0.2, **options))

    assert rate(1, 9, warmup_steps=0, decay_ratio=0.0) == 1.0
    assert rate(9, 9, warmup_steps=0, decay_ratio=0.0) == 1.0
    assert rate(12, 9, warmup_steps=0, decay_ratio=0.0) == rate(12, 9, warmup_steps=9) == 1.0
    assert rate(12, 9, warmup_steps=0) == 0.2
    assert rate(9, 9, warmup_steps=0) == pytest.approx(0.2 + 0.8 / 9)
    assert rate(3, 4, warmup_steps=30) == pytest.approx(0.1)
    by_step = [rate(step, 20, warmup_steps=4, decay_start=15) for step in range(1, 22)]
    assert by_step == [rate(step, 20, warmup_steps=4, decay_ratio=0.25) for step in range(1, 22)]
    assert by_step[15] == 1.0 > by_step[16]
    assert rate(20, 20, warmup_steps=4, decay_start=30) == 1.0
    # the data ends before warm-up and decay have their steps: no jump from the peak
    short = {"warmup_steps": 20, "decay_ratio": 0.5}
    assert [rate(step, 24, **short) for step in (20, 21, 22)] == pytest.approx([1.0, 1.0, 0.8])


def test_the_beginning_of_a_longer_schedule() -> None:
    """`training.steps` cuts it off; without `total_steps` it would be squeezed in."""
    words = ["--lr_scheduler.warmup_steps=3", "--lr_scheduler.decay_type=cosine"]
    long = learning_rate(load_config(words), 50)
    begun = learning_rate(load_config([*words, "--lr_scheduler.total_steps=50"]), 10)
    squeezed = learning_rate(load_config(words), 10)
    assert [begun(step) for step in range(1, 11)] == [long(step) for step in range(1, 11)]
    assert squeezed(10) < begun(10)


def test_inverse_sqrt_is_transformers_without_its_late_step() -> None:
    """Its first step has a rate of 0, and so each has the rate that ours had a step before."""
    config = load_config(["--lr_scheduler.name=inverse_sqrt", "--lr_scheduler.warmup_steps=10"])
    rates = learning_rate(config, STEPS)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=config.optimizer.lr)
    theirs = get_scheduler("inverse_sqrt", optimizer, num_warmup_steps=WARMUP)
    for step in range(1, STEPS + 1):
        optimizer.step()
        theirs.step()
        assert rates(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        assert schedule(step, STEPS, config.lr_scheduler) * 8e-4 == pytest.approx(rates(step))


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Words of a job with a module of schedules."""
    monkeypatch.setattr("meshwright.train.resolve_model.SCHEDULES", table := dict(SCHEDULES))
    for module in (registry, schedules):
        monkeypatch.setattr(module, "SCHEDULES", table)
    monkeypatch.setitem(TABLES, "SCHEDULES", (table, *TABLES["SCHEDULES"][1:]))

    def words(code: str, name: str, *others: str) -> list[str]:
        path = tmp_path / f"{name}.py"
        path.write_text(code, "utf-8")
        dump = ["--job.dump_folder", str(tmp_path), "--training.steps=100"]
        own = ["--experimental.custom_import", str(path), "--lr_scheduler.name", name]
        return ["debug_model", *dump, *own, *others]

    return words


def test_a_schedule_of_your_own_is_the_docs(own) -> None:
    config = load_config(own(example("schedule"), "stairs", "--lr_scheduler.warmup_steps=10"))
    resolve(config, look(config, 1))
    rates = learning_rate(config, 100)
    lr = config.optimizer.lr
    assert [rates(step) / lr for step in (5, 25, 26, 50, 51, 100)] == [
        0.5,
        1,
        0.5,
        0.5,
        0.25,
        0.125,
    ]


def test_a_schedule_may_give_numbers_of_numpy_and_end_at_zero(own) -> None:
    falls = "lambda step, steps, _: numpy.float32(1 - step / steps)"
    config = load_config(own(f"import numpy\nSCHEDULES = {{'falls': {falls}}}", "falls"))
    resolve(config, look(config, 1))
    rates = [learning_rate(config, 100)(step) for step in (50, 100)]
    assert [*map(type, rates)] == [float, float]
    assert rates == [config.optimizer.lr / 2, 0.0]


@pytest.mark.parametrize(
    ("code", "name", "others", "message"),
    [
        ("", "stairz", [], "lr_scheduler.name = 'stairz': no such schedule\n  fix: "),
        (
            "SCHEDULES = {'off': lambda step, steps, options: -1.0}",
            "off",
            [],
            "lr_scheduler.name = 'off': its function gives -1.0 for step 1 of 100\n  fix: return a",
        ),
        (
            "SCHEDULES = {'late': lambda step, steps, options: 1 / (step - 1)}",
            "late",
            [],
            "its function raises for step 1 of 100: ZeroDivisionError: division by zero (",
        ),
        (
            "calls = []\nSCHEDULES = {'counts': lambda *_: calls.append(1) or 1 / len(calls)}",
            "counts",
            [],
            "its function gives 1.0 for step 1 of 100, and then 0.5\n  fix: let it follow from its",
        ),
        (
            "from meshwright.config.section import Section\n"
            "class Own(Section):\n    power: float = 1.0\n"
            "SCHEDULES = {'mine': lambda step, steps, own: step**-own.power}\n"
            "OPTIONS = {'mine': Own}",
            "mine",
            ["--options.mine.power=steep"],
            "options.mine.power = 'steep': should be a valid number",
        ),
    ],
)
def test_a_wrong_schedule_is_one_sentence(own, code, name, others, message) -> None:
    config = load_config(own(code, name, *others))
    with pytest.raises(ConfigError) as caught:
        resolve(config, look(config, 1))
    assert message in str(caught.value)
