"""Checks new arms, each as `meshwright check` does and against the arm that it is compared with."""

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from meshwright.checkpoint.manifest import NO_JOB
from meshwright.checkpoint.store import Saved
from meshwright.commands.experiment.registry import (
    Arm,
    Experiment,
    config_of,
    identity_of,
    lease,
    load,
    path_of,
    save,
    without_job,
)
from meshwright.commands.experiment.results import LAST_QUARTER
from meshwright.commands.experiment.spec import BASE, Document, Request, Values
from meshwright.config.changes import differences, to_json
from meshwright.datasets.named_sources import entries, validation_entries
from meshwright.system.errors import ConfigError, Mistakes, check, config_error, did_you_mean
from meshwright.system.files import NamedPath
from meshwright.system.machine import count_ranks
from meshwright.train.best_validation import VALIDATED_ON
from meshwright.train.facts import look, look_at_files
from meshwright.train.resolve import ResolvedJob, resolve, resume_from

RESUMES = "a run that is killed must resume"

OF_RUNS = {
    "job.": "each run has its own",
    "training.seed": "the experiment pairs runs by it",
    "training.steps": "the budget decides it",
    "checkpoint.enable": RESUMES,
    "checkpoint.folder": RESUMES,
    "checkpoint.load_": RESUMES,
}
"""Beginnings of keys that the experiment sets, and why nobody else can."""

OF_ARMS = OF_RUNS | {
    "validation.": "one validation judges all arms, so it belongs in the base",
    "checkpoint.interval": "it belongs in [common]",
    "checkpoint.keep_": "it belongs in [common]",
    "checkpoint.last_save_": "it belongs in [common]",
}
"""Beginnings of keys that can't vary between arms, and why."""

TIMES = re.compile(r"x(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)")


def register(document: Document, added: Sequence[Request] = ()) -> Experiment:
    """Return the experiment with the arms in its folder and with new ones, which are checked
    first.

    Raises:
        ConfigError: for every arm that can't run or couldn't be judged; nothing is kept then.
    """
    requests = [*document.requests(), *added]
    try:
        known = load(document)
        with chdir(document.file.parent):
            checked = Arms(document, known).add(requests)
            if known is not None and document.spec.screen is not None:
                for arm in checked.arms.values():
                    is_late = arm.place != "" and arm.name not in known.arms
                    rule, fix = "the screening started without it", "use meshwright experiment add"
                    check(not is_late, arm.place, arm.name, rule, fix)
            is_empty = not requests and all(arm.place for arm in checked.arms.values())
            if is_empty or len(checked.arms) == 1:
                name = document.file.name
                fix = f"add [arms.NAME], or: meshwright experiment add {name} NAME KEY=VALUE"
                raise ConfigError("arms", f"{name} has no arm to train\n  fix: {fix}")
            if checked != known:  # a mistake leaves no folder
                with lease(document, "arms"):
                    # a different worker may have added some by now
                    checked = Arms(document, load(document)).add(requests)
                    save(document, checked)
        for one in requests:
            is_same = one.name not in checked.arms or one.asks_as(checked.arms[one.name])
            rule = "the folder has this arm with other keys"
            fix = "give it a different name, or choose a different folder"
            check(is_same, one.place, one.name, rule, fix)
    except ConfigError as error:
        raise document.explain(error) from None
    return checked


def has_gpus() -> bool:
    """Return whether runs of this node are on GPUs."""
    return count_ranks(Namespace(ngpu=None, nnodes="1")).gpus != 0


