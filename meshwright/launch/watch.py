"""The launcher's thread that watches the ranks of its machine, and ends a job that hangs.

It names the rank that the others wait for, from evidence about every rank.
"""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from meshwright.launch.heartbeat import EXAMINE, LOOK_EVERY_S, STACKS_SIGNAL, Beat, read_beats
from meshwright.launch.node_files import TELL_S, NodeFiles
from meshwright.system.errors import ConfigError, in_ranges
from meshwright.system.files import state_of, text_of
from meshwright.system.log import logger
from meshwright.system.slurm import node_names

T = TypeVar("T")

ANSWER_S = 1.5
"""Seconds that ranks get to write their stacks and last collectives."""

WRITE_S = 3.0
"""Seconds to write the report."""

STUCK_S = 10.0
"""Seconds after a verdict in which torchrun ends, unless it waits for a store that is silent."""

SILENT_S = 20.0
"""Seconds at least after which a node that tells nothing is lost, however low the limit is."""

ABORTED = "Watchdog caught collective operation timeout"
"""NCCL's last words on stderr before it aborts a rank: torch, ProcessGroupNCCL.cpp."""

NEARLY = 0.8
"""Part of the limit that a rank has waited for at least, if it was ended because of it."""

WARN_AFTER_S = 3.0
"""Seconds beyond the limit: a timeout of the ranks' own, which says more, comes first."""

TAIL_BYTES = 2**16

STOPPED, GONE = ("T", "t"), ("", "Z")
"""States of /proc/PID/stat: by a signal or a debugger; ended."""

MEANINGS = {
    "T": "stopped by a signal (SIGSTOP)",
    "t": "stopped by a debugger",
    "D": "in the kernel, as for a disk that does not answer",
    "R": "computing",
    "S": "asleep",
    **dict.fromkeys(GONE, "dead"),
}

TORCH = str(Path(torch.__file__).parent)
"""Any folder, if it was built from source. A user may have a folder torch/distributed as well."""

WAITS_IN = re.compile(r"/meshwright/train/stop\.py$|/concurrent/futures/\w+\.py$")
"""Files in whose functions a rank waits for others, in addition to torch.distributed."""

FRAMES_SEEN = 4
"""Of the main thread, from the innermost, to see whether it waits for others."""

FRAME = re.compile(r'File "(?P<file>.*)", line \d+ in ')

THREAD = re.compile(r"[Tt]hread 0x")


@dataclass(frozen=True)
class Evidence(Beat):
    """The last that is known of a rank."""

    host: str
    age_s: float
    """Seconds since it entered the phase."""
    state: str
    """Its letter in /proc/PID/stat; "" if the process is gone."""
    stacks: str
    waits: bool
    """Whether its main thread waits for other ranks, or did until it failed; or has no stacks."""
    collectives: str

    def __str__(self) -> str:
        meaning = MEANINGS.get(self.state, self.state)
        return f"in {self.place}, entered {self.age_s:.0f} s ago: {meaning}"


def waits_for_others(stacks: str) -> bool:
    """Return whether the main thread is in a collective, or there are no stacks."""
    *_, last = THREAD.split(stacks)  # faulthandler writes the oldest, the main one, last
    files = FRAME.findall(last)[:FRAMES_SEEN]
    return not files or any(
        f.startswith(f"{TORCH}/distributed/") or WAITS_IN.search(f) for f in files
    )


def culprits(evidence: Sequence[Evidence]) -> list[Evidence]:
    """Return the ranks that the others wait for; none if that can't be told."""
    fewest = min((rank.count for rank in evidence), default=0)
    stopped = [rank for rank in evidence if rank.state in STOPPED]
    behind = [rank for rank in evidence if rank.count == fewest]
    busy = [rank for rank in evidence if not rank.waits]
    in_the_kernel = [rank for rank in evidence if rank.state == "D"]
    # the strongest evidence first; what is true of all ranks tells them apart no more
    for suspects in (stopped, behind, busy, in_the_kernel):
        if suspects and len(suspects) < len(evidence):
            return suspects
    # a rank alone has nobody to be compared with
    return [] if len(evidence) > 1 else stopped or busy or in_the_kernel


