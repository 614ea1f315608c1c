"""Fits a scaling law to losses, and predicts further losses with intervals.

Sources: L = E + A / N^alpha + B / D^beta of parameters and tokens, Hoffmann et al. 2022,
arXiv:2203.15556, section 3.3; of compute alone L = E + A / C^alpha, Henighan et al. 2020,
arXiv:2010.14701, eq. 1.1. As Hoffmann et al. do, by the Huber loss of the errors of log L.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEVEL = 0.95
"""Confidence of intervals."""

LEVEL_OF_REFUSAL = 0.99
"""A rung outside the interval of this level, predicted from the rungs before, shows no law."""

LEAST_EXPLAINED = 0.9
"""Of the variance of log L over the rungs; below, the residuals show no law."""

BEND = 1.345
"""Standard deviations beyond which an error counts linearly: 95 % efficient if errors are normal
(Huber 1981, Robust Statistics, section 4.5)."""

BEND_VARIANCE = 0.7102
"""E[min(z^2, BEND^2)] of a standard normal z, by which the scale is consistent."""

MOST_LEVERAGE = 0.95
"""Above, a residual is too small to tell of its error."""

ITERATIONS, SCALE_ITERATIONS = 150, 4
IDLE_ITERATIONS = 8
"""Without progress of any problem, after which a solution is final."""

REACH = np.geomspace(0.25, 300, 60)
"""Where a profile is evaluated, in half widths that a straight line would have."""


class Interval(NamedTuple):
    """A value and its interval; an infinite end isn't bounded by the data."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Law:
    """A fitted law of n losses and k terms: log L = log(exp(e) + sum_j exp(a_j - b_j u_j)), where
    u is the log of N, D or C, less its mean over the data."""

    x: Array
    """(n, k): logs of the variables."""
    y: Array
    """(n): logs of losses."""
    theta: Array
    """(1 + 2 k): e, the a_j, and the logs of the b_j."""
    scale: float
    """Standard deviation of an error of log L, robust, with n - 1 - 2 k degrees of freedom."""
    objective: float

    @property
    def freedom(self) -> int:
        """Degrees of freedom of the residuals."""
        return len(self.y) - len(self.theta)

    @property
    def explained(self) -> float:
        """Part of the variance of log L that the law explains, adjusted for its parameters."""
        variance = self.y.var(ddof=1)
        return float(1 - self.scale**2 / variance) if variance > 0 else 0.0

    def loss_at(self, x: Array) -> float:
        """Return the law's loss at x: (k), logs of the variables."""
        return math.exp(_model((x - self.x.mean(0))[None], self.theta[None])[0][0, 0])

    def predict(self, x: Array, level: float = LEVEL) -> Interval:
        """Return the loss that a further run would have, and its profile-likelihood interval: the
        losses that the law could be fitted to together with the others.

        Args:
            x: (k): logs of the variables.
        """
        value, center = math.log(self.loss_at(x)), self.x.mean(0)
        offsets = both_sides(self.scale * quantile(level, self.freedom) * REACH)
        y = np.column_stack((np.tile(self.y, (len(offsets), 1)), value + offsets))
        # squares for the further loss: it must not be taken for an outlier
        bends = np.append(np.full(len(self.y), BEND * self.scale), math.inf)
        start = np.tile(self.theta, (len(offsets), 1))
        _, objective = _solve(np.vstack((self.x, x)) - center, y, start, bends)
        return self._interval(value, offsets, objective, level)

    def parameters(self) -> dict[str, Interval]:
        """Return E, and the exponent of each term, with profile-likelihood intervals."""
        k = self.x.shape[1]
        names = ["E", "alpha", "beta"][: 1 + k]
        places = [0, *range(1 + k, 1 + 2 * k)]
        return {name: self._profile(place) for name, place in zip(names, places, strict=True)}

    def coefficients(self) -> list[float]:
        """Return the factor of each term: A, and B."""
        k = self.x.shape[1]
        a, b = self.theta[1 : 1 + k], np.exp(self.theta[1 + k :])
        return [float(factor) for factor in np.exp(a + b * self.x.mean(0))]

    def _profile(self, place: int) -> Interval:
        """Return the interval of a parameter, whose log is at `place`."""
        offsets = both_sides(np.geomspace(0.002, 5, len(REACH)))
        start = np.tile(self.theta, (len(offsets), 1))
        start[:, place] += offsets
        free = np.arange(len(self.theta)) != place
        y = np.tile(self.y, (len(offsets), 1))
        bends = np.full(len(self.y), BEND * self.scale)
        _, objective = _solve(self.x - self.x.mean(0), y, start, bends, free)
        return self._interval(float(self.theta[place]), offsets, objective, LEVEL)

    def _interval(self, value: float, offsets: Array, objective: Array, level: float) -> Interval:
        """Return the interval of which `value` is the log: up to where a profile, evaluated at
        `value + offsets`, first crosses the threshold; infinite if it doesn't."""
        # its root is nearly straight
        rise = np.sqrt(np.maximum(objective - self.objective, 0))
        threshold = self.scale * quantile(level, self.freedom)
        ends = []
        for side in (offsets < 0, offsets > 0):
            order = np.argsort(np.abs(offsets[side]))
            far, up = (np.append(0.0, values[side][order]) for values in (offsets, rise))
            above = np.flatnonzero(up > threshold)
            end = float(far[-1] * math.inf)
            if len(above):
                last = slice(above[0] - 1, above[0] + 1)
                end = float(np.interp(threshold, up[last], far[last]))
            ends.append(end)
        low, high = ends
        return Interval(math.exp(value), math.exp(value + low), math.exp(value + high))