class Arms:
    """The arms of an experiment, and the jobs that they stand for."""

    def __init__(self, document: Document, known: Experiment | None) -> None:
        self._document, self._spec = document, document.spec
        self._jobs = dict[str, ResolvedJob]()
        # of the node where it started: an arm can be added from one without
        self._on_gpus = has_gpus() if known is None else known.on_gpus
        self._known = known or self._begin()
        self._arms = dict(self._known.arms)

    def add(self, requests: Sequence[Request]) -> Experiment:
        """Return the experiment with the arms that it lacks."""
        mistakes = Mistakes()
        for request in requests:
            with mistakes.collect():
                if request.name not in self._arms and (arm := self._arm(request)) is not None:
                    self._arms[arm.name] = arm
        mistakes.check()
        return replace(self._known, arms=self._arms)

    def _begin(self) -> Experiment:
        """Return the experiment with its base."""
        name, common = self._spec.base, self._spec.common
        for key, value in common.items():
            _check_key(f"common.{key}", key, value, OF_RUNS)
        arm = Arm(
            BASE,
            "base",
            common,
            on="",
            config=path_of(self._document),
            keys=common,
            ranks=self._count_ranks(),
        )
        self._jobs[BASE] = resolved = self._resolve(arm)
        is_set = resolved.written.training.global_batch_size != -1
        fix = "set it in [common] or in the base"
        check(is_set, "base", name, "training.global_batch_size follows the number of ranks", fix)
        is_judged = resolved.config.validation.enable
        check(is_judged, "base", name, "doesn't validate", "enable [validation]")
        average = "average/" if resolved.config.checkpoint.average.is_on else ""
        metric, logged = self._spec.metric or f"{average}validation/loss", _metrics(resolved)
        fix = did_you_mean(metric, logged)
        check(metric in logged, "metric", metric, "the base doesn't log it", fix)
        arm = replace(arm, tokens_per_step=resolved.config.tokens_per_step)
        identity = identity_of(self._document)
        return Experiment(identity, metric, {BASE: arm}, self._on_gpus)

    def _count_ranks(self, own: int | None = None) -> int:
        wanted = own or self._spec.ranks
        return count_ranks(Namespace(ngpu=str(wanted) if wanted else None, nnodes="1")).total

    def _arm(self, request: Request) -> Arm | None:
        """Return an arm, checked; None if a draw is one that there is already."""
        fix = did_you_mean(request.on, self._arms)
        is_known = request.on in self._arms
        check(is_known, request.key("on"), request.on, "there is no such arm", fix)
        for key, value in request.asked.items():
            _check_key(request.key(key), key, value, OF_ARMS)
        reference = self._arms[request.on]
        config, below = reference.config, reference.keys
        if request.base:
            config = path_of(self._document, request.base, request.key("base"))
            below = self._spec.common
        arm = Arm(
            **vars(request),
            number=len(self._arms),
            config=config,
            keys=below | {key: self._value(request, key) for key in request.asked},
            ranks=self._count_ranks(request.own_ranks or reference.ranks),
        )
        resolved = self._resolve(arm)
        # an arm with steps of its own is never the same run
        twin = None if arm.steps else self._twin(arm, resolved)
        if twin is not None:
            rule = f"is {twin} again: no value differs"
            fix = "change a value, or leave it out"
            check(request.is_drawn, request.place or "NAME", request.name, rule, fix)
            return None
        self._check_judged_alike(request, resolved, self.job(request.on))
        if arm.branch:
            _check_branch(self._document, arm, self._known.steps_of(reference))
            _check_resumes(arm, resolved, self.job(request.on))
        self._jobs[arm.name] = resolved
        unpaired = _unpaired(resolved, self.job(request.on))
        return replace(arm, tokens_per_step=resolved.config.tokens_per_step, unpaired=unpaired)

    def _value(self, request: Request, key: str) -> Any:
        """Return the value of a key: "x2" is twice the reference's."""
        value = request.asked[key]
        match = TIMES.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            return value
        resolved = self.job(request.on)
        below: Any = to_json(resolved.config) | {
            "model": {"args": asdict(resolved.model_args.resolved)}
        }
        for part in key.split("."):
            below = below.get(part) if isinstance(below, Mapping) else None
        is_number = type(below) in (int, float) and below > 0
        rule = f"{request.on} has no positive number there"
        check(is_number, request.key(key), value, rule, "write the value itself")
        product = float(match[1]) * below
        return int(product) if isinstance(below, int) and product.is_integer() else product

    def job(self, name: str) -> ResolvedJob:
        """Return the job of an arm that is registered."""
        if name not in self._jobs:
            self._jobs[name] = self._resolve(self._arms[name])
        return self._jobs[name]

    def _resolve(self, arm: Arm) -> ResolvedJob:
        """Return the job of an arm, if it can run."""
        # of no run, so that none is resumed here
        own: Values = {"job.dump_folder": str(self._document.folder / arm.name / "seed-new")}
        if steps := arm.steps or self._spec.budget.steps:
            own["training.steps"] = steps
        try:
            config = config_of(arm.config, arm.keys | own)
            facts = look(config, arm.ranks, expects_gpus=self._on_gpus)
            return resolve(config, look_at_files(config, facts))
        except ConfigError as error:
            text = str(error)
            key = next((key for key in arm.asked if f"--{key}" in text), "")
            place = f"common.{key}" if arm.name == BASE and key else arm.key(key).strip(".")
            text = text.replace(f"--{key}", key) if key else text
            raise ConfigError(place, f"{arm.name}: {text}") from None

    def _twin(self, arm: Arm, resolved: ResolvedJob) -> str | None:
        """Return the arm that runs the same already; None: there is none."""
        written = (without_job(job.written) for job in (resolved, self.job(arm.on)))
        if self._arms[arm.on].ranks == arm.ranks and next(written) == next(written):
            return arm.on
        others = self._arms.values()
        return next((one.name for one in others if _runs_of(one) == _runs_of(arm)), None)

    def _check_judged_alike(
        self, request: Request, resolved: ResolvedJob, reference: ResolvedJob
    ) -> None:
        metric, decisive = self._known.metric, {*VALIDATED_ON, "validation.freq"}
        check(metric in _metrics(resolved), "metric", metric, f"{request.name} doesn't log it")
        if resolved.config.training.validation_fraction:
            decisive |= {"training.dataset", "training.datasets", "training.dataset_path"}
        both = (to_json(reference.config), to_json(resolved.config))
        keys = {".".join(d.key.split(".")[:2]) for d in differences(*both)} & decisive
        is_other = resolved.tokenizer.fingerprint != reference.tokenizer.fingerprint
        if is_other and not metric.endswith("bits_per_byte"):
            keys.add("model.tokenizer_path")
        if keys:
            rule = f"would be validated otherwise: by a different {', '.join(sorted(keys))}"
            fix = "keep it; of other tokenizers, bits_per_byte can be compared"
            raise config_error(request.place, request.name, rule, fix)


