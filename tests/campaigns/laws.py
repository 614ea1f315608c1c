"""Draws scaling laws with noise, fits each ladder, and compares its intervals with the truth.

    python -m tests.campaigns.laws --laws 200 --seed 0

Half of the laws are of compute (5 to 8 rungs), half of parameters and tokens (4 or 5 widths with
three ratios), E from 1 to 3 nats, exponents from 0.05 to 0.5, errors of runs from 0.05 to 1 %. Then
ladders that follow no law: noise, a loss that rises, and one that stops falling.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from meshwright.commands.ladder.law import Array, Law, fit, why_no_law

GROWTH = 2.5
"""Of the parameters from one width to the next, and of the further rung."""


class Drawn(NamedTuple):
    """A law, its rungs, and a further one, which is the last."""

    x: Array
    losses: Array
    truth: dict[str, float]


def of_compute(draw: np.random.Generator) -> Drawn:
    count, growth = int(draw.integers(5, 9)), draw.uniform(np.log(2), np.log(4))
    x = (np.log(1e12) + np.arange(count + 1) * growth)[:, None]
    floor, alpha, height = draw.uniform(1, 3), draw.uniform(0.05, 0.4), draw.uniform(0.5, 5)
    losses = floor + height * np.exp(-alpha * (x - x.mean(0)))[:, 0]
    return Drawn(x, with_noise(losses, draw), {"E": floor, "alpha": alpha})


def of_both(draw: np.random.Generator) -> Drawn:
    widths = np.log(1e5) + np.arange(int(draw.integers(4, 6)) + 1) * np.log(GROWTH)
    ratios = np.log([5, 15, 45])
    x = np.array([(n, n + ratio) for n in widths[:-1] for ratio in ratios])
    x = np.vstack((x, (widths[-1], widths[-1] + ratios[1])))
    floor, alpha, beta = draw.uniform(1, 3), draw.uniform(0.15, 0.5), draw.uniform(0.15, 0.5)
    terms = draw.uniform(0.3, 3, 2) * np.exp(-np.array([alpha, beta]) * (x - x.mean(0)))
    losses = with_noise(floor + terms.sum(1), draw)
    return Drawn(x, losses, {"E": floor, "alpha": alpha, "beta": beta})


def with_noise(losses: Array, draw: np.random.Generator) -> Array:
    size = 10 ** draw.uniform(-3.3, -2)
    return np.asarray(losses * np.exp(size * draw.standard_normal(len(losses))))


def lawless(draw: np.random.Generator) -> dict[str, Drawn]:
    x = (np.log(1e12) + np.arange(6) * np.log(4))[:, None]
    falling = 2 + 3 * np.exp(-0.15 * (x[:, 0] - x[0, 0]))
    stuck = np.where(np.arange(6) < 5, falling, falling[3])
    kinds = {"noise": np.full(6, 4.0), "rising": falling[::-1], "no longer falling": stuck}
    return {
        name: Drawn(x, np.asarray(losses * np.exp(0.003 * draw.standard_normal(6))), {})
        for name, losses in kinds.items()
    }


def compare(one: Drawn) -> tuple[Law, dict[str, bool]]:
    """Return the law of all rungs but the last, and what its intervals hold."""
    law = fit(one.x[:-1], one.losses[:-1])
    holds = {"loss": _holds(law.predict(one.x[-1]), one.losses[-1])}
    own = law.parameters()
    return law, holds | {name: _holds(own[name], value) for name, value in one.truth.items()}


def _holds(interval: Sequence[float], value: float) -> bool:
    return interval[1] <= value <= interval[2]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--laws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    draw = np.random.default_rng(given.seed)
    kinds: dict[str, Callable[[np.random.Generator], Drawn]] = {
        "compute": of_compute,
        "parameters and tokens": of_both,
    }
    for kind, make in kinds.items():
        rows, refused = list[dict[str, bool]](), 0
        for _ in range(given.laws // 2):
            one = make(draw)
            rows.append(compare(one)[1])
            refused += bool(why_no_law(one.x[:-1], one.losses[:-1]))
        shares = ", ".join(f"{name} {np.mean([row[name] for row in rows]):.1%}" for name in rows[0])
        print(f"{kind}: {len(rows)} laws, intervals hold: {shares}; {refused} refused")
    counts = dict[str, int]()
    for _ in range(given.laws // 2):
        for name, one in lawless(draw).items():
            counts[name] = counts.get(name, 0) + bool(why_no_law(one.x, one.losses))
    for name, count in counts.items():
        print(f"{name}: {count} of {given.laws // 2} refused")


if __name__ == "__main__":
    main()