def verdict(
    evidence: Sequence[Evidence], num_ranks: int, where: str, *, is_shared: bool = True
) -> list[str]:
    """Return the message about a hang, the cause last.

    Args:
        num_ranks: of the whole job; the ones without evidence are on nodes that tell nothing.
        where: file with the stacks; "" if there is none.
        is_shared: whether nodes can read each other's evidence. If not, the verdict is about the
            ranks of this node.
    """
    silent = set(range(num_ranks)) - {rank.rank for rank in evidence}
    guilty = culprits(evidence)
    if silent and is_shared and not any(rank.state in STOPPED for rank in evidence):
        guilty = []
        answer = {rank.host.partition(".")[0] for rank in evidence}
        nodes = [name for name in node_names(os.environ) if name.partition(".")[0] not in answer]
        where_they_are = f" on {', '.join(nodes)}" if nodes else ""
        cause = [f"the job hangs, and nothing is heard of {_ranks(silent)}{where_they_are}"]
    elif guilty:
        cause = [f"rank {rank.rank} (on {rank.host}) hangs {rank}" for rank in guilty]
    else:
        cause = ["ranks hang, and none is behind the others or does anything but wait"]
    others = [rank for rank in evidence if rank not in guilty]
    lines = [
        f"{_ranks(rank.rank for rank in others if rank.place == place)}: in {place}"
        for place in dict.fromkeys(rank.place for rank in others)
    ]
    if not is_shared:
        lines.append(
            "the dump folder isn't shared, so only the ranks of this node are judged: "
            "compare the consoles of all nodes"
        )
    if where:
        lines.append(f"stacks of all ranks: {where}")
    if limit := next((r for r in evidence if r.limit_key), None):
        lines.append(f"the limit on waiting: {limit.limit_key} = {limit.limit_s:g} s")
    return lines + cause


