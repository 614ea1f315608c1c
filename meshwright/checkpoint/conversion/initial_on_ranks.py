"""The folder that a job starts from, agreed on by its ranks, verified and held while they read."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from meshwright.checkpoint.conversion.initial_load import LOAD_KEY, InitialWeights, find_initial
from meshwright.checkpoint.find import find_checkpoint
from meshwright.checkpoint.on_ranks import on_first_rank, select_on_ranks
from meshwright.config.job_config import Checkpoint
from meshwright.system.files import Place

READING_TIMEOUT = timedelta(hours=1)


@contextmanager
def open_initial(config: Checkpoint) -> Iterator[InitialWeights]:
    """Give the folder to start from. The first rank chooses it.

    A checkpoint of ours is selected as for a resume, in a folder of several the newest good one,
    and held meanwhile. Other formats have no checksums. Collective: every rank must call it.

    Raises:
        ConfigError: on every rank, if there is none, or the one that is named is damaged, or all.
    """
    group = dist.new_group(backend="gloo", timeout=READING_TIMEOUT)
    try:
        with ExitStack() as held:
            initial = on_first_rank(partial(find_initial, config), group)
            if initial.manifest is not None:
                named = Place(LOAD_KEY, Path(config.initial_load_path))
                choice = select_on_ranks(partial(find_checkpoint, named), group, held)
                assert choice is not None  # `find_initial` has found one
                place = Place(LOAD_KEY, choice.path)
                initial = initial._replace(place=place, manifest=choice.manifest)
            yield initial
    finally:
        dist.destroy_process_group(group)
