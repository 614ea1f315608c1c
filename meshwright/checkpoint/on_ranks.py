"""Calls between the ranks of a job: one rank's answer for all, or the answers of all."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from meshwright.checkpoint.manifest import DamagedError
from meshwright.checkpoint.store import Readers
from meshwright.system.errors import ConfigError, StorageError

T = TypeVar("T")


class AllRanks(Readers):
    """All ranks of a job, whose `group` they talk by. Methods are collective, `own_part` apart.

    Args:
        group: its timeout has to be long enough for what is asked.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def on_first(self, ask: Callable[[], T]) -> T:
        """Call `ask` on the first rank alone; return its result, or raise its `ConfigError` or
        `StorageError`, on every rank."""
        answer: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                answer = [ask()]
            except (ConfigError, StorageError) as error:
                answer = [error]
        dist.broadcast_object_list(answer, src=0, group=self.group)
        if isinstance(answer[0], ConfigError | StorageError):
            raise answer[0]
        return answer[0]

    def on_every(self, ask: Callable[[], T]) -> list[T]:
        """Call `ask` on every rank; return all results, by rank, or raise the `ConfigError` or
        `StorageError` of one."""
        own: T | ConfigError | StorageError
        try:
            own = ask()
        except DamagedError as error:  # the first rank has seen it: deleted, or not shown here yet
            fix = "run the same command again"
            own = StorageError(f"{error.checkpoint}: {error.what}\n  fix: {fix}")
        except (ConfigError, StorageError) as error:
            own = error
        gathered = [own] * dist.get_world_size()
        dist.all_gather_object(gathered, own, group=self.group)
        results: list[T] = []
        for rank, answer in enumerate(gathered):
            if isinstance(answer, ConfigError):
                raise answer
            if isinstance(answer, StorageError):
                raise StorageError(f"rank {rank}: {answer}")
            results.append(answer)
        return results

    def own_part(self, files: Sequence[str]) -> Sequence[str]:
        """Return every n-th of `files`, which all ranks give in the same order."""
        return files[dist.get_rank() :: dist.get_world_size()]
