"""Arms that branch off: they start from a checkpoint of their reference's run of the same seed."""

import math
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli

from meshwright.checkpoint.commit import step_folder
from meshwright.checkpoint.manifest import NO_JOB
from meshwright.commands.experiment.registry import Arm, Experiment
from meshwright.commands.experiment.results import LAST_QUARTER, RESULT, Key, folder_of
from meshwright.commands.experiment.spec import Document, Values
from meshwright.config.changes import to_json
from meshwright.system.errors import ConfigError, check, numbered
from meshwright.system.files import text_of
from meshwright.train.facts import Saved
from meshwright.train.resolve import ResolvedJob, resume_from

CHECKPOINTS = "checkpoint"
"""Folder of the checkpoints in each dump folder."""

KEPT = ("checkpoint.interval", "checkpoint.keep_every_n_steps")
"""Keys that decide which checkpoints there are when a run is over."""

MOST_CHECKPOINTS = 50
"""That a run saves and keeps for branches without being asked to."""


def check_branch(
    document: Document,
    experiment: Experiment,
    place: str,
    arm: Arm,
    reference: Arm,
    others: Iterable[Arm],
) -> None:
    """Check that the runs of the reference have the checkpoint that an arm starts from.

    Args:
        others: all arms before this one.

    Raises:
        ConfigError: if they won't have it, or the arm couldn't be judged.
    """
    key, spec = f"{place}.from", document.spec
    rule = "a branch needs a budget in steps or tokens: seconds become steps when the base is timed"
    check(not spec.budget.seconds, key, arm.branch, rule, "write budget = {steps = ...}")
    rule = "a screening doesn't train the base, so there is nothing to start from"
    check(spec.screen is None or arm.is_added, key, arm.branch, rule, "leave out [screen] or from")
    most = int(LAST_QUARTER * experiment.steps_of(reference))
    rule = f"must be at most {most}, where the validations that judge a run start"
    check(arm.branch <= most, key, arm.branch, rule, f"write from = {most}")
    for name in KEPT:
        every = spec.common.get(name)
        is_kept = every is None or (type(every) is int and every > 0 and arm.branch % every == 0)
        rule = f"must be a multiple of {name} = {every} in [common]"
        check(is_kept, key, arm.branch, rule, "leave that key out: what is needed is kept then")
    every = math.gcd(arm.branch, *(one.branch for one in others if one.on == arm.on))
    count = experiment.steps_of(reference) // every
    is_own = any(name in spec.common for name in KEPT)
    rule = f"each run of {arm.on} would save {count} checkpoints, one every "
    rule += f"{numbered(every, 'step')}, the greatest common divisor of its branches"
    fix = "choose others, which have a larger one, or set checkpoint.interval in [common]"
    check(is_own or count <= MOST_CHECKPOINTS, key, arm.branch, rule, fix)
    for folder in sorted((document.folder / reference.name).glob("seed-*")):
        path = step_folder(folder / CHECKPOINTS, arm.branch)
        is_over = (folder / RESULT).exists()
        if path.is_dir() or not (is_over or (folder / "config.toml").exists()):
            continue
        rule, fix = f"{path} is not there, and that run is over", "leave from out"
        if not is_over:
            saves = tomli.loads(text_of(folder / "config.toml"))["checkpoint"]
            kept = math.lcm(saves["interval"], saves["keep_every_n_steps"])
            rule = f"{folder} is being trained, and keeps no checkpoint of that step"
            fix = f"write from = {kept}, or a multiple" if kept else fix
            if kept and arm.branch % kept == 0:
                continue
        check(False, key, arm.branch, rule, f"{fix}; or write the arm before {arm.on} is trained")


def check_resumes(place: str, arm: Arm, job: ResolvedJob, reference: ResolvedJob) -> None:
    """Check that an arm changes only what a resume may change.

    Raises:
        ConfigError: naming each key that keeps it from that.
    """
    manifest: Any = NO_JOB | {
        "step": arm.branch,
        "stage": reference.stage_number,
        "config": to_json(reference.config),
        "data_identity": reference.data_identity,
        "model_name": reference.config.model.name,
        "model_args": asdict(reference.model_args),
        "frozen": sorted(reference.frozen),
        "own_code": reference.own_code,
    }
    try:
        resume_from(job, Saved(Path(f"step-{arm.branch} of {arm.on}"), manifest))
    except ConfigError as error:
        raise ConfigError(place, f"{arm.name}: {error}") from None


def settings_of_origin(experiment: Experiment, arm: Arm, common: Mapping[str, Any]) -> Values:
    """Return the keys by which the runs of an arm keep what its branches start from."""
    branches = [one.branch for one in experiment.arms.values() if one.branch and one.on == arm.name]
    return {key: math.gcd(*branches) for key in KEPT if branches and key not in common}


def branch_off(document: Document, arm: Arm, seed: int) -> None:
    """Give a run that hasn't started the checkpoint that it starts from, by hard links."""
    folder = folder_of(document, Key(arm.name, seed)) / CHECKPOINTS
    if not arm.branch or any(folder.glob("step-*")):
        return
    origin = _origin(document, arm, seed)
    fix = f"restore it, or remove {origin.parents[1]}: that run is then taken again"
    check(origin.is_dir(), "from", arm.branch, f"{origin} is not there any more", fix)
    # renamed when it is complete, as the worker may be killed here
    partial = folder / f".{origin.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(origin, partial, copy_function=_link)
    partial.rename(folder / origin.name)


def _origin(document: Document, arm: Arm, seed: int) -> Path:
    return step_folder(folder_of(document, Key(arm.on, seed)) / CHECKPOINTS, arm.branch)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # of a file system without hard links
        shutil.copy2(source, target)
