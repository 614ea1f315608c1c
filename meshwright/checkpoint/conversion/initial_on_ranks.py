"""The folder that a job starts from, agreed on by its ranks, verified and held while they read."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from meshwright.checkpoint.commit import being_read
from meshwright.checkpoint.conversion.initial_load import LOAD_KEY, InitialWeights, find_initial
from meshwright.checkpoint.manifest import DamagedError
from meshwright.checkpoint.on_ranks import on_every_rank, on_first_rank, verify_on_ranks
from meshwright.config.job_config import Checkpoint
from meshwright.system.log import logger

READING_TIMEOUT = timedelta(hours=1)


@contextmanager
def open_initial(config: Checkpoint) -> Iterator[InitialWeights]:
    """Give the folder to start from. The first rank chooses it.

    Of a checkpoint of ours every byte is compared with its checksum, a part of the files on each
    rank, and no retention deletes it meanwhile. In a folder of several it is the newest good one.
    Other formats have no checksums. Collective: every rank must call it.

    Raises:
        ConfigError: on every rank, if there is none, or the one that is named is damaged, or all.
    """
    group = dist.new_group(backend="gloo", timeout=READING_TIMEOUT)
    try:
        with ExitStack() as held:
            yield _select(config, group, held)
    finally:
        dist.destroy_process_group(group)


def _select(config: Checkpoint, group: dist.ProcessGroup, held: ExitStack) -> InitialWeights:
    """Choose and verify; the checkpoint returned is held until `held` ends."""
    damaged: dict[Path, str] = {}
    while True:
        initial = on_first_rank(partial(find_initial, config, damaged), group)
        path, manifest = initial.place.path, initial.manifest
        if manifest is None:
            return initial
        wrong = _hold_on_ranks(path, held, group)
        wrong = wrong or verify_on_ranks(path, manifest, group)
        if not wrong:
            return initial
        held.close()
        damaged[path] = wrong
        if dist.get_rank() == 0:
            logger.warning("%s: passed over %s, which is damaged: %s", LOAD_KEY, path, wrong)


def _hold_on_ranks(path: Path, held: ExitStack, group: dist.ProcessGroup) -> str:
    """Hold the checkpoint; return the first error that prevents it on a rank, or ""."""

    def hold() -> str:
        try:
            held.enter_context(being_read(path))
        except DamagedError as error:
            return error.what
        return ""

    problems = on_every_rank(hold, group)
    each = (f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem)
    return next(each, "")