def _runs_of(arm: Arm) -> tuple[object, ...]:
    return arm.config, arm.keys, arm.ranks, arm.branch, arm.on if arm.branch else ""


def _check_key(place: str, key: str, value: object, reserved: Mapping[str, str]) -> None:
    why = next((why for start, why in reserved.items() if key.startswith(start)), "")
    check(not why, place, value, f"can't vary here: {why}", "leave it out")


def _metrics(resolved: ResolvedJob) -> list[str]:
    """Return the metrics of a validation that can judge a run."""
    parts = ["loss", "bits_per_byte"] if resolved.tokenizer.token_bytes is not None else ["loss"]
    names = [entry.name for entry in validation_entries(resolved.config)]
    if len(names) > 1:
        logged = [f"validation/{name}/{part}" for name in names for part in parts]
        logged.insert(0, "validation/loss")  # their mean
    else:
        logged = [f"validation/{part}" for part in parts]
    if resolved.config.checkpoint.average.is_on:
        logged += [f"average/{name}" for name in logged]
    return logged


def _unpaired(resolved: ResolvedJob, reference: ResolvedJob) -> list[str]:
    """Return which of "weights" and "data" equal seeds don't make equal."""

    def parts(job: ResolvedJob) -> Iterator[object]:
        yield {name: one.shape for name, one in job.model_args.table.parameters.items()}
        training = job.config.training
        sources = [(entry.source, entry.weight) for entry in entries(training, "training")]
        yield job.data_identity, sources, training.global_batch_size

    both = zip(("weights", "data"), parts(resolved), parts(reference), strict=True)
    return [name for name, ours, theirs in both if ours != theirs]


def _check_branch(document: Document, arm: Arm, steps: int) -> None:
    """Check that an arm can branch off from a run of so many steps, and be judged.

    Raises:
        ConfigError: if it can't.
    """
    key, spec = arm.key("from"), document.spec
    rule = "a branch needs a budget in steps or tokens: seconds become steps when the base is timed"
    check(not spec.budget.seconds, key, arm.branch, rule, "write budget = {steps = ...}")
    rule = "a screening doesn't train the base, so there is nothing to start from"
    check(spec.screen is None or not arm.place, key, arm.branch, rule, "leave out [screen] or from")
    most = int(LAST_QUARTER * steps)
    rule = f"must be at most {most}, where the validations that judge a run start"
    check(arm.branch <= most, key, arm.branch, rule, f"write from = {most}")


def _check_resumes(arm: Arm, job: ResolvedJob, reference: ResolvedJob) -> None:
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
    place = NamedPath("", Path(f"step-{arm.branch} of {arm.on}"))
    try:
        resume_from(job, Saved(place, manifest))
    except ConfigError as error:
        raise ConfigError(arm.place, f"{arm.name}: {error}") from None
