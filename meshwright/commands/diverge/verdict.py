"""Why two runs part: five stages, each of which may end the search."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from meshwright.commands.diverge.checkpoints import (
    Element,
    common_steps,
    elements,
    first_other,
    lone_element,
    suspects,
)
from meshwright.commands.diverge.documents import other_document
from meshwright.commands.diverge.facts import Fact, compare_facts, other_files
from meshwright.commands.diverge.records import (
    OtherStep,
    compare_rows,
    has_other_rates,
    other_steps,
)
from meshwright.commands.diverge.replays import Findings, Replays
from meshwright.commands.diverge.tries import Flip
from meshwright.commands.prove.ranks import RankError
from meshwright.commands.replay.compared import LEAST_ROUNDING, TIMES_ROUNDING, WITHOUT_TWIN
from meshwright.commands.replay.recorded import RecordedRun
from meshwright.metrics.report.run import Row
from meshwright.models.parameter import block_of
from meshwright.system.errors import ConfigError, check, first_line, numbered
from meshwright.system.modules import PACKAGE

Kind = Literal["equal", "rounding", "key", "data", "code", "module", "tensor", "run", "unexplained"]

Which = Literal["A", "B", ""]

NEEDED = ("ranks", "mesh", "gpus", "kernels", "source", "data_content")
"""Of a start; earlier versions have kept less."""

MOST_CPU_RANKS = 8
"""On CPUs a run of more ranks is replayed on one process."""


@dataclass(frozen=True)
class Verdict:
    """What makes two runs differ."""

    kind: Kind
    text: str
    names: Sequence[str] = ()
    """Of keys, a document, a module or tensor, or of facts."""
    run: Which = ""
    """The one that went wrong by itself."""
    step: int | None = None
    """The first that differs."""
    element: Sequence[int] = ()
    """Of the tensor; of what a module gives, with the sequence first."""
    rank: int | None = None
    host: str = ""
    gpu: str = ""
    """UUID; empty on a CPU."""
    since: int | None = None
    """The first step in which `run` may have gone wrong, at most `step`; None: it didn't."""


