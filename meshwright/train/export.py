"""The model folder that a finished job leaves for Hugging Face's libraries."""

from importlib import import_module
from pathlib import Path

import torch

from meshwright.checkpoint.find import open_checkpoint
from meshwright.config.job_config import JobConfig
from meshwright.system.errors import ConfigError, SaveError
from meshwright.system.files import Place
from meshwright.system.log import logger
from meshwright.train.preflight import Plan

MAX_SHARD_BYTES = 5 * 10**9


def prepare_export(config: JobConfig) -> None:
    """Import what `export_last` will need, if it is asked for: files may change during the job."""
    if config.checkpoint.last_save_in_hf:
        import_module("meshwright.checkpoint.conversion.export")
        import_module("meshwright.checkpoint.conversion.export_job")


def is_exported(config: JobConfig) -> bool:
    """Return whether the job ends with an export."""
    # with load_only nothing was saved
    checkpoint = config.checkpoint
    return checkpoint.enable and checkpoint.last_save_in_hf and not checkpoint.load_only


def export_last(plan: Plan) -> None:
    """Export the newest checkpoint to {dump_folder}/hf, as `checkpoint.last_save_in_hf` asks.

    To be called by one rank, when no other needs it any longer. Does nothing if the folder is
    there already.

    Raises:
        SaveError: if it cannot be written, or is not what was saved.
    """
    try:
        _export_newest(plan)
    except ConfigError as error:
        raise SaveError(f"the checkpoint is saved, but not as a model folder: {error}") from None


def _export_newest(plan: Plan) -> None:
    # not above: other jobs would import them before their first step
    from meshwright.checkpoint.conversion.export import export
    from meshwright.checkpoint.conversion.export_job import export_job, tokenizer_files

    config = plan.config
    place = Place("checkpoint.last_save_in_hf", plan.checkpoint_folder)
    with open_checkpoint(place, logger.warning) as (found, manifest):
        out = Path(config.job.dump_folder).absolute() / "hf" / found.path.name
        if out.exists():
            return
        job = export_job(
            found,
            manifest,
            plan.spec,
            plan.tokenizer,
            tokenizer_files(plan.tokenizer, config.model.tokenizer_path),
            dtype=getattr(torch, config.checkpoint.export_dtype),
            max_shard_bytes=MAX_SHARD_BYTES,
        )
        export(job, out, logger.info)
