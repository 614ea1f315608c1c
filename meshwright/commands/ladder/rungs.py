"""Reads the TOML of a ladder, and makes the runs of each rung from one dial, the model's width.

base = "game_cpu"               # a TOML or a preset: the shape, and its hyperparameters
rungs = [32, 48, 64, 80, 96]    # widths to train
predict = [128]                 # widths whose loss to predict
tokens_per_parameter = 20       # or a list, for a law of parameters and tokens
"""

from contextlib import chdir
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from meshwright.commands.experiment.arms import Arms
from meshwright.commands.experiment.registry import load
from meshwright.commands.experiment.spec import (
    BASE,
    Budget,
    Document,
    Request,
    Runs,
    Spec,
    Values,
    read_toml,
)
from meshwright.commands.ladder.law import Array, least_points
from meshwright.system.errors import ConfigError, check
from meshwright.train.resolve import ResolvedJob

Ratios = Annotated[
    list[PositiveFloat],
    Field(min_length=1),
    BeforeValidator(lambda value: value if isinstance(value, list) else [value]),
]
Power = Annotated[float, Field(ge=-4, le=4)]


class LadderSpec(Runs):
    """The TOML of a ladder."""

    rungs: Annotated[list[PositiveInt], Field(min_length=1)]
    """Widths D of the models to train."""
    predict: list[PositiveInt] = Field(default_factory=list)
    """Widths of models whose loss is predicted, and that aren't trained."""
    tokens_per_parameter: Ratios = Field([20.0])
    """Each rung trains on so many tokens for each of its active parameters. Several: each rung
    trains once with each, and the law is one of parameters and tokens."""
    seeds: PositiveInt = 1
    """Runs of each rung, whose mean is fitted."""
    lr_power: Power = -1 / 3
    """The learning rate is the base's times this power of N / N of the base."""
    batch_power: Power = 2 / 3
    """The same of the batch."""
    warmup: Annotated[NonNegativeFloat, Field(lt=1)] = 0.05
    """Part of a run's steps."""


@dataclass(frozen=True)
class Rung:
    """A model of a ladder, and how long it trains."""

    name: str
    dim: int
    ratio: float
    """Tokens per parameter."""
    parameters: int
    """Those that a token meets."""
    tokens: int
    flops: int
    """Of its training: forward and backward, in matrix products and attention."""
    steps: int
    keys: Values
    """Over the base's config."""


@dataclass(frozen=True)
class Ladder(Document):
    """A ladder's TOML, checked: the runs of its rungs are those of an experiment."""

    own: LadderSpec
    rungs: list[Rung]
    """Those to train, by their FLOPs."""
    further: list[Rung]
    """Those to predict."""

    @property
    def terms(self) -> list[str]:
        """The variables of the law: parameters and tokens, or compute."""
        return ["N", "D"] if len(self.own.tokens_per_parameter) > 1 else ["C"]

    def variables(self, rung: Rung) -> Array:
        """Return the logs of the variables."""
        counts = {"N": rung.parameters, "D": rung.tokens, "C": rung.flops}
        return np.log([float(counts[term]) for term in self.terms])

    def requests(self) -> list[Request]:
        """Return the arms that train the rungs."""
        return [Request(one.name, "rungs", one.keys, steps=one.steps) for one in self.rungs]


def read_ladder(file: Path) -> Ladder:
    """Read the TOML of a ladder.

    Raises:
        ConfigError: with file and line, if it isn't one, or a width doesn't fit the base.
    """
    own, provenance = read_toml(file, LadderSpec, "a ladder")
    # a budget of the base, which no rung has: each has its own
    spec = Spec(**own.model_dump(include=set(Runs.model_fields)), budget=Budget(tokens=1))
    document = Document(file.absolute(), spec, provenance)
    try:
        _check(own)
        with chdir(document.file.parent):
            base = Arms(document, load(document)).job(BASE)
            rungs = _rungs(own, base, "rungs", own.rungs)
            further = _rungs(own, base, "predict", own.predict)
    except ConfigError as error:
        raise document.explain(error) from None
    return Ladder(document.file, spec, provenance, own, rungs, further)


def _check(spec: LadderSpec) -> None:
    for key, values in (
        ("rungs", spec.rungs),
        ("predict", spec.predict),
        ("tokens_per_parameter", spec.tokens_per_parameter),
    ):
        check(len({*values}) == len(values), key, values, "has a value twice", "leave one out")
    both = [dim for dim in spec.predict if dim in spec.rungs]
    check(not both, "predict", spec.predict, f"{both} is trained as a rung", "leave it out there")
    needed = least_points(1 if len(spec.tokens_per_parameter) == 1 else 2)
    count = len(spec.rungs) * len(spec.tokens_per_parameter)
    rule = f"a law of {count} runs can't be judged: it takes {needed}"
    check(count >= needed, "rungs", spec.rungs, rule, "add widths")
    rule = "a law of parameters and tokens takes at least three widths"
    check(len(spec.rungs) > 2, "rungs", spec.rungs, rule, "add widths")


def _rungs(spec: LadderSpec, base: ResolvedJob, key: str, dims: list[int]) -> list[Rung]:
    pairs = product(dims, spec.tokens_per_parameter)
    rungs = (_rung(spec, base, key, dim, ratio) for dim, ratio in pairs)
    return sorted(rungs, key=lambda rung: rung.flops)


def _rung(spec: LadderSpec, base: ResolvedJob, key: str, dim: int, ratio: float) -> Rung:
    """Return the rung of a width, by the rules of the ladder.

    Source of the powers of the learning rate and the batch: Porian et al. 2024, arXiv:2406.19146,
    rounded as in the ladder of OLMo (Bhagia et al. 2024, arXiv:2412.04403). Tokens per parameter:
    Hoffmann et al. 2022, arXiv:2203.15556.
    """
    try:
        sizes = base.model_args.of_width(dim)
        table = replace(base.model_args, **cast("Values", sizes)).table
    except ValueError as error:
        raise ConfigError(key, f"{key} = {dim}: {error}") from None
    training = base.config.training
    parameters, seq_len = table.num_active_params, training.seq_len
    factor = parameters / base.model_args.table.num_active_params
    replicas = base.dims.dp_replicate * base.dims.dp_shard
    each = max(round(training.global_batch_size * factor**spec.batch_power / replicas), 1)
    # the microbatch that comes nearest to the base's
    local = max(n for n in range(1, training.local_batch_size + 1) if each % n == 0)
    steps = max(round(ratio * parameters / (each * replicas * seq_len)), 1)
    tokens = steps * each * replicas * seq_len
    lr = float(f"{base.config.optimizer.lr * factor**spec.lr_power:.4g}")
    settings: dict[str, Any] = {
        "optimizer.lr": lr,
        "training.global_batch_size": each * replicas,
        "training.local_batch_size": local,
        "lr_scheduler.warmup_steps": round(spec.warmup * steps),
    }
    keys = {f"model.args.{name}": size for name, size in sizes.items()} | settings
    flops = table.flops_per_token(seq_len) * tokens
    return Rung(f"dim={dim},tokens={ratio:g}x", dim, ratio, parameters, tokens, flops, steps, keys)
