"""Checks new arms, each as `meshwright check` does and against the arm that it is compared with."""

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import asdict, replace
from typing import Any

from meshwright.commands.experiment.branches import check_branch, check_resumes
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
from meshwright.commands.experiment.spec import BASE, Document, Request, Values
from meshwright.config.changes import differences, to_json
from meshwright.datasets.named_sources import entries, validation_entries
from meshwright.system.errors import ConfigError, Mistakes, check, config_error, did_you_mean
from meshwright.system.machine import count_ranks
from meshwright.train.best_validation import VALIDATED_ON
from meshwright.train.facts import look, look_at_files
from meshwright.train.resolve import ResolvedJob, resolve

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
        new = [one for one in requests if known is None or one.name not in known.arms]
        if known is not None and document.spec.screen is not None:
            for late in new:
                rule, fix = "the screening started without it", "use meshwright experiment add"
                check(not late.place, late.place, late.name, rule, fix)
        with chdir(document.file.parent):
            checked = Arms(document, known).add(requests) if known is None or new else known
            # a mistake leaves no folder
            _check_any(document, requests, checked)
            if checked is not known:
                with lease(document, "arms"):
                    # a different worker may have added some by now
                    checked = Arms(document, load(document)).add(requests)
                    save(document, checked)
        for request in requests:
            arm = checked.arms.get(request.name)
            rule = "the folder has this arm with other keys"
            fix = "give it a different name, or choose a different folder"
            is_same = arm is None or (arm.asked, arm.on, arm.branch, arm.steps) == (
                request.keys,
                request.on,
                request.branch,
                request.steps,
            )
            check(is_same, request.place, request.name, rule, fix)
    except ConfigError as error:
        raise document.explain(error) from None
    return checked


def _check_any(document: Document, requests: Sequence[Request], experiment: Experiment) -> None:
    if not requests and not any(arm.is_added for arm in experiment.arms.values()):
        fix = f"add [arms.NAME], or: meshwright experiment add {document.file.name} NAME KEY=VALUE"
        raise ConfigError("arms", f"{document.file.name} has no arm to train\n  fix: {fix}")


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
            _check_key("common", key, value, OF_RUNS)
        arm = Arm(BASE, 0, path_of(self._document), common, {}, self._count_ranks(), "")
        self._jobs[BASE] = resolved = self._resolve(arm, "base")
        is_set = resolved.written.training.global_batch_size != -1
        fix = "set it in [common] or in the base"
        check(is_set, "base", name, "training.global_batch_size follows the number of ranks", fix)
        check(
            resolved.config.validation.enable,
            "base",
            name,
            "doesn't validate",
            "enable [validation]",
        )
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
        place = request.place or "KEY=VALUE"
        fix = did_you_mean(request.on, self._arms)
        check(request.on in self._arms, f"{place}.on", request.on, "there is no such arm", fix)
        for key, value in request.keys.items():
            _check_key(place, key, value, OF_ARMS)
        reference = self._arms[request.on]
        config, below = reference.config, reference.keys
        if request.base:
            config, below = path_of(self._document, request.base), self._spec.common
        values = {key: self._value(request, key) for key in request.keys}
        ranks = self._count_ranks(request.ranks or reference.ranks)
        arm = Arm(
            request.name,
            number=len(self._arms),
            config=config,
            keys=below | values,
            asked=request.keys,
            ranks=ranks,
            on=request.on,
            is_added=not request.place,
            steps=request.steps,
            branch=request.branch,
        )
        resolved = self._resolve(arm, place)
        # an arm with steps of its own is never the same run
        twin = None if arm.steps else self._twin(arm, resolved)
        if twin is not None:
            rule = f"is {twin} again: no value differs"
            check(request.is_drawn, place, request.name, rule, "change a value, or leave it out")
            return None
        self._check_judged_alike(place, resolved, self.job(request.on))
        if arm.branch:
            check_branch(self._document, self._known, place, arm, reference, self._arms.values())
            check_resumes(place, arm, resolved, self.job(request.on))
        self._jobs[arm.name] = resolved
        unpaired = [*_unpaired(resolved, self.job(request.on))]
        return replace(arm, tokens_per_step=resolved.config.tokens_per_step, unpaired=unpaired)

    def _value(self, request: Request, key: str) -> Any:
        """Return the value of a key: "x2" is twice the reference's."""
        value = request.keys[key]
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
        check(is_number, f"{request.place}.{key}", value, rule, "write the value itself")
        product = float(match[1]) * below
        return int(product) if isinstance(below, int) and product.is_integer() else product

    def job(self, name: str) -> ResolvedJob:
        """Return the job of an arm that is registered."""
        if name not in self._jobs:
            self._jobs[name] = self._resolve(self._arms[name], name)
        return self._jobs[name]

    def _resolve(self, arm: Arm, place: str) -> ResolvedJob:
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
            raise ConfigError(place, f"{arm.name}: {error}") from None

    def _twin(self, arm: Arm, resolved: ResolvedJob) -> str | None:
        """Return the arm that runs the same already; None: there is none."""
        values = without_job(resolved.written)
        if (
            self._arms[arm.on].ranks == arm.ranks
            and without_job(self.job(arm.on).written) == values
        ):
            return arm.on
        alike = (arm.config, arm.keys, arm.ranks)
        others = self._arms.values()
        return next((a.name for a in others if (a.config, a.keys, a.ranks) == alike), None)

    def _check_judged_alike(
        self, place: str, resolved: ResolvedJob, reference: ResolvedJob
    ) -> None:
        metric, decisive = self._known.metric, {*VALIDATED_ON, "validation.freq"}
        check(metric in _metrics(resolved), "metric", metric, f"{place} doesn't log it")
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
            raise config_error(place, place.rpartition(".")[2], rule, fix)


def _check_key(place: str, key: str, value: object, reserved: Mapping[str, str]) -> None:
    why = next((why for start, why in reserved.items() if key.startswith(start)), "")
    check(not why, f"{place}.{key}", value, f"can't vary here: {why}", "leave it out")


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


def _unpaired(resolved: ResolvedJob, reference: ResolvedJob) -> Iterator[str]:
    """Yield the parts that equal seeds don't make equal."""
    both = (resolved, reference)
    ours, theirs = (
        {name: p.shape for name, p in job.model_args.table.parameters.items()} for job in both
    )
    if ours != theirs:
        yield "weights"
    if _data_of(resolved) != _data_of(reference):
        yield "data"


def _data_of(resolved: ResolvedJob) -> tuple[object, ...]:
    training = resolved.config.training
    sources = [(entry.source, entry.weight) for entry in entries(training, "training")]
    return resolved.data_identity, sources, training.global_batch_size
