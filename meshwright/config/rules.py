"""Rules of a config as rows of tables, judged as far as the facts are known. Free of torch.

A row that needs a fact is judged where that fact is known. So an editor, `meshwright check` on a
laptop, the launcher and the ranks judge the same tables, each with more facts than the one before.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Generic, NamedTuple, TypeVar

from meshwright.config.changes import shown
from meshwright.config.fields import value_of
from meshwright.config.job_config import JobConfig, Update
from meshwright.models.args import DecoderArgs
from meshwright.models.table import DecoderSpec
from meshwright.system.errors import ConfigError, Mistakes, config_error


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What decides about a job and isn't in its config; None: not known here."""

    world_size: int | None = None
    """Ranks of the job."""

    device_type: str | None = None
    """"cuda" or "cpu": the kind of device that the ranks train on."""

    device_memory_gib: float | None = None
    """Memory of the device that a rank trains on; where it isn't known, the config's counts."""

    has_float8: bool | None = None
    """Whether that device multiplies in float8."""

    model: DecoderArgs | None = None
    """Dimensions of the model."""

    expects_gpus: bool = False
    """Whether ranks train on GPUs, as far as is known here: it decides about "auto"."""

    slow_bf16: str = ""
    """Why this machine's CPU multiplies slowly in bfloat16; "": it doesn't."""

    no_compiler: str = ""
    """Why nothing can be compiled on this machine; "": nothing is known against it."""

    least_bytes: Mapping[str, float] | None = None
    """Memory that a rank surely needs on its device, by purpose, once the job is resolved."""

    missing_packages: frozenset[str] = frozenset()
    """Optional packages that aren't installed here."""

    @property
    def ranks(self) -> int:
        """The number of ranks, in a rule that needs it."""
        assert self.world_size is not None
        return self.world_size

    @property
    def spec(self) -> DecoderSpec:
        """The model, in a rule that needs it."""
        assert self.model is not None
        return self.model.table

    def has(self, names: str) -> bool:
        """Return whether facts are known, by their names, separated by blanks."""
        return all(getattr(self, name) is not None for name in names.split())


F = TypeVar("F", bound=Facts, contravariant=True)


@dataclass(frozen=True)
class Rule(Generic[F]):
    """A row of a table: a condition that no config may meet.

    `says` and `fix` are templates for `str.format`: `{training.steps}` is the value of a key,
    `{config.num_microbatches}` a property of the config, and `{detail}` the result of `broken`.
    """

    key: str
    """Dotted key that is at fault."""

    broken: Callable[[JobConfig, F], object]
    """Takes the config and the facts; a true result says that the rule is broken."""

    says: str
    """The rule, after `key = value: `."""

    fix: str = ""
    """What to do instead."""

    needs: str = ""
    """Names of the facts without which the rule can't be judged, separated by blanks."""

    def judge(self, config: JobConfig, facts: F) -> Iterator[ConfigError]:
        """Yield the error of a config that breaks the rule."""
        if detail := self.broken(config, facts):
            names = {"detail": detail, "config": config, **dict(config)}
            says, fix = self.says.format(**names), self.fix.format(**names)
            yield config_error(self.key, value_of(config, self.key), says, fix)


@dataclass(frozen=True)
class Check(Generic[F]):
    """A row whose key or messages are computed: a function that yields the errors."""

    judge: Callable[[JobConfig, F], Iterable[ConfigError]]
    needs: str = ""
    """As of a `Rule`."""


@dataclass(frozen=True)
class Idle(Generic[F]):
    """A row of a table: keys that have no effect next to others.

    They are reported, not rejected, because the same TOML may run on a different mesh.
    """

    keys: str
    """Dotted keys, separated by blanks."""

    when: Callable[[JobConfig, F], object]
    """Takes the config and the facts, and returns a true value where the keys have no effect."""

    why: str | Callable[[JobConfig], str]
    """The reason."""


class Choice(NamedTuple):
    """How "auto" or -1 is filled in."""

    update: Update = {}
    reason: str = ""
    """A line for the log, where the user may want to know why."""


Row = Rule[F] | Check[F] | Idle[F]


@cache
def _defaults() -> JobConfig:
    return JobConfig()


def is_given(config: JobConfig, key: str) -> bool:
    """Return whether the value of a key differs from its default."""
    return value_of(config, key) != value_of(_defaults(), key)


def given_while(
    key: str, when: Callable[[JobConfig, Facts], object], says: str, fix: str, needs: str = ""
) -> Rule[Facts]:
    """Return the row of a key that has to keep its default where `when` is true."""
    return Rule(key, lambda c, facts: is_given(c, key) and when(c, facts), says, fix, needs)


def idle_while(key: str, value: object, names: str) -> Idle[Facts]:
    """Return the row of `names`, keys of the section of `key` that do nothing at this `value`."""
    return Idle(_beside(key, names), lambda config, _: value_of(config, key) == value, _cause(key))


def idle_unless(key: str, value: object, names: str) -> Idle[Facts]:
    """Return the row of `names`, keys of the section of `key` that do nothing at another value."""
    return Idle(_beside(key, names), lambda config, _: value_of(config, key) != value, _cause(key))


def _beside(key: str, names: str) -> str:
    return " ".join(f"{key.split('.')[0]}.{name}" for name in names.split())


def _cause(key: str) -> Callable[[JobConfig], str]:
    return lambda config: f"{key} = {shown(value_of(config, key))}"


def broken_rules(config: JobConfig, facts: F, table: Iterable[Row[F]]) -> list[ConfigError]:
    """Return the errors of the rows of `table` that a config breaks, as far as the facts tell."""
    errors = list[ConfigError]()
    for row in table:
        if not isinstance(row, Idle) and facts.has(row.needs):
            errors += row.judge(config, facts)
    return errors


def check_rules(config: JobConfig, facts: F, table: Iterable[Row[F]]) -> None:
    """Raise `ConfigError` with the errors of `broken_rules` together, if there are some."""
    mistakes = Mistakes()
    mistakes.errors += broken_rules(config, facts, table)
    mistakes.check()


def idle_keys(config: JobConfig, facts: F, table: Iterable[Row[F]]) -> Iterator[str]:
    """Say which keys differ from their default and have no effect, each once, and why.

    Args:
        config: with every -1 filled in.
    """
    reasons = dict[str, str]()
    for row in table:
        if isinstance(row, Idle) and row.when(config, facts):
            for key in row.keys.split():
                reasons.setdefault(key, row.why if isinstance(row.why, str) else row.why(config))
    for key, why in reasons.items():
        if is_given(config, key):
            yield f"{key} = {shown(value_of(config, key))} has no effect: {why}"
