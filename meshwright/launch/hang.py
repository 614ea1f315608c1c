"""Decides which rank the others wait for, from evidence about every rank. Free of torch."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from meshwright.launch.heartbeat import Beat
from meshwright.system.errors import in_ranges

STOPPED = "Tt"
"""States of /proc/PID/stat: by a signal, by a debugger."""

WAITS_IN = (("torch", "distributed/"), ("meshwright", "train/stop.py"), ("concurrent", "futures/"))
"""Packages, and the parts of them in whose functions a rank waits for others."""

FRAMES_SEEN = 4
"""Of the main thread, from the innermost, to see whether it waits for others."""

FRAME = re.compile(r'File "(?P<file>.*)", line \d+ in (?P<function>.*)')

THREAD = re.compile(r"[Tt]hread 0x")

MEANINGS = {
    "T": "stopped by a signal (SIGSTOP)",
    "t": "stopped by a debugger",
    "D": "in the kernel, as for a disk that does not answer",
    "R": "computing",
    "S": "asleep",
    "Z": "dead",
    "": "dead",
}


@dataclass(frozen=True)
class Evidence(Beat):
    """The last that is known of a rank."""

    host: str
    age_s: float
    """Seconds since it entered the phase."""
    state: str
    """Its letter in /proc/PID/stat; "" if the process is gone."""
    stacks: str
    collectives: str

    @property
    def frames(self) -> list[tuple[str, str]]:
        """File and function of the main thread's innermost frames; none if there are no stacks."""
        *_, last = THREAD.split(self.stacks)  # faulthandler writes the oldest, the main one, last
        found = [(match["file"], match["function"]) for match in FRAME.finditer(last)]
        return found[:FRAMES_SEEN]

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return bool(self.failed) or any(
            _is_part_of(*part, file) for file, _ in self.frames for part in WAITS_IN
        )


def _is_part_of(package: str, part: str, file: str) -> bool:
    """Return whether `file`, on any machine, is that part of the package: folders above a checkout
    may have the same names, but the rest of the path is then no file of the package."""
    spec = find_spec(package)
    _, found, rest = file.rpartition(f"/{package}/{part}")
    if not found or spec is None or spec.origin is None:
        return False
    return Path(spec.origin).parent.joinpath(part + rest).is_file()


def culprits(evidence: Sequence[Evidence]) -> list[Evidence]:
    """Return the ranks that the others wait for; none if that cannot be told."""
    by_weight = (
        [rank for rank in evidence if rank.state and rank.state in STOPPED],
        _behind(evidence),
        [rank for rank in evidence if rank.frames and not rank.waits],
        [rank for rank in evidence if rank.state == "D"],
    )
    return next((found for found in by_weight if 0 < len(found) < max(len(evidence), 2)), [])


def _behind(evidence: Sequence[Evidence]) -> list[Evidence]:
    counts = [rank.count for rank in evidence]
    return [rank for rank in evidence if rank.count == min(counts) < max(counts)]


def verdict(evidence: Sequence[Evidence], num_ranks: int, where: str) -> list[str]:
    """Return the message about a hang, the cause last.

    Args:
        num_ranks: of the whole job; the ones without evidence are on machines that do not answer.
        where: file with the stacks; "" if there is none.
    """
    silent = set(range(num_ranks)) - {rank.rank for rank in evidence}
    is_stopped = any(rank.state and rank.state in STOPPED for rank in evidence)
    if silent and not is_stopped:
        guilty = []
        are, of = ("hangs", "it") if len(silent) == 1 else ("hang", "them")
        cause = [f"{_ranks(silent)} {are}: nothing is heard of {of}"]
    elif guilty := culprits(evidence):
        cause = [f"rank {rank.rank} (on {rank.host}) hangs {_describe(rank)}" for rank in guilty]
    else:
        cause = ["ranks hang, and none is behind the others or does anything but wait"]
    others = [rank for rank in evidence if rank not in guilty]
    lines = [
        f"{_ranks(rank.rank for rank in others if rank.place == place)}: in {place}"
        for place in dict.fromkeys(rank.place for rank in others)
    ]
    if where:
        lines.append(f"stacks of all ranks: {where}")
    if limit := next((r for r in evidence if r.limit_key), None):
        lines.append(f"the limit on waiting: {limit.limit_key} = {limit.limit_s:g} s")
    return lines + cause


def _describe(rank: Evidence) -> str:
    meaning = MEANINGS.get(rank.state, rank.state)
    return f"in {rank.place}, entered {rank.age_s:.0f} s ago: {meaning}"


def _ranks(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    return f"rank{'s' * (len(ranks) > 1)} {in_ranges(ranks)}"


def report(evidence: Sequence[Evidence]) -> str:
    """Return everything known, as text: state, stacks and last collectives of every rank."""
    parts = []
    for rank in evidence:
        parts.append(f"rank {rank.rank} on {rank.host}: {_describe(rank)}")
        parts += [text for text in (rank.failed, rank.stacks, rank.collectives) if text]
        if not rank.stacks:
            parts.append("(it wrote no stacks)")
        parts.append("")
    return "\n".join(parts)
