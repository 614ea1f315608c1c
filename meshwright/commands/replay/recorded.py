"""What a run has recorded of its steps, and the config to take one of them again. Free of torch."""

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.checkpoint import integrity, listing
from meshwright.checkpoint.integrity import being_read
from meshwright.checkpoint.manifest import DamagedError, excluded_parts
from meshwright.config.changes import from_json
from meshwright.config.fields import Key
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import read, to_toml, with_lines
from meshwright.metrics.report.run import Row, Run, read_run, rows_of
from meshwright.parallelisms.rules.degrees import DEGREES
from meshwright.system.errors import ConfigError, as_toml, check

STEPS_FILE = "steps.jsonl"


@dataclass(frozen=True)
class RecordedRun:
    """A run, with its exact record of steps."""

    run: Run
    steps: Mapping[int, Row]
    """Lines of `STEPS_FILE`, by step; of an older run its metrics, without norms of groups."""

    @property
    def folder(self) -> Path:
        """Its dump folder."""
        return self.run.folder

    @cached_property
    def groups(self) -> list[str]:
        """The names of groups of parameters, in the order of the record."""
        return list(self.steps.get(0, {}).get("groups", []))

    def start_of(self, step: int) -> Row:
        """Return the start of the process that took `step`."""
        starts = [row for row in self.run.starts if row["step"] < step]
        rule, fix = "its history.jsonl has no start before that step", "name a later step"
        check(bool(starts), "--step", step, rule, fix)
        return starts[-1]

    def checkpoint_folder(self, start: Row) -> Path:
        """Return where the process of `start` kept its checkpoints."""
        return self.folder / start["config"]["checkpoint"]["folder"]

    def checkpoint_before(self, step: int) -> int:
        """Return the step of the nearest checkpoint before `step`; 0: the initial weights."""
        start = self.start_of(step)
        saved = listing.saved_steps(self.checkpoint_folder(start))
        nearest = max((one for one in saved if one < step), default=0)
        begin = next(
            (row["step"] for row in self.run.starts if row.get("stage") == _stage(start)), 0
        )
        rule = (
            f"no checkpoint of stage {_stage(start)}, which starts after step {begin}, is before it"
        )
        check(nearest >= begin, "--step", step, rule, "keep more checkpoints (keep_latest_k)")
        return nearest

    def _excluded(self, start: Row, checkpoint: int) -> list[str]:
        """Return the parts of a checkpoint that the process of `start` left out, if it began with
        that one."""
        if checkpoint == 0 or checkpoint != start["step"]:
            return []
        manifest = integrity.inspect(listing.step_folder(self.checkpoint_folder(start), checkpoint))
        config = JobConfig.model_validate(from_json(start["config"]))
        return sorted(excluded_parts(config.checkpoint, manifest))

    def config(
        self, step: int, checkpoint: int, ranks: int, given: Namespace, folder: Path
    ) -> JobConfig:
        """Return the config of a job that reads `checkpoint` and takes the steps up to `step` again
        on some `ranks`, without writing to the run.

        Args:
            given: the command line: `overrides` has keys of the user's; `scan`: weights suffice.
            folder: for its own files.

        Raises:
            ConfigError: if a key of the user's is wrong, with its line.
        """
        start = self.start_of(step)
        is_early = start["config"]["optimizer"]["early_step_in_backward"]
        file = self.folder / "config.toml"
        if _stage(start) == 1 and not self.run.config.get("training", {}).get("stages"):
            # as it was at that start, for a resume may have changed keys since
            file = folder / "recorded.toml"
            file.write_text(to_toml(JobConfig.model_validate(from_json(start["config"]))), "utf-8")
        overrides = {
            **_of_record(start["config"]),
            **_without_traces(folder, self.checkpoint_folder(start), checkpoint, is_early),
            ("checkpoint", "exclude_from_loading"): json.dumps(self._excluded(start, checkpoint)),
            **of_mesh(start, ranks),
            **(_of_scan(start["config"], step) if given.scan else {}),
            **given.overrides,
        }
        words = Namespace(config=str(file), overrides=overrides)
        try:
            return read(words).config()
        except ConfigError as error:
            raise with_lines(error, words) from None


