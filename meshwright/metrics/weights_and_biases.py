"""A run at Weights & Biases (https://docs.wandb.ai)."""

import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.metrics.records import Record, Texts
from meshwright.system.errors import config_error

RUN_ID = "wandb_run_id"
"""File in the dump folder that names the run, so that a resumed job continues it."""


class WeightsAndBiases:
    """Sends records to a run, which a resumed job continues.

    W&B takes each step once, in rising order. A job that was killed resumes at its last checkpoint,
    so it trains some steps again that the run already has: the run keeps the figures that it has.
    Without a connection (WANDB_MODE=offline) the steps that the run has are not known, and a
    resumed job's part begins at its checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        *,
        project: str,
        entity: str,
        name: str,
        is_resumed: bool,
    ) -> None:
        """
        Args:
            folder: the job's dump folder.
            project, entity, name: as W&B means them; "": its own choice.

        Raises:
            ConfigError: if W&B refuses the run or cannot be reached.
        """
        import wandb  # an extra; preflight has made sure that it is there

        file = folder / RUN_ID
        if not (is_resumed and file.exists()):
            file.write_text(secrets.token_hex(4), "ascii")
        try:
            self._run = wandb.init(
                dir=str(folder),
                config=dict(config),
                project=project or None,
                entity=entity or None,
                name=name or None,
                id=file.read_text("ascii"),
                resume="allow",
                allow_val_change=True,  # a resume may change the config
            )
        except wandb.Error as error:
            fix = "wandb login, or set WANDB_MODE=offline"
            raise config_error("metrics.enable_wandb", True, str(error), fix) from None
        self._next_step = int(self._run.step)
        self._table = wandb.Table

    def write(self, record: Record) -> None:
        step = int(record["step"])
        if step >= self._next_step:
            self._run.log({k: v for k, v in record.items() if k != "step"}, step=step)

    def write_texts(self, step: int, texts: Texts) -> None:
        if step >= self._next_step:
            rows = [list(row) for row in texts.items()]
            table = self._table(columns=["prompt", "text"], data=rows)
            self._run.log({"validation/texts": table}, step=step)

    def close(self) -> None:
        # an error that ends the job is on its way: W&B shows the run as failed
        self._run.finish(exit_code=1 if sys.exception() else 0)
