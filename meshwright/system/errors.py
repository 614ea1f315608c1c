"""Errors that a user can act on, and the exit code of a job. Free of torch.

docs/exit_codes.md has the codes for users.
"""

import itertools
import os
import re
import signal
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

EXIT_CONFIG = 2
EXIT_TRAINING = 3
EXIT_SAVE = 4
EXIT_DATA = 5
EXIT_HANG = 6
"""A rank stopped making progress, and the others waited for it until the limit."""

EXIT_SICK = 7
"""A rank computes wrongly: its GPU or its host is broken."""

EXIT_STOPPED = 75
"""The job was asked to stop before its last step: start it again, and it resumes. EX_TEMPFAIL of
<sysexits.h>."""

EXIT_INTERRUPTED = 130
"""By Ctrl-C, before there was anything to save, or for the second time: 128 + SIGINT."""

FIX = "\n  fix: "
"""Before the advice in a message."""

ADVICE_AFTER_ADVICE = re.compile(r"(\n  fix: .*)(\n  fix: .*)+")


def one_fix(message: str) -> str:
    """Return a message without advice that directly follows other advice: the first is the cause's,
    and the rest was added by code that knows less of it."""
    return ADVICE_AFTER_ADVICE.sub(r"\1", message)


class ConfigError(ValueError):
    """The configuration can't be run.

    In a job every rank raises it: before the first collective, unless the ranks must meet to find
    the fault.

    Args:
        key: dotted key of the config that is at fault ("" if there is none). It leads to the file
            and the line.
        message: the fault, then optionally a line `  fix: ...`.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(one_fix(message))
        self.key = key

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, str]]:
        """Exceptions are pickled by their message only; this one has to come from a worker."""
        return ConfigError, (self.key, str(self))


class UnknownKeyError(ConfigError):
    """The key itself is wrong, not its value."""


class CombinedConfigError(ConfigError):
    """Several mistakes, reported together."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        super().__init__("", "\n".join(map(str, errors)))
        self.errors = errors

    def __reduce__(self) -> tuple[Any, ...]:
        return CombinedConfigError, (self.errors,)


class Mistakes:
    """Run checks that don't need each other, and raise every fault at once."""

    def __init__(self) -> None:
        self.errors: list[ConfigError] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keep a `ConfigError` that is raised inside."""
        try:
            yield
        except CombinedConfigError as several:
            self.errors += several.errors
        except ConfigError as error:
            self.errors.append(error)

    def check(self) -> None:
        """Raise the faults found, if any."""
        # two checks may need the same thing, which is wrong once
        errors = list({(error.key, str(error)): error for error in self.errors}.values())
        if any(isinstance(error, UserModuleError) for error in errors):  # it may have the names
            errors = [error for error in errors if not isinstance(error, UnknownNameError)]
        if errors:
            raise errors[0] if len(errors) == 1 else CombinedConfigError(errors)


class UserModuleError(ConfigError):
    """The user's module can't be imported, or its tables are wrong."""


class UnknownNameError(ConfigError):
    """Neither our tables nor the user's module have a name that the config gives."""


class TrainingError(RuntimeError):
    """Training went wrong and can't continue. Raised on every rank."""


class SickRankError(TrainingError):
    """A rank computes wrongly, or has other weights than its replicas. Raised on every rank."""


class RecordError(ConfigError):
    """One record can't be made into tokens; `training.max_bad_records` may pass over it."""


class DataError(RuntimeError):
    """The data can't be read on. The last step is saved. Raised on every rank."""


class StorageError(DataError):
    """Files can't be read now, and may be good: nothing is given up for them. Start again."""

    has_waited = False
    """Whether they were read again after growing waits: no caller does that once more."""


class SaveError(RuntimeError):
    """A checkpoint couldn't be written, and the job must stop, or is over."""


class StopRequested(BaseException):
    """This rank is asked to stop while it has nothing to save; its text is the signal's name.

    No `Exception`: code that passes over errors doesn't take it.
    """


PASSED_ON = (KeyboardInterrupt, GeneratorExit, StopRequested)
"""They end called code without a fault of it. All else is a fault: SystemExit in a user's function
and a panic in Rust are no `Exception`, and would end a thread or a worker without a word."""

EXIT_CODES: dict[type[Exception], int] = {
    ConfigError: EXIT_CONFIG,
    TrainingError: EXIT_TRAINING,
    SickRankError: EXIT_SICK,
    SaveError: EXIT_SAVE,
    DataError: EXIT_DATA,
    StorageError: EXIT_DATA,
}
"""Exit codes of ranks that have reported why they end."""

BY_TORCHRUN = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""It ends the ranks that are left, by a signal that they may take time over."""

LOST_PEER = re.compile(
    r"gloo/transport\S* .*(closed|reset) by peer|gloo/transport\S* .*Broken pipe|ncclRemoteError"
    r"|remote process exited|Connection was likely closed"
)
"""Errors of a rank that another has left: gloo's, NCCL's, the store's."""


@dataclass(frozen=True)
class RankEnd:
    """A rank that didn't end with 0."""

    rank: int
    code: int
    """Its exit code; -n: signal n killed it."""
    when: float = 0.0
    """Seconds of the epoch."""
    has_lost_peer: bool = False
    """It failed because another rank, here or on another node, was gone."""


def code_of_request(name: str) -> int:
    """Return the exit code of a process that a signal asks to stop, and has nothing to save."""
    return EXIT_INTERRUPTED if name == signal.SIGINT.name else EXIT_STOPPED