def both_sides(offsets: Array) -> Array:
    """Return positive offsets, and before them the negative ones, in rising order."""
    return np.concatenate((-offsets[::-1], offsets))


def why_no_law(x: Array, losses: Array) -> str:
    """Return why the losses follow no law; "": they follow one.

    Args:
        x: (n, k): logs of the variables, by increasing compute.
        losses: (n), nats.
    """
    explained = max(fit(x, losses).explained, 0.0)
    if explained < LEAST_EXPLAINED:
        limit = f"less than {LEAST_EXPLAINED:.0%}"
        return f"the law explains {explained:.0%} of the variance of log L, {limit}"
    places = range(least_points(x.shape[1]) - 1, len(losses))
    # any of them outside: all together have the level
    level = 1 - (1 - LEVEL_OF_REFUSAL) / max(len(places), 1)
    for place in places:
        _, low, high = fit(x[:place], losses[:place]).predict(x[place], level)
        if not low <= losses[place] <= high:
            text = f"rung {place + 1} has a loss of {losses[place]:.4f}, and the law of the smaller"
            return f"{text} ones predicts {low:.4f} to {high:.4f} ({LEVEL_OF_REFUSAL:.0%})"
    return ""


def least_points(terms: int) -> int:
    """Return the fewest losses that leave two degrees of freedom to the residuals."""
    return 1 + 2 * terms + 2


def fit(x: Array, losses: Array) -> Law:
    """Fit the law of k terms to n losses.

    Args:
        x: (n, k): logs of N and D, or of C.
        losses: (n), nats.
    """
    (n, k), y = x.shape, np.log(losses)
    u = x - x.mean(0)
    starts = np.array(
        [
            [math.log(part), *[math.log((1 - part) / k)] * k, *np.log(powers)]
            for part in (0.2, 0.5, 0.8)
            for powers in np.stack(np.meshgrid(*[(0.1, 0.3, 0.8)] * k), -1).reshape(-1, k)
        ]
    )
    starts[:, : 1 + k] += y.mean()
    scale, bends = 0.0, np.full(n, math.inf)
    theta, objective = _solve(u, np.tile(y, (len(starts), 1)), starts, bends)
    for _ in range(SCALE_ITERATIONS):
        best = int(objective.argmin())
        model, gradient = (part[0] for part in _model(u, theta[best : best + 1]))
        # a residual is smaller than its error, the more the fit follows that point
        leverage = np.einsum("np,pn->n", gradient, np.linalg.pinv(gradient))
        error = (model - y) / np.sqrt(1 - np.clip(leverage, 0, MOST_LEVERAGE))
        variance = np.minimum(error**2, bends**2).mean()
        if math.isfinite(bends[0]):
            variance /= BEND_VARIANCE
        scale = max(math.sqrt(variance), 1e-9)
        bends = np.full(n, BEND * scale)
        theta, objective = _solve(u, np.tile(y, (len(theta), 1)), theta, bends)
    best = int(objective.argmin())
    return Law(x, y, theta[best], scale, float(objective[best]))


