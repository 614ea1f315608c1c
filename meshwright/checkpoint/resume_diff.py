"""Compares a job with the one that saved its checkpoint: may it resume? Free of torch."""

import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from meshwright.checkpoint.manifest import DATALOADER, OPTIMIZER, Manifest, excluded_parts
from meshwright.config.changes import ABSENT, Difference, changes, config_defaults, shown, to_json
from meshwright.config.job_config import JobConfig
from meshwright.config.stages import SAID_BY_STAGES
from meshwright.models.args import DecoderArgs
from meshwright.system.errors import ConfigError, config_error
from meshwright.system.log import logger

MIXTURE_WEIGHT = re.compile(r"training\.datasets\.\d+\.weight")
"""Keys of the data that may change: earlier draws aren't made up for."""


@dataclass(frozen=True)
class ResumeDiff:
    """Differences between a job and the one that saved `checkpoint`."""

    checkpoint: Path
    config: JobConfig
    model: list[Difference]
    """The weights are of a different model."""
    data: list[Difference]
    """The place in the data is one in other data, or in a different order."""
    is_done: bool
    """There is nothing left to train: no step, or no data."""
    lacks_optimizer: bool
    """It holds the weights only, and there is something left to train."""
    trained_now: list[str]
    """Parameters that are frozen no longer, and have no optimizer state there."""
    is_reweighted: bool
    """The parts of a mixture have other weights."""
    changed: list[Difference]
    """Keys with other values, which don't prevent a resume."""
    has_other_code: bool
    """The user's own module differs from what it was."""

    def check(self) -> None:
        """Raise unless the job can resume from the checkpoint.

        Raises:
            ConfigError: naming every key that keeps it from that.
        """
        if self.lacks_optimizer:
            raise config_error(
                "training.steps",
                self.config.training.steps,
                f"checkpoint {self.checkpoint} holds the weights only: nothing resumes from that",
                "set checkpoint.load_step to an earlier step; or start with a fresh "
                'optimizer: checkpoint.exclude_from_loading = ["optimizer"]',
            )
        wrong = [
            (
                key,
                f"{key} = {shown(new)}",
                f"was saved with{'out' if old is ABSENT else ' ' + shown(old)}",
            )
            for key, old, new in (*self.model, *self.data)
        ]
        if self.trained_now:
            key, names = "model.frozen", ", ".join(self.trained_now[:3])
            how = f"has no optimizer state for what was frozen: {names}"
            wrong.append((key, f"{key} = {self.config.model.frozen!r}", how))
        if not wrong:
            return
        (key, what, how), *others = wrong
        lines = [f"{what}: checkpoint {self.checkpoint} {how}"]
        lines += [f"  {what}: it {how}" for _, what, how in others]
        if self.data:
            lines.append(
                "  its place in the data is valid only for the same samples in the same "
                "order: a resume would repeat some and skip others"
            )
        lines.append(
            f"  fix: use another job.dump_folder, or the values it was saved with{self._except}"
        )
        raise ConfigError(key, "\n".join(lines))

    @property
    def _except(self) -> str:
        """The other way out, if leaving out a part of the checkpoint is one."""
        begins = {}
        if self.data:
            begins[DATALOADER] = "the first sample"
        if self.trained_now:
            begins[OPTIMIZER] = "a fresh optimizer"
        if self.model or not begins:
            return ""
        names = sorted({*begins, *self.config.checkpoint.exclude_from_loading})
        way = f"checkpoint.exclude_from_loading = {json.dumps(names)}"
        if names == sorted(self.config.checkpoint.exclude_from_loading):
            way = "checkpoint.load_step to its step"  # for it has been left out once
        return f"; or set {way}, to start with {' and '.join(begins.values())}"

    def log(self, is_printed: bool = False) -> None:
        """Log the keys that were changed and don't prevent a resume, in one line.

        Args:
            is_printed: on the console, so that it is to go to the log's file only.
        """
        changes = [f"{key} = {shown(new)} (was {shown(old)})" for key, old, new in self.changed]
        if self.has_other_code:
            name = self.config.experimental.custom_import
            changes.append(f"experimental.custom_import = {name!r} (its code was edited)")
        if changes:
            words, extra = "resuming %s with changed keys: %s", {"is_printed": is_printed}
            logger.info(words, self.checkpoint.name, ", ".join(changes), extra=extra)


