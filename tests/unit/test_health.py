"""How steps are judged; that it happens on the device: tests/integration/test_simulated_gpu.py."""

import json
import math

import numpy as np
import pytest
import torch

from meshwright.config.training import BadSteps
from meshwright.train.bad_steps import BadStepDetector

CPU = torch.device("cpu")
LABELS = torch.tensor(8)


def spikes(policy: str = "skip", std: float = 3.0, window: int = 4, budget: int = 10) -> BadSteps:
    return BadSteps(policy=policy, spike_std=std, spike_window=window, budget=budget)


def judge(detector: BadStepDetector, losses, grad_norms=None, first: int = 1) -> list[bool]:
    """Whether each step was held back; gradient norms are good unless given."""
    held = []
    for step, loss in enumerate(losses, first):
        norm = 1.0 if grad_norms is None else grad_norms[step - first]
        figures = torch.tensor(loss), torch.tensor(norm)
        held.append(bool(detector.judge(step, *figures, torch.isfinite(figures[0]), LABELS)))
    return held


def skipped(detector: BadStepDetector) -> list[int]:
    return [bad.step for bad in detector.bad_steps()]


def noise(size: int, seed: int = 0) -> list[float]:
    return np.random.default_rng(seed).normal(4.0, 0.1, size).astype(np.float32).tolist()


@pytest.mark.parametrize("window", [2, 4, 100])
def test_mean_and_variance_are_sums_over_all_good_steps_with_their_weights(window) -> None:
    detector = BadStepDetector(CPU, spikes(std=1e6, window=window))
    losses, norms = noise(30), noise(30, 1)
    judge(detector, losses, norms)
    steps = np.array([1 / min(n, window) for n in range(1, 31)])
    weights = np.array([w * np.prod(1 - steps[n:]) for n, w in enumerate(steps, 1)])
    assert weights.sum() == pytest.approx(1)
    figures = np.array([losses, norms])
    mean = figures @ weights
    variance = (figures - mean[:, None]) ** 2 @ weights
    found = detector.statistics()
    assert found["num_good"] == 30
    assert found["mean"] == pytest.approx(mean, rel=1e-6)
    assert found["variance"] == pytest.approx(variance, rel=1e-5)
    if window == 100:
        assert variance == pytest.approx(figures.var(axis=1))


def test_a_spike_is_above_the_mean_after_a_warm_up_and_changes_nothing() -> None:
    steady = [4.0, 4.2, 3.8, 4.0]  # standard deviation 0.1414
    detector = BadStepDetector(CPU, spikes())
    assert judge(detector, [*steady[:3], 50.0]) == [False] * 4, "the window was not full"
    detector = BadStepDetector(CPU, spikes())
    assert not any(judge(detector, steady))
    before = detector.statistics()
    assert judge(detector, [4.44, 1000.0], first=5) == [True, True]
    assert detector.statistics() == before
    assert judge(detector, [4.0], [math.nextafter(1.0, 2)], first=7) == [False], "of no deviation"
    assert judge(detector, [4.0], [1.01], first=8) == [True]
    assert judge(detector, [4.3, 0.1, 4.0], first=9) == [False] * 3, "below is no spike"
    assert skipped(detector) == [5, 6, 8]
    bad = detector.bad_steps()[0]
    assert bad.values == pytest.approx((4.44, 1.0))
    assert bad.means == pytest.approx((4.0, 1.0))
    assert bad.deviations == pytest.approx((math.sqrt(0.02), 0.0))


def test_what_is_not_finite_is_skipped_and_leaves_no_trace_in_the_statistics() -> None:
    nan, inf = math.nan, math.inf
    losses = noise(8)
    good, detector = BadStepDetector(CPU, spikes(std=20)), BadStepDetector(CPU, spikes(std=20))
    judge(good, losses)
    bad_losses = [nan, *losses[:4], inf, 1.0, *losses[4:], -inf]
    norms = [1.0] * 6 + [inf] + [1.0] * 5
    held = judge(detector, bad_losses, norms)
    assert [step for step, is_held in enumerate(held, 1) if is_held] == [1, 6, 7, 12]
    assert skipped(detector) == [1, 6, 7, 12]
    assert [bad.is_finite_here for bad in detector.bad_steps()] == [False, False, True, False]
    assert detector.statistics() == good.statistics()
    judge(detector, losses[:3], first=13)
    assert skipped(detector) == [1, 6, 7, 12], "a good step leaves records alone"


