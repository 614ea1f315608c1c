"""Has the first rank decide for all, and all ranks verify a checkpoint together."""

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from meshwright.checkpoint import commit, lease
from meshwright.checkpoint.commit import being_read
from meshwright.checkpoint.find import Choice, select
from meshwright.checkpoint.manifest import DamagedError, Manifest
from meshwright.system.errors import ConfigError, StorageError, in_ranges
from meshwright.system.files import NamedPath
from meshwright.system.log import logger

T = TypeVar("T")


def on_first_rank(ask: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Call `ask` on the first rank alone; return its result, or raise its `ConfigError` or
    `StorageError`, on every rank. Collective over `group`, which is the whole job."""
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [ask()]
        except (ConfigError, StorageError) as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0, group=group)
    if isinstance(answer[0], ConfigError | StorageError):
        raise answer[0]
    return answer[0]


def select_on_ranks(
    candidates: Callable[[], tuple[NamedPath, list[Path]]],
    group: dist.ProcessGroup,
    held: ExitStack,
    *,
    is_read: bool = True,
) -> Choice | None:
    """Return the first good one of the `candidates`, as `select` does, of which every byte that its
    manifest names was compared with its checksum if `is_read`: each rank reads a part of the files.

    A damaged one is named in the log. Collective over `group`, which is the whole job.

    Args:
        candidates: is called on the first rank, for what `select` takes.
        group: its timeout has to be long enough for a rank's part of the files.
        held: until it ends, no retention deletes the checkpoint.

    Raises:
        ConfigError: on every rank, if `candidates` does, or all are damaged.
        StorageError: on every rank, if one of them can't read its part now.
    """

    def judge(path: Path) -> Manifest:
        manifest = on_first_rank(partial(commit.inspect, path), group)
        by_rank = on_every_rank(partial(_verify, path, manifest, held, is_read), group)
        if wrong := [what for of_rank in by_rank for what in of_rank]:
            held.close()
            raise DamagedError(path, "; ".join(wrong))
        return manifest

    choice = select(*on_first_rank(candidates, group), judge)
    if choice is not None and dist.get_rank() == 0:
        for path, what in choice.passed_over.items():
            logger.warning("skipped %s, which is damaged: %s", path, what)
    return choice


def _verify(path: Path, manifest: Manifest, held: ExitStack, is_read: bool) -> list[str]:
    """Hold the checkpoint, and return the damage in this rank's part of its files."""
    mine = sorted(manifest["files"])[dist.get_rank() :: dist.get_world_size()]
    try:
        held.enter_context(being_read(path))
    except DamagedError as error:  # the first rank has seen it: deleted, or not shown here yet
        fix = "run the same command again"
        raise StorageError(f"{path}: {error.what}\n  fix: {fix}") from None
    return commit.verify(path, manifest, mine) if is_read else []


def on_every_rank(ask: Callable[[], T], group: dist.ProcessGroup) -> list[T]:
    """Call `ask` on every rank; return all results, by rank, or raise the `ConfigError` or
    `StorageError` of one. Collective, as `on_first_rank`."""
    own: T | ConfigError | StorageError
    try:
        own = ask()
    except (ConfigError, StorageError) as error:
        own = error
    gathered = [own] * dist.get_world_size()
    dist.all_gather_object(gathered, own, group=group)
    results: list[T] = []
    for rank, answer in enumerate(gathered):
        if isinstance(answer, ConfigError):
            raise answer
        if isinstance(answer, StorageError):
            raise StorageError(f"rank {rank}: {answer}")
        results.append(answer)
    return results


SEEN_WITHIN_S = 10.0
"""Seconds that a rank looks for the file. Network file systems show a new one late."""


def check_shared(folder: Path, nonce: str, group: dist.ProcessGroup) -> None:
    """Raise `ConfigError` on every rank if one doesn't see the lease on `folder` that the first
    rank has taken, with `nonce`. Collective over `group`, which is the whole job."""

    def find_blind_host() -> str:
        end = time.monotonic() + SEEN_WITHIN_S
        while not lease.holds(folder, nonce):
            if time.monotonic() > end:
                return socket.gethostname()
            time.sleep(0.2)
        return ""

    hosts = on_every_rank(find_blind_host, group)
    blind = [rank for rank, host in enumerate(hosts) if host]
    NamedPath("job.dump_folder", folder).check(
        not blind,
        f"rank {in_ranges(blind)} (on {', '.join(sorted({*hosts} - {''}))}) does not see what "
        "rank 0 writes there",
        "name a folder on a file system that all nodes share",
    )