def _ranks(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {in_ranges(ranks)}"


def report(evidence: Sequence[Evidence]) -> str:
    """Return everything known, as text: state, stacks and last collectives of every rank."""
    parts = []
    for rank in evidence:
        stacks = rank.stacks or "(it wrote no stacks)"
        texts = (f"rank {rank.rank} on {rank.host}: {rank}", rank.failed, stacks, rank.collectives)
        parts += [*filter(None, texts), ""]
    return "\n".join(parts)


class Watch:
    """A thread that looks at the heartbeats, and ends the ranks here if the job hangs.

    Attributes:
        verdict: lines about the hang, the cause last; None if there is none.
        started: seconds of the epoch.

    Args:
        folder: of the heartbeats.
        stderr: returns the file with the stderr of a rank, by its number on this machine.
        reports: returns the folder for the stacks.
        leave: ends this process, if torchrun doesn't after a verdict.
    """

    def __init__(
        self,
        folder: Path,
        stderr: Callable[[int], Path | None],
        reports: Callable[[], Path],
        leave: Callable[[], None],
    ) -> None:
        self.verdict: list[str] | None = None
        self.began = time.time()
        self._folder, self._stderr, self._reports, self._leave = folder, stderr, reports, leave
        self._stopped_s: dict[int, float] = {}
        self._warned: set[tuple[int, int]] = set()
        self._nodes: NodeFiles | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()  # a verdict under way is finished
        if self._nodes is not None and self.verdict is None:
            in_time(self._nodes.leave)

    def last_beat(self, rank: int) -> Beat | None:
        """Return the last beat of a rank; None if it wasn't on this machine, or is the only one."""
        return next((beat for beat in read_beats(self._folder) if beat.rank == rank), None)

    def _run(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            beats = read_beats(self._folder)
            if beats and self._is_hung(beats):
                self._conclude(beats)
                if not self._ended.wait(STUCK_S):
                    self._leave()
                return

    def _is_hung(self, beats: Sequence[Beat]) -> bool:
        now = time.monotonic()
        for beat in beats:
            state = state_of(beat.pid)
            # by the number of looks: if the whole job is stopped, there are none
            stopped_s = self._stopped_s.get(beat.rank, 0.0) + LOOK_EVERY_S
            self._stopped_s[beat.rank] = stopped_s if state in STOPPED else 0.0
            if beat.failed or self._stopped_s[beat.rank] >= beat.limit_s > 0:
                return True
            waited_s = now - beat.since
            if state in GONE and waited_s >= NEARLY * beat.limit_s > 0 and self._aborted(beat):
                return True
        self._warn(beats, now)
        return self._is_hung_elsewhere(beats[0])

    def _is_hung_elsewhere(self, beat: Beat) -> bool:
        """Return whether another node has found a hang, or is lost: without power it closes no
        connection, so the ranks would wait as long as the longest limit, an hour for a save."""
        if beat.facts["machines"] == 1:
            return False
        if self._nodes is None:
            facts = beat.facts
            self._nodes = NodeFiles(self._reports, facts["machine"], facts["machines"])
        is_lost = self._nodes.silent_s > max(beat.limit_s, SILENT_S)
        return self._nodes.is_hang_found or (is_lost and beat.limit_s > 0)

    def _aborted(self, beat: Beat) -> bool:
        path = self._stderr(beat.facts["local_rank"])
        return path is not None and ABORTED in tail(path)

    def _warn(self, beats: Sequence[Beat], now: float) -> None:
        """Name the ranks that don't wait for others though the limit is over.

        This doesn't prove a hang: a save may take longer, and so may a step without a collective.
        """
        late = [beat for beat in beats if now - beat.since - WARN_AFTER_S >= beat.limit_s > 0]
        new = {(beat.rank, beat.count) for beat in late} - self._warned
        if len(late) < len(beats) or not new:
            return
        self._warned |= new
        for rank in culprits(self._examine(beats)):
            logger.warning(
                "rank %d has been in %s for %.0f s, longer than %s; the others wait for it "
                "(its state: %s)",
                rank.rank,
                rank.place,
                rank.age_s,
                rank.limit_key,
                rank.state or "dead",
            )

    def _examine(self, beats: Sequence[Beat]) -> list[Evidence]:
        """Have the ranks here write their stacks and last collectives, and collect everything."""
        states = {beat.rank: state_of(beat.pid) for beat in beats}  # which the question may change
        with suppress(OSError):  # a full disk: there are stacks without the collectives
            (self._folder / EXAMINE).touch()
        for beat in beats:
            if not beat.failed:  # it has written them
                _kill(beat.pid, STACKS_SIGNAL)
        time.sleep(ANSWER_S)
        return [
            Evidence(
                **vars(beat),
                host=socket.gethostname(),
                age_s=time.monotonic() - beat.since,
                state=states[beat.rank],
                stacks=(stacks := text_of(self._folder / f"rank_{beat.rank}.stacks")),
                waits=bool(beat.failed) or waits_for_others(stacks),
                collectives=text_of(self._folder / f"rank_{beat.rank}.collectives"),
            )
            for beat in read_beats(self._folder)
        ]

    def _conclude(self, beats: Sequence[Beat]) -> None:
        evidence = self._examine(beats)
        is_shared = True
        if self._nodes is not None:
            exchange = partial(self._nodes.exchange, [asdict(rank) for rank in evidence])
            of_all = in_time(exchange, TELL_S + WRITE_S) or []
            of_all = sorted((Evidence(**rank) for rank in of_all), key=lambda rank: rank.rank)
            evidence, is_shared = of_all or evidence, self._nodes.is_shared
        facts = beats[0].facts
        name = f"hang_{facts['machine']}.txt"
        where = in_time(partial(self._write, name, report(evidence)), WRITE_S) or ""
        self.verdict = verdict(evidence, facts["world_size"], where, is_shared=is_shared)
        for beat in beats:
            _kill(beat.pid, signal.SIGKILL)

    def _write(self, name: str, text: str) -> str:
        path = self._reports() / name
        path.write_text(text, "utf-8")
        return str(path)


def tail(path: Path, size: int = TAIL_BYTES) -> str:
    """Return the end of a file of text."""
    with path.open("rb") as stream:
        stream.seek(max(path.stat().st_size - size, 0))
        return stream.read().decode("utf-8", "replace")


def _kill(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # gone; or its number is another user's
        os.kill(pid, number)


def in_time(call: Callable[[], T], seconds: float = WRITE_S) -> T | None:
    """Return `call()`; None if it fails or takes too long: the file system, or a machine, may be
    the cause of a hang."""
    results: list[T] = []

    def run() -> None:
        with suppress(OSError, ConfigError, RuntimeError):
            results.append(call())

    thread = threading.Thread(target=run, name="report", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