def test_without_spikes_only_what_is_not_finite_is_bad() -> None:
    detector = BadStepDetector(CPU, BadSteps(policy="skip"))
    assert not any(judge(detector, [4.0] * 200 + [1e30]))
    assert judge(detector, [math.nan, 4.0]) == [True, False]


def test_a_batch_whose_targets_are_all_excluded_is_held_back_and_not_bad() -> None:
    nan, none = torch.tensor(math.nan), torch.tensor(0)
    for may_be_empty in (True, False):
        detector = BadStepDetector(CPU, may_be_empty=may_be_empty)
        assert detector.judge(1, nan, nan, torch.tensor(False), none)
        assert bool(detector.is_stopped) != may_be_empty
        assert detector.judge(2, nan, nan, torch.tensor(False), none + 1)
        assert skipped(detector) == ([2] if may_be_empty else [1])


def test_after_the_budget_no_step_is_good() -> None:
    """A change that lasts is no spike, and ends the job all the same."""
    detector = BadStepDetector(CPU, spikes(std=20, budget=3))
    losses = [*noise(20), *(x + 10 for x in noise(10))]
    held = judge(detector, losses)
    assert held == [False] * 20 + [True] * 10
    assert skipped(detector) == [21, 22, 23, 24]
    assert judge(detector, [4.0], first=31) == [True]
    assert bool(detector.is_stopped)
    assert detector.allowed == 3


@pytest.mark.parametrize("config", [BadSteps(), spikes("stop", std=20)])
def test_stop_takes_the_first_bad_step_for_the_last(config) -> None:
    detector = BadStepDetector(CPU, config)
    assert judge(detector, [*noise(5), math.nan, 4.0, math.nan]) == [False] * 5 + [True] * 3
    assert skipped(detector) == [6]
    assert detector.allowed == 0


def test_a_resume_goes_on_to_the_bit_and_counts_what_was_skipped() -> None:
    losses = noise(40)
    losses[12], losses[30], losses[35] = math.nan, 90.0, 80.0
    whole = BadStepDetector(CPU, spikes(std=20, budget=2))
    want = judge(whole, losses)
    first = BadStepDetector(CPU, spikes(std=20, budget=2))
    judge(first, losses[:21])
    saved = json.loads(json.dumps(first.statistics()))
    resumed = BadStepDetector(CPU, spikes(std=20, budget=2), num_before=1, statistics=saved)
    assert judge(resumed, losses[21:], first=22) == want[21:]
    assert skipped(whole) == [13, 31, 36]
    assert skipped(resumed) == [31, 36]
    assert resumed.allowed == 1
    assert resumed.statistics() == whole.statistics()
    # a lower budget stops at the next bad step, not before
    strict = BadStepDetector(CPU, spikes(std=20, budget=1), num_before=2, statistics=saved)
    assert judge(strict, losses[21:31], first=22) == [False] * 9 + [True]
    assert strict.allowed == 0


def test_statistics_from_before_spikes_were_last_off_are_forgotten() -> None:
    on = BadStepDetector(CPU, spikes())
    judge(on, noise(10))
    off = BadStepDetector(CPU, BadSteps(policy="skip"), statistics=on.statistics())
    judge(off, noise(3))
    again = BadStepDetector(CPU, spikes(), statistics=off.statistics())
    assert again.statistics()["num_good"] == 0
    assert not any(judge(again, [50.0, 51.0, 52.0, 53.0]))


def test_a_huge_norm_at_the_start_spoils_no_statistics() -> None:
    """Its square is beyond fp32."""
    detector, norms = BadStepDetector(CPU, spikes(window=4)), [3e19, *noise(9)]
    assert judge(detector, noise(10, 1), norms) == [False] * 10
    assert all(map(math.isfinite, detector.statistics()["variance"]))
