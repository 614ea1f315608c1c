"""Decides the exit code of a job from how its ranks ended and whether it was asked to stop.

Free of torch. docs/configuration.md has the codes for users.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.system.errors import EXIT_CODES, EXIT_HANG, EXIT_INTERRUPTED, EXIT_STOPPED

OWN_CODES = tuple(EXIT_CODES.values())
"""Exit codes whose cause the ranks have reported themselves."""

BY_TORCHRUN = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""It ends the ranks that are left, by a signal that they may take time over."""

LOST_PEER = re.compile(
    r"gloo/transport\S* .*(closed|reset) by peer|gloo/transport\S* .*Broken pipe|ncclRemoteError"
    r"|remote process exited|Connection was likely closed"
)
"""Errors of a rank that another one has left: gloo's, NCCL's, the store's."""


@dataclass(frozen=True)
class RankEnd:
    """A rank that did not end with 0."""

    rank: int
    code: int
    """Its exit code; -n: signal n killed it."""
    when: float = 0.0
    """Seconds of the epoch."""
    has_lost_peer: bool = False
    """It failed because another rank, here or on another machine, was gone."""


def code_of_request(name: str) -> int:
    """Return the exit code of a process that a signal asks to stop, and has nothing to save."""
    return EXIT_INTERRUPTED if name == signal.SIGINT.name else EXIT_STOPPED


def cause(ends: Sequence[RankEnd]) -> RankEnd:
    """Return the rank whose end explains the ends of the others."""
    kinds = dict.fromkeys(OWN_CODES, 0)
    # all ranks have agreed to stop, and the step is saved; or no rank can have taken a step without
    # this one. Errors of other ranks are of the connection to it
    kinds |= {EXIT_STOPPED: 1, EXIT_INTERRUPTED: 1}
    kinds |= dict.fromkeys(BY_TORCHRUN, 4)

    def suspicion(end: RankEnd) -> tuple[int, bool, float]:
        # others lose their connection to a rank that is killed, and may be noticed before it
        return kinds.get(end.code, 2 if end.code < 0 else 3), end.has_lost_peer, end.when

    return min(ends, key=suspicion)


def exit_code(
    ends: Sequence[RankEnd], asked: str = "", *, has_trained: bool, is_hung: bool = False
) -> int:
    """Return the exit code of a job.

    Args:
        ends: ranks that did not end with 0.
        asked: the signal that asked the launcher to stop the job; "": none did.
        has_trained: the ranks have taken a step since the start.
        is_hung: the launcher has ended the ranks because one hangs.
    """
    if is_hung:
        return EXIT_HANG
    if not ends:
        return 0
    code = cause(ends).code
    if code in (*OWN_CODES, EXIT_STOPPED, EXIT_INTERRUPTED):
        return code
    if asked and not has_trained:
        # nothing new is lost. Slurm signals every process of a job: ranks that are starting, and
        # compilers, whose end is an error of the rank
        return code_of_request(asked)
    return 128 - code if code < 0 else code