def quantile(level: float, freedom: int) -> float:
    """Return t such that a Student's t of so many degrees of freedom is in [-t, t] with probability
    `level`: with t = sqrt(freedom) tan(angle), the density of the angle is cos(angle)^(freedom -
    1)."""
    angles = np.linspace(0, math.pi / 2, 200_001)
    mass = np.cumsum(np.cos(angles) ** (freedom - 1))
    return math.sqrt(freedom) * math.tan(float(np.interp(level, mass / mass[-1], angles)))


def _model(u: Array, theta: Array) -> tuple[Array, Array]:
    """Return log L (s, n) and its derivatives (s, n, p) of s parameters (s, p) at u (n, k)."""
    k = u.shape[1]
    e, a, b = theta[:, :1], theta[:, None, 1 : 1 + k], np.exp(theta[:, None, 1 + k :])
    terms = np.exp(a - b * u)
    total = np.exp(e) + terms.sum(-1)
    shares = terms / total[..., None]
    gradient = np.concatenate(((np.exp(e) / total)[..., None], shares, -b * u * shares), -1)
    return np.log(total), gradient


def _solve(
    u: Array, y: Array, theta: Array, bends: Array, free: NDArray[np.bool_] | None = None
) -> tuple[Array, Array]:
    """Minimize the sum of Huber losses of s problems at once by Levenberg and Marquardt's method.

    Args:
        u: (n, k), of all problems.
        y: (s, n).
        theta: (s, p), where to start.
        bends: (n): errors beyond it count linearly.
        free: (p): the parameters that may move. None: all.
    """

    def objective_of(theta: Array) -> tuple[Array, Array, Array]:
        model, gradient = _model(u, theta)
        error = model - y
        size = np.abs(error)
        with np.errstate(invalid="ignore"):
            loss = np.where(size <= bends, error**2, 2 * bends * size - bends**2)
        return loss.sum(-1), error, gradient

    value, error, gradient = objective_of(theta)
    damping, idle = np.full(len(theta), 1e-3), 0
    for _ in range(ITERATIONS):
        weight = np.minimum(1, bends / np.maximum(np.abs(error), 1e-300))
        own = gradient if free is None else gradient * free
        normal = np.einsum("snp,sn,snq->spq", own, weight, own)
        normal += (damping[:, None] + 1e-12)[..., None] * np.eye(theta.shape[1])
        right = np.einsum("snp,sn,sn->sp", own, weight, error)
        step = np.clip(np.linalg.solve(normal, right[..., None])[..., 0], -1, 1)
        # beyond, a term is a constant, or none
        moved = np.clip(theta - step, -20, 20)
        new, new_error, new_gradient = objective_of(moved)
        better = new < value
        idle = 0 if (value - new > 1e-9 * value).any() else idle + 1
        if idle == IDLE_ITERATIONS:
            break
        theta = np.where(better[:, None], moved, theta)
        error = np.where(better[:, None], new_error, error)
        gradient = np.where(better[:, None, None], new_gradient, gradient)
        value = np.where(better, new, value)
        damping = np.clip(damping * np.where(better, 0.2, 5), 1e-12, 1e6)
    return theta, value
