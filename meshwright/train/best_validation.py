"""The best validation of a run: its step, its loss, and the checkpoint that is kept of it."""

from collections.abc import Sequence

from meshwright.checkpoint.manifest import Manifest
from meshwright.config.changes import changes, config_defaults, to_json
from meshwright.config.job_config import Checkpoint
from meshwright.config.training import Source
from meshwright.datasets.stream import OpenSource
from meshwright.metrics.observers import Observer
from meshwright.metrics.sinks import Record, validation_loss
from meshwright.system.log import logger
from meshwright.train.resolve import ResolvedJob


class BestValidation(Observer):
    """Knows the step with the lowest validation loss, and has it saved for `checkpoint.keep_best`.

    Attributes:
        best: that step and its loss; None: there was no validation yet.
    """

    def __init__(self, config: Checkpoint) -> None:
        self._saves = config.saves and config.keep_best
        self.best: tuple[int, float] | None = None

    def on_report(self, record: Record) -> None:
        loss = validation_loss(record)
        if loss is not None and (self.best is None or loss < self.best[1]):
            self.best = int(record["step"]), loss

    def wants_save(self, step: int) -> bool:
        return self._saves and self.best is not None and self.best[0] == step

    def state_dict(self) -> tuple[int, float] | None:
        return self.best

    def load_state_dict(self, state: tuple[int, float]) -> None:
        self.best = state


VALIDATED_ON = {
    *(f"validation.{key}" for key in (*Source.model_fields, "datasets", "num_samples")),
    "training.seq_len",
    "training.mask_documents",
}
"""Keys whose change makes losses of validations incomparable, in addition to the tokenizer."""


def best_of(
    saved: Manifest, resolved: ResolvedJob, validation_sources: Sequence[OpenSource]
) -> tuple[int, float] | None:
    """Return the best validation that a checkpoint knows of; None if it was of other data: no
    loss of this job compares with it."""
    if saved["best_validation"] is None:
        return None
    step, loss = saved["best_validation"]
    changed = changes(saved["config"], to_json(resolved.config), config_defaults())
    differ = {".".join(key.split(".")[:2]) for key, _, _ in changed} & VALIDATED_ON
    tokenizer = "model.tokenizer_path"
    if saved["data_identity"].get(tokenizer) != resolved.data_identity[tokenizer]:
        differ.add(tokenizer)
    now = {source.entry.name: source.content for source in validation_sources}
    if not differ and validation_sources and now != saved["validation_content"]:
        differ.add("content of the validation data")
    if not differ:
        return int(step), loss
    words = "the best validation loss so far, %.4f at step %d, no longer counts: it was measured "
    logger.info(words + "with other %s", loss, step, ", ".join(sorted(differ)))
    return None