@contextmanager
def held(checkpoint: Path) -> Iterator[None]:
    """Keep a job that runs from deleting a checkpoint; raise `ConfigError` if it's gone."""
    with ExitStack() as stack:
        try:
            stack.enter_context(being_read(checkpoint))
        except DamagedError as error:
            fix = "run the same command again: it takes a different one"
            raise ConfigError("", f"{checkpoint}: {error.what}\n  fix: {fix}") from None
        yield


def read_recorded(folder: Path) -> RecordedRun:
    """Read a dump folder; raise `ConfigError` if it holds no run with a history."""
    run = read_run(folder)
    rule, fix = "has no history of its starts", "name the job.dump_folder of a run"
    check(bool(run.starts) and "config" in run.starts[-1], "RUN", str(folder), rule, fix)
    steps: dict[int, Row] = {row["step"]: _of_metrics(row) for row in run.records}
    steps |= {row["step"]: row for row in rows_of(folder / STEPS_FILE)}
    return RecordedRun(run, steps)


def _of_metrics(row: Row) -> Row:
    names = {"loss/train": "loss", "optim/grad_norm": "grad_norm"}
    return {"step": row["step"]} | {new: row[old] for old, new in names.items() if old in row}


def _stage(start: Row) -> int:
    return int(start.get("stage", 1))


def _of_record(config: Mapping[str, Any]) -> dict[Key, str]:
    """Return the keys that a config may leave open and that decide about numbers, as the job had
    them: another node or mesh would fill them in otherwise."""
    keys = ("global_batch_size", "mixed_precision_param")
    return {("training", key): str(config["training"][key]) for key in keys}


def _without_traces(
    folder: Path, checkpoints: Path, checkpoint: int, is_early: bool
) -> dict[Key, str]:
    """Return the keys with which a job reads a checkpoint of a run, and writes to `folder`.

    Args:
        is_early: gradients are gone before norms of groups could be taken.
    """
    if checkpoint == 0:  # it finds none, and starts with the initial weights
        checkpoints = folder / "without"
    return {
        ("job", "dump_folder"): str(folder / "replay"),
        ("job", "max_run_seconds"): "0",
        ("checkpoint", "folder"): str(checkpoints.absolute()),
        ("checkpoint", "enable"): "true",
        ("checkpoint", "load_step"): str(checkpoint or -1),
        ("checkpoint", "rewind_to"): "-1",
        ("checkpoint", "keep_best"): "false",
        ("validation", "enable"): "false",
        ("sentry", "interval"): "0",
        ("metrics", "grad_norm_by_group"): str(not is_early).lower(),
        ("metrics", "layer_stats_freq"): "0",
        ("profiling", "enable_profiling"): "false",
        ("profiling", "enable_memory_snapshot"): "false",
        ("metrics", "enable_tensorboard"): "false",
        ("metrics", "enable_wandb"): "false",
    }


def _of_scan(config: Mapping[str, Any], step: int) -> dict[Key, str]:
    """Return the keys with which a job loads weights only, and doesn't find that it has no step
    left before `step`, or no data."""
    keys: dict[Key, str] = {
        ("checkpoint", "exclude_from_loading"): '["optimizer", "dataloader"]',
        ("training", "steps"): str(max(config["training"]["steps"], step)),
    }
    if total_steps := config["lr_scheduler"]["total_steps"]:
        keys["lr_scheduler", "total_steps"] = str(max(total_steps, step))
    return keys


def of_mesh(start: Row, ranks: int) -> dict[Key, str]:
    """Return the keys of the mesh to replay on: on as many ranks as the run had, its own.

    On one process nothing is compiled, unless the run was one: that takes longer than the steps, as
    a rule, and other kernels round otherwise anyway.
    """
    if ranks == start.get("ranks"):
        keys = [("compile", "enable"), ("parallelism", "fsdp_reduce_gradients")]
        # as the command line has them
        return {(name, key): as_toml(start["config"][name][key]).strip("'") for name, key in keys}
    if ranks == 1:
        degrees: dict[Key, str] = {("parallelism", key): "1" for key in DEGREES.values()}
        return degrees | {("compile", "enable"): "false"}
    return {("parallelism", "data_parallel_shard_degree"): "-1"}