def find_resume_diff(
    manifest: Manifest,
    checkpoint: Path,
    config: JobConfig,
    args: DecoderArgs,
    data_identity: Mapping[str, object],
    frozen: Collection[str],
    own_code: str,
    *,
    begins_stage: bool = False,
) -> ResumeDiff:
    """Compare a job with the one that saved the checkpoint that `manifest` is of.

    Args:
        config: with every -1 filled in, as in the manifest.
        data_identity: everything, apart from the documents, that determines the sample stream.
        frozen: names of parameters.
        own_code: as the manifest's.
        begins_stage: the checkpoint ends the stage before, which may have had other data.
    """
    excluded, defaults = excluded_parts(config.checkpoint, manifest), config_defaults()
    of_stage = SAID_BY_STAGES if begins_stage else ()

    def changed(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[Difference]:
        return [d for d in changes(saved, here, defaults) if not d.key.startswith(of_stage)]

    model = [*_model_changes(manifest, config, args)]
    identity = changed(manifest["data_identity"], data_identity)
    weights = [difference for difference in identity if MIXTURE_WEIGHT.fullmatch(difference.key)]
    trained_now = sorted({*manifest["frozen"]} - {*frozen})
    of_config = changed(manifest["config"], to_json(config))
    keys = {difference.key for difference in of_config}
    of_data = identity if DATALOADER in excluded else weights
    is_done = config.training.steps <= manifest["step"] or (
        _data_has_ended(manifest, config) and not identity and DATALOADER not in excluded
    )
    return ResumeDiff(
        checkpoint=checkpoint,
        config=config,
        model=model,
        data=[difference for difference in identity if difference not in of_data],
        is_done=is_done,
        lacks_optimizer=OPTIMIZER not in excluded
        and bool(manifest.get("model_only"))
        and not is_done,
        trained_now=[] if OPTIMIZER in excluded else trained_now,
        is_reweighted=bool(weights),
        changed=of_config + [difference for difference in of_data if difference.key not in keys],
        has_other_code=bool(own_code and manifest["own_code"] not in ("", own_code)),
    )


def _data_has_ended(manifest: Manifest, config: JobConfig) -> bool:
    """Return whether the data of the saved job ended there, and would end there again."""
    if not manifest.get("data_ended"):
        return False
    saved, training = manifest["config"]["training"], config.training
    return all(saved[key] == getattr(training, key) for key in ("max_epochs", "global_batch_size"))


def _model_changes(manifest: Manifest, config: JobConfig, args: DecoderArgs) -> list[Difference]:
    prefix = "model.args."
    fields = dataclasses.fields(args)
    defaults = {prefix + f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    saved, here = _alike(manifest["model_args"], args)
    found = [*changes(_prefixed(saved, prefix), _prefixed(here, prefix), defaults)]
    if manifest["model_name"] != config.model.name:
        found.insert(0, Difference("model.name", manifest["model_name"], config.model.name))
    return found


def _alike(saved: Mapping[str, Any], args: DecoderArgs) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dimensions of both models, a dimension that one of them leaves to follow from
    others filled in."""
    there, here = dict(saved), dataclasses.asdict(args)
    try:
        filled = TypeAdapter(type(args)).validate_python(saved).resolved
    except ValidationError:  # of a different family, or version
        return there, here
    for name in [*here]:
        if (there.get(name) is None) != (here[name] is None):
            there[name], here[name] = (
                dataclasses.asdict(side)[name] for side in (filled, args.resolved)
            )
    return there, here


def _prefixed(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {prefix + name: value for name, value in table.items()}