def cause(ends: Sequence[RankEnd]) -> RankEnd:
    """Return the rank whose end explains the ends of the others."""
    kinds = dict.fromkeys(EXIT_CODES.values(), 0)
    # all ranks have agreed to stop, and the step is saved; or no rank can have taken a step without
    # this one. Errors of other ranks are of the connection to it
    kinds |= {EXIT_STOPPED: 1, EXIT_INTERRUPTED: 1}
    kinds |= dict.fromkeys(BY_TORCHRUN, 4)

    def suspicion(end: RankEnd) -> tuple[int, bool, float]:
        # others lose their connection to a rank that is killed, and may be noticed before it
        return kinds.get(end.code, 2 if end.code < 0 else 3), end.has_lost_peer, end.when

    return min(ends, key=suspicion)


def exit_code(ends: Sequence[RankEnd], asked: str = "", *, has_trained: bool) -> int:
    """Return the exit code of a job that doesn't hang.

    Args:
        ends: of the ranks that didn't end with 0.
        asked: the signal that asked the launcher to stop the job; "": none did.
        has_trained: the ranks have taken a step since the start.
    """
    code = cause(ends).code
    if code in (*EXIT_CODES.values(), EXIT_STOPPED, EXIT_INTERRUPTED):
        return code
    if asked and not has_trained:
        # nothing new is lost. Slurm signals every process of a job: ranks that are starting, and
        # compilers, whose end is an error of the rank
        return code_of_request(asked)
    return 128 - code if code < 0 else code


def check(ok: bool, key: str, value: object, rule: str, fix: str = "") -> None:
    """Raise `ConfigError` unless `ok`, naming the key, its value, the rule and the way out."""
    if not ok:
        raise config_error(key, value, rule, fix)


def config_error(key: str, value: object, rule: str, fix: str = "") -> ConfigError:
    """Return the error of a key whose value breaks `rule`."""
    return ConfigError(
        key, f"{key} = {as_toml(value)}: {rule}" + (f"\n  fix: {fix}" if fix else "")
    )


def as_toml(value: object) -> str:
    """Return a value as a TOML has it, where text may stand in single quotes as well."""
    if isinstance(value, list | tuple):
        return f"[{', '.join('absent' if one is None else as_toml(one) for one in value)}]"
    if isinstance(value, dict):
        # an absent key is the only word of TOML for None
        given = {_as_key(key): as_toml(one) for key, one in value.items() if one is not None}
        return f"{{{', '.join(f'{key} = {one}' for key, one in given.items())}}}"
    if isinstance(value, str) and "\\" in repr(value):  # TOML has other escapes
        import tomli_w  # here: little text needs it

        return tomli_w.dumps({"text": value})[7:-1]
    return repr(value).lower() if isinstance(value, bool) else repr(value)


def _as_key(key: object) -> str:
    return str(key) if re.fullmatch(r"[A-Za-z0-9_-]+", str(key)) else as_toml(str(key))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def shortened(value: object) -> str:
    text = as_toml(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def did_you_mean(wrong: str, valid: Iterable[str], alike: float = 0.75) -> str:
    """Return a hint for the name `wrong`: the nearest of `valid`, or all of them.

    Args:
        alike: least share of equal letters; below 0.75, guesses mislead.
    """
    valid = sorted(valid)
    near = [name for name in valid if name.lower() == wrong.lower()]
    near = near or get_close_matches(wrong, valid, n=1, cutoff=alike)
    near = near or [name for name in valid if name.lower().endswith(f"_{wrong.lower()}")]
    return f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(valid)}"


def where_it_ends(path: str | Path) -> str:
    """Return advice on a path that doesn't exist, or is no folder: a name that is near, or how far
    it exists."""
    path = Path(path).absolute()
    if path.exists():
        return f"name its folder: {path} is a file"
    parent = next(folder for folder in path.parents if os.path.exists(folder))
    name = path.relative_to(parent).parts[0]
    try:
        near = get_close_matches(name, [file.name for file in parent.iterdir()], n=1, cutoff=0.75)
    except OSError:  # a file, or a folder that may not be read
        near = []
    if near and near[0] != name:
        return f"did you mean {parent / near[0]}?"
    return f"check the path: {parent} exists, but holds no {name}"


def out_of_reach(path: str | Path) -> str:
    """Return why nobody can tell here whether `path` exists, or why this user can't read it, and
    then the fix; "" for a path that can be read, or that doesn't exist. A name like $HOME must
    exist: a job would make a folder called so."""
    if str(path).startswith("~"):
        return f"there is no user {Path(path).parts[0][1:]}\n  fix: write the folder itself"
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        if not any(part.startswith("$") for part in Path(path).parts):
            return ""
        return "variables are not replaced\n  fix: write the path itself"
    except PermissionError:
        parents = reversed(Path(path).absolute().parents)
        closed = next((p for p in parents if not os.access(p, os.X_OK)), path)
        return (
            f"permission denied\n  fix: choose a different path; this user may not enter {closed}"
        )
    except (OSError, ValueError) as error:  # a name too long; links in a circle; a zero byte
        reason = getattr(error, "strerror", None) or str(error)
        return f"{reason[0].lower()}{reason[1:]}\n  fix: choose a different path"
    if os.access(path, os.R_OK | (os.X_OK if is_folder else 0)):
        return ""
    return "permission denied\n  fix: choose a different path; this user may not read it"


def numbered(count: int, noun: str, ending: str = "s") -> str:
    """Return "1 rank", "2 ranks"."""
    return f"{count:,} {noun}{'' if count == 1 else ending}"


def in_ranges(ranks: Iterable[int]) -> str:
    """Ranks as a person would write them: "0-3, 7"."""
    parts = []
    # in a run of successive numbers, number and place differ by the same
    for _, run in itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        numbers = [rank for _, rank in run]
        parts.append(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]))
    return ", ".join(parts)