@dataclass
class Comparison:
    """Two runs, compared stage by stage.

    Args:
        code_b: the checkout of B, if it isn't this one.
        num_gpus: of this machine.
        say: gets a stage, and a line about it.
    """

    a: RecordedRun
    b: RecordedRun
    code_b: Path | None
    num_gpus: int
    say: Callable[[str, str], None]
    facts: list[Fact] = field(default_factory=list)
    """That differ; `verdict` finds them."""

    def verdict(self) -> Verdict:
        """Return why the runs differ, or that they don't.

        Raises:
            ConfigError: if they have no step in common.
        """
        common = sorted(step for step in self.a.steps.keys() & self.b.steps.keys() if step)
        check(bool(common), "B", str(self.b.folder), "has no step in common with A", "name others")
        others = [*other_steps(self.a, self.b), *self._early_end(common[-1])]
        self._begin(min(others[0].step, common[-1]) if others else common[-1])
        self._say_facts()
        self._say_records(others, common)
        if not others:
            return self._innocent("equal", f"equal in every bit, to step {common[-1]}")
        return self._of_steps(others)

    def _begin(self, step: int) -> None:
        """Look at the processes that took a step."""
        self._starts = self.a.start_of(max(step, 1)), self.b.start_of(max(step, 1))
        for name, run, start in zip("AB", (self.a, self.b), self._starts, strict=True):
            missing = ", ".join(fact for fact in NEEDED if fact not in start)
            rule, fix = f"its history.jsonl has no {missing}", "name a run of this version"
            check(not missing, name, str(run.folder), rule, fix)
        a, b = self._starts
        self._folders = self.a.checkpoint_folder(a), self.b.checkpoint_folder(b)
        self._saved = common_steps(*self._folders)
        self._limit = WITHOUT_TWIN[a["config"]["training"]["mixed_precision_param"]]
        self.facts = compare_facts(a, b, has_other_rates=has_other_rates(self.a, self.b))
        is_ordered = a["kernels"]["deterministic"] or not any(gpu for _, gpu in _gpus(a).values())
        self._expects_bits = is_ordered and not any(fact.changes_bits for fact in self.facts)

    # 1 facts

    def _names(self, *effects: str) -> list[str]:
        """Return the names of facts that differ and may have these effects."""
        return [fact.name for fact in self.facts if fact.effect in effects]

    def _say_facts(self) -> None:
        shown = [fact for fact in self.facts if fact.changes_bits]
        for fact in shown:
            note = " (changes rounding only)" if fact.effect == "rounding" else ""
            self.say("1 facts", f"{fact.name}: {fact.a} in A, {fact.b} in B{note}")
        if not shown:
            start = self._starts[0]
            same = f"equal: config, data, tokenizer, versions, source {start['source']}, kernels"
            self.say("1 facts", f"{same}, mesh {start['mesh']}")
        if self.code_b is not None:
            files = other_files(PACKAGE, self.code_b / PACKAGE.name)
            self.say("1 facts", f"files that --code-b has otherwise: {', '.join(files) or 'none'}")

    def _of_data(self, steps: range) -> Verdict | None:
        """Return the document that differs; None if the steps read the same samples."""
        names = self._names("data")
        found = other_document(self.a, self.b, self._starts, steps) if names else None
        if found is None:
            return None
        keys = [name for name in self._names("key") if name != "tokenizer"]
        untried = f"; not tried: {', '.join(keys)}" if keys else ""
        if "tokenizer" in self._names("key"):
            return Verdict("key", f"the tokenizer differs{untried}", ["tokenizer"])
        if isinstance(found, str):
            self.say("1 facts", found)
            return Verdict("data", f"the data differs: {', '.join(names)}{untried}", names)
        self.say("1 facts", f"{found}; first read in step {found.step or 'not known'}")
        text = f"the data differs in document {found.name} ({found.places[0]}){untried}"
        return Verdict("data", text, [found.name], step=found.step)

    # 2 records

    def _early_end(self, last: int) -> list[OtherStep]:
        """Return the step after the last common one, if one of the runs failed there."""
        for name, run, other in (("A", self.a, self.b), ("B", self.b, self.a)):
            reason = str(run.run.history[-1].get("reason", ""))
            if reason.startswith("failed") and max(run.steps) == last < max(other.steps):
                end = f"the end of run {name} ({reason.partition(';')[0]})"
                return [OtherStep(last + 1, [end], float("inf"))]
        return []

    def _say_records(self, others: Sequence[OtherStep], common: Sequence[int]) -> None:
        if not others:
            self.say("2 records", f"equal bits in {numbered(len(common), 'step')}")
            return
        first, most = others[0], max(others, key=lambda one: one.largest)
        last = max((step for step in common if step < first.step), default=None)
        what = "bits" if last in self._with_sums() else "losses and norms"
        before = "" if last is None else f"equal {what} to step {last}; "
        size = f" ({first.largest:.1e})" if first.largest else ""
        text = f"{before}first other bits in step {first.step}: {', '.join(first.names[:3])}{size}"
        self.say("2 records", text)
        if most is not first:
            self.say("2 records", f"at most {most.largest:.1e}, in step {most.step}")

    def _with_sums(self) -> set[int]:
        """Return the steps of which both records have the sums of bits."""
        a, b = ({s for s, row in run.steps.items() if "weights" in row} for run in (self.a, self.b))
        return a & b

    # 3 checkpoints

    def _around(self, before: int, step: int) -> tuple[int, int | None]:
        """Return the last checkpoint that is equal as far as is known, and the first one behind a
        step that differs, if it was saved. Where all bits should be equal, they are bisected."""
        if not self._expects_bits:
            begin = max((saved for saved in self._saved if saved <= before), default=0)
            return begin, next((saved for saved in self._saved if saved >= step), None)
        other = first_other(*self._folders, self._saved)
        is_equal = [saved for saved in self._saved if other is None or saved < other]
        name = f"step-{is_equal[-1]}" if is_equal else "the initial weights"
        self.say("3 checkpoints", f"equal to {name}")
        return max((saved for saved in is_equal if saved < step), default=0), other

    def _elements(self, saved: int | None, first: OtherStep) -> list[Element]:
        """Return the elements that differ most in a checkpoint, of the groups that differ first."""
        if saved is None:
            return []
        found = [*elements(*self._folders, saved, self._starts[1]["ranks"])]
        self.say("3 checkpoints", f"step-{saved}: {numbered(len(found), 'tensor')} differ")
        groups = first.groups
        return [one for one in found if not groups or block_of(one.place.parameter) in groups]

    # 4 replay

    @property
    def _is_crossed(self) -> bool:
        """Whether B has facts, or code, that can be tried from a checkpoint of A."""
        return self.code_b is not None or bool(self._names("key", "data"))

    def _of_steps(self, others: Sequence[OtherStep]) -> Verdict:
        """Return what explains the first step that differs beyond an ulp (the first at all, if
        there are facts to try), or the first one beyond what rounding is known to reach."""
        seen = set[int]()
        is_exact = self._expects_bits or self._is_crossed
        for bound in (-1.0 if is_exact else TIMES_ROUNDING * LEAST_ROUNDING, self._limit):
            other = next((one for one in others if one.largest > bound or one.step == 0), None)
            if other is None or other.step in seen:
                continue
            seen.add(other.step)
            common = self.a.steps.keys() & self.b.steps.keys()
            before = max((step for step in common if step < other.step), default=0)
            if found := self._of_data(range(before + 1, other.step + 1)):
                return found
            if found := self._of_interval(before, other):
                return found
        if not seen:
            self.say("2 records", "never beyond 1e-6, so nothing has to be replayed")
        text = "rounding only"
        if "source" in self._names("code") and self.code_b is None:
            text += "; --code-b CHECKOUT compares what the modules of different code compute"
        return self._innocent("rounding", text, others[0].step)

    def _innocent(self, kind: Kind, text: str, step: int | None = None) -> Verdict:
        """Return a verdict that also has the facts that could have changed bits."""
        names = [fact.name for fact in self.facts if fact.changes_bits]
        return Verdict(
            kind, f"{text}; different: {', '.join(names)}" if names else text, names, step=step
        )

    def _of_interval(self, before: int, other: OtherStep) -> Verdict | None:
        """Return why a step differs; None: both runs come back, and the facts of B change nothing.

        Args:
            before: the last step that doesn't.
        """
        (begin, later), last = self._around(before, other.step), max(other.step, 1)
        apart, flips = list[Element](), list[Flip]()
        with Replays(self.a, self.b, self.code_b, begin, last) as replays:
            if self._expects_bits and self._starts[0]["ranks"] <= (self.num_gpus or MOST_CPU_RANKS):
                apart = self._elements(later, other)
                is_off, flips = self._bits(replays, begin, last, later, apart)
            else:
                found = self._retake(replays, begin, last)
                if found is None:
                    return self._one_of(other, begin)
                if self._is_crossed and last > begin + 1 and not (found.crossed or found.value):
                    # what changes the update of the last step shows in no loss or norm of it
                    found = replays.on_one_process(last, is_crossed=True)
                if found.crossed or found.value:
                    return self._of_keys(replays) or self._of_value(replays, found, begin)
                is_off = found.is_off[0] is not None, found.is_off[1] is not None
        if not (any(is_off) or self._expects_bits):
            return None
        run: Which = "" if is_off[0] == is_off[1] else "A" if is_off[0] else "B"
        named = self._names("code")
        if named and self.code_b is None:
            whose = {"A": "B", "B": "A", "": "neither run"}[run]
            text = f"the code here gives the record of {whose}: {', '.join(named)}"
            hint = ". --code-b CHECKOUT names the module" if "source" in named else ""
            return Verdict("code", text + hint, named, step=last)
        if not (run or self._expects_bits):
            return Verdict("unexplained", "neither record comes back: this isn't their machine")
        apart = apart or self._elements(later, other)
        return self._went_wrong(run, other, begin, apart, flips)

    def _bits(
        self, replays: Replays, begin: int, last: int, later: int | None, apart: Sequence[Element]
    ) -> tuple[tuple[bool, bool], list[Flip]]:
        """Return whether the bits of A, and of B, don't come back on their mesh; and the flipped
        bit, if one explains it."""
        try:
            steps, flips = replays.on_own_mesh(suspects(apart), later)
        except (ConfigError, RankError) as error:
            self.say("4 replay", f"can't be taken here: {first_line(error)}")
            return (True, True), []
        a, b = (
            any(
                step not in run.steps or bool(compare_rows(row, run.steps[step], self.a.groups))
                for step, row in steps.items()
                if step in self.a.steps or step in self.b.steps
            )
            for run in (self.a, self.b)
        )
        whose = {(True, False): "run B", (False, True): "run A"}.get((a, b), "neither run")
        ranks = numbered(self._starts[0]["ranks"], "rank")
        self.say("4 replay", f"steps {begin + 1} to {last} on {ranks}: the bits of {whose}")
        return (a, b), flips

    def _went_wrong(
        self,
        run: Which,
        first: OtherStep,
        begin: int,
        apart: Sequence[Element],
        flips: Sequence[Flip] = (),
    ) -> Verdict:
        """Return the verdict on a run that doesn't come back, with the element, if it's clear. No
        flip tells the step: a changed bit may show in no loss before the next sums of bits."""
        text = f"the arithmetic of {f'run {run}' if run else 'one run'} went wrong by itself"
        since = max((begin, *(step for step in self._with_sums() if step < first.step))) + 1
        if flips or since >= first.step:
            since = first.step
            text += f" in step {since}"
        else:
            text += f" in one of steps {since} to {first.step}"
        why = "; config, code and data are innocent"
        is_known = 0 < len(first.groups) < len(self.a.groups)
        lone = None if flips else lone_element(apart, is_known=is_known)
        place = flips[0].place if flips else lone.place if lone else None
        if place is None:
            text += f", first in {first.names[0]}{why}"
            return Verdict("run", text, first.names[:1], run, first.step, since=since)
        host, gpu = _gpus(self._starts[0 if run == "A" else 1]).get(place.rank, ("", ""))
        if flips:
            bits = " or ".join(f"bit {flip.bit} of the {flip.place.value}" for flip in flips)
            what = f"{bits}{place.words}"
            self.say("4 replay", f"with {what} flipped: the bits of run {run}")
        elif lone:
            what = f"the gradient or the state{place.words}"
            self.say("3 checkpoints", f"{place.value}{place.words}: {lone.how_far}")
        text += f", in {what} (host {host}{f', GPU {gpu}' if gpu else ''}){why}"
        names = [place.parameter, place.value]
        spot = place.index, place.rank, host, gpu
        return Verdict("tensor", text, names, run, first.step, *spot, since)

    def _one_of(self, other: OtherStep, begin: int) -> Verdict | None:
        """Return the verdict where nothing can be replayed; None: it may be rounding."""
        named = self._names("key", "data", "code")
        if self._expects_bits:
            return self._went_wrong("", other, begin, [])
        if other.largest <= self._limit:
            return None
        if not named:
            return Verdict("unexplained", "not known", step=other.step)
        kind: Kind = "key" if self._names("key") else "code"
        one_of = "" if len(named) == 1 else "one of "
        text = f"no replay here can tell; what differs is {one_of}{', '.join(named)}"
        return Verdict(kind, text, named, step=other.step)

    def _retake(self, replays: Replays, begin: int, last: int) -> Findings | None:
        """Return what one process makes of the interval; None, which is said: it can't be taken
        here."""
        try:
            found = replays.on_one_process(begin + 1, is_crossed=self._is_crossed)
        except ConfigError as error:
            self.say("4 replay", f"can't be taken here: {first_line(error)}")
            return None
        parts = [
            f"{name} as recorded" if step is None else f"{name} not as recorded in step {step}"
            for name, step in zip("AB", found.is_off, strict=True)
        ]
        if self._is_crossed:
            step = found.crossed
            same = "the same loss and norms" if step is None else f"something else in step {step}"
            parts.append(f"A with the facts of B gives {same}")
        span = f"steps {begin + 1} to {last} on 1 process (twin: {found.rounding:.1e})"
        self.say("4 replay", f"{span}: {', '.join(parts)}")
        if self.code_b is not None and found.source_b != (ran := self._starts[1]["source"]):
            self.say("4 replay", f"--code-b has the source {found.source_b}, and B ran {ran}")
        return found

    def _of_keys(self, replays: Replays) -> Verdict | None:
        """Return which keys of the config explain the difference; None: none does."""
        keys = [name for name in self._names("key") if name != "tokenizer"]
        is_only = len(keys) == 1 and self.code_b is None and not self._names("data")
        try:
            found = keys if is_only else _causes(replays, keys)
        except (ConfigError, ValidationError) as error:
            self.say("4 replay", f"keys can't be tried one by one: {first_line(error)}")
            text = f"one of the keys that differ explains it: {', '.join(keys)}"
            return Verdict("key", text, keys)
        if not found:
            return None
        if len(found) < len(keys):
            self.say("4 replay", f"of the keys, only {', '.join(found)} changes these steps")
        return Verdict("key", f"the runs were told otherwise: {', '.join(found)}", found)

    # 5 modules

    def _of_value(self, replays: Replays, found: Findings, begin: int) -> Verdict:
        """Return the verdict of a replay that the facts of B change, though no key does."""
        step, value = found.crossed or found.traced, found.value
        if value is None and step > begin + 1:
            value = replays.on_one_process(step, is_crossed=True).value
        if value is not None:
            index = ", ".join(map(str, value.element))
            text = f"{value.words}, element ({index}): {value.difference:.1e} where rounding "
            self.say("5 modules", f"step {step}: {text}explains {value.bound:.1e}")
        if value is None or self.code_b is None:
            kind: Kind = "data" if self._names("data") else "code"
            names = self._names(kind)
            return Verdict(kind, f"what differs: {', '.join(names)}", names, step=step)
        text = f"the code differs: {value.words}"
        return Verdict("module", text, [value.name, value.kind], "", step, value.element)


def _causes(replays: Replays, keys: Sequence[str]) -> list[str]:
    """Return those of `keys` that change the steps, found by halves; keys that change them only
    together are returned together."""
    if not keys or not replays.is_changed_by(keys):
        return []
    half = len(keys) // 2
    found = [*_causes(replays, keys[:half]), *_causes(replays, keys[half:])] if half else []
    return found or [*keys]


def _gpus(start: Row) -> dict[int, tuple[str, str]]:
    """Return the host and the GPU of each rank."""
    return {
        int(rank): (host, gpu)
        for host, of_host in start["gpus"].items()
        for rank, gpu in of_host.items()
    }
