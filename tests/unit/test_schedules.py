"""The learning rate at every step, against a formula and by hand."""

import math

import pytest
import torch
from transformers import get_scheduler

from meshwright.config.loader import load_config
from meshwright.config.training import LRScheduler
from meshwright.train.optim.optimizers import learning_rate, warmup_stable_decay

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
