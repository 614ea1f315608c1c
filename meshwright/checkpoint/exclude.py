"""The parts of a checkpoint that a resume leaves out. Free of torch."""

from meshwright.checkpoint.manifest import Manifest
from meshwright.config.job_config import Checkpoint

OPTIMIZER, DATALOADER = "optimizer", "dataloader"


def left_out(config: Checkpoint, manifest: Manifest) -> frozenset[str]:
    """Return the parts that `exclude_from_loading` leaves out of the checkpoint with `manifest`.

    It is left out once: a checkpoint saved by a job with the same exclusion has begun anew already,
    and a job that is started again and again would otherwise begin anew each time. Where
    `load_step` names the checkpoint, it is left out all the same.
    """
    wanted = frozenset(config.exclude_from_loading)
    if config.load_step != -1:
        return wanted
    if manifest.get("model_only"):  # there is none to load, whatever was saved with
        return wanted
    section = manifest["config"].get("checkpoint")
    before = section.get("exclude_from_loading") if isinstance(section, dict) else None
    return wanted.difference(before if isinstance(before, list) else ())
