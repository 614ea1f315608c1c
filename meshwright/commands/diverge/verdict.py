"""Why two runs part: five stages, each of which may end the search."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from meshwright.commands.diverge.checkpoints import LoneElement, common_steps, first_other, pair_at
from meshwright.commands.diverge.documents import other_document
from meshwright.commands.diverge.facts import Fact, compare_facts, other_files
from meshwright.commands.diverge.records import (
    OtherStep,
    compare_rows,
    has_other_rates,
    other_steps,
)
from meshwright.commands.diverge.replays import Replays, Retaken
from meshwright.commands.diverge.trace import OtherValue
from meshwright.commands.replay.recorded import RecordedRun
from meshwright.commands.replay.replay import LEAST_ROUNDING, TIMES_ROUNDING, WITHOUT_TWIN
from meshwright.metrics.report.run import Row
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
        runs = (self.a, self.b)
        common = sorted(step for step in self.a.steps.keys() & self.b.steps.keys() if step)
        check(bool(common), "B", str(self.b.folder), "has no step in common with A", "name others")
        others = [*other_steps(*runs), *self._early_end(common[-1])]
        step = min(others[0].step, common[-1]) if others else common[-1]
        self._starts = a, b = self.a.start_of(max(step, 1)), self.b.start_of(max(step, 1))
        for name, run, start in (("A", self.a, a), ("B", self.b, b)):
            missing = ", ".join(fact for fact in NEEDED if fact not in start)
            rule, fix = f"its history.jsonl has no {missing}", "name a run of this version"
            check(not missing, name, str(run.folder), rule, fix)
        self._folders = self.a.checkpoint_folder(a), self.b.checkpoint_folder(b)
        self._saved = common_steps(*self._folders)
        self._limit = WITHOUT_TWIN[a["config"]["training"]["mixed_precision_param"]]
        self.facts = compare_facts(a, b, has_other_rates=has_other_rates(*runs))
        self._say_facts()
        self._say_records(others, common)
        if not others:
            return Verdict("equal", f"equal in every bit, to step {common[-1]}")
        is_rounded = any(f.effect == "rounding" and f.changes_bits for f in self.facts)
        is_sure = not is_rounded or any(one.largest > self._limit for one in others)
        if is_sure and self._names("key") and not self._names("code"):
            return self._told_otherwise()
        if self._names("data") and (found := self._of_data(others[0])):
            return found
        is_ordered = a["kernels"]["deterministic"] or not any(gpu for _, gpu in _gpus(a).values())
        if is_ordered and not any(fact.changes_bits for fact in self.facts):
            return self._of_arithmetic(others[0])
        return self._of_replays(others)

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

    def _told_otherwise(self) -> Verdict:
        keys = self._names("key", "data")
        return Verdict("key", f"the runs were told otherwise: {', '.join(keys)}", keys)

    def _of_data(self, first: OtherStep) -> Verdict | None:
        """Return the document that differs; None if the runs part before they read it."""
        found, names = other_document(self.a, self.b, self._starts), self._names("data")
        if isinstance(found, str):
            self.say("1 facts", found)
            return Verdict("data", f"the data differs: {', '.join(names)}", names)
        step = found.first_step
        self.say("1 facts", f"{found.words}; first read in step {step or 'not known'}")
        if step is not None and step > first.step:
            return None
        text = f"the data differs in document {found.name} ({found.places[0]})"
        return Verdict("data", text, [found.name], step=step)

    # 2 records

    def _early_end(self, last: int) -> list[OtherStep]:
        """Return the step after the last common one, if one of the runs failed there."""
        for name, run, other in (("A", self.a, self.b), ("B", self.b, self.a)):
            reason = str(run.run.history[-1].get("reason", ""))
            if reason.startswith("failed") and max(run.steps) == last < max(other.steps):
                return [OtherStep(last + 1, [f"run {name} {reason}"], float("inf"))]
        return []

    def _say_records(self, others: Sequence[OtherStep], common: Sequence[int]) -> None:
        if not others:
            self.say("2 records", f"equal bits in {numbered(len(common), 'step')}")
            return
        first, most = others[0], max(others, key=lambda one: one.largest)
        before = f"equal bits to step {first.step - 1}; " if first.step > common[0] else ""
        size = f" ({first.largest:.1e})" if first.largest else ""
        text = f"{before}first other bits in step {first.step}: {', '.join(first.names[:3])}{size}"
        self.say("2 records", text)
        if most is not first:
            self.say("2 records", f"at most {most.largest:.1e}, in step {most.step}")

    # 3 checkpoints

    def _lone(self, step: int, first: OtherStep) -> LoneElement | None:
        """Return the element that stands out in the checkpoint of a step."""
        groups = first.groups if len(first.groups) < len(self.a.groups) else ()
        pair = pair_at(*self._folders, step)
        lone, count = pair.lone_element(self._starts[1]["ranks"], groups)
        self.say("3 checkpoints", f"step-{step}: {numbered(count, 'tensor')} differ")
        if lone is not None:
            self.say("3 checkpoints", f"{lone.value} of {lone.place}: {lone.how_far}")
        return lone

    # 4 replay, of runs that should have the same bits

    def _of_arithmetic(self, first: OtherStep) -> Verdict:
        """Return which run went wrong by itself, and where."""
        other = first_other(*self._folders, self._saved)
        equal = max((step for step in self._saved if other is None or step < other), default=0)
        self.say("3 checkpoints", f"equal to {f'step-{equal}' if equal else 'the initial weights'}")
        lone = None if other is None else self._lone(other, first)
        begin = max((step for step in self._saved if step < min(equal + 1, first.step)), default=0)
        run = self._who(first, begin) if first.step else ""
        return self._went_wrong(run, first, lone)

    def _who(self, first: OtherStep, begin: int) -> Which:
        """Return the run whose bits, or numbers, don't come back here."""
        ranks = self._starts[0]["ranks"]
        if ranks > (self.num_gpus or MOST_CPU_RANKS):
            retaken = self._retake(begin, first.step, is_crossed=False)
            return "" if retaken is None else self._off(retaken)
        try:
            steps = Replays(self.a, self.b, None).on_own_mesh(begin, first.step)
        except ConfigError as error:
            self.say("4 replay", f"can't be taken here: {first_line(error)}")
            return ""
        off = [
            any(
                step not in run.steps or compare_rows(row, run.steps[step], self.a.groups)
                for step, row in steps.items()
                if step in self.a.steps or step in self.b.steps
            )
            for run in (self.a, self.b)
        ]
        run: Which = "" if off[0] == off[1] else "A" if off[0] else "B"
        whose = {"A": "run B", "B": "run A", "": "neither run"}[run]
        span = f"steps {begin + 1} to {first.step} on {numbered(ranks, 'rank')}"
        self.say("4 replay", f"{span}: the bits of {whose}")
        return run

    def _went_wrong(self, run: Which, first: OtherStep, lone: LoneElement | None) -> Verdict:
        text = f"the arithmetic of {f'run {run}' if run else 'one run'} went wrong by itself"
        text += f" in step {first.step}"
        why = "; config, code and data are innocent"
        if lone is None:
            text += f", first in {first.names[0]}{why}"
            return Verdict("run", text, first.names[:1], run, first.step)
        host, gpu = _gpus(self._starts[0 if run == "A" else 1]).get(lone.rank, ("", ""))
        text += f", in the gradient or the state of {lone.place} (host {host}"
        text += f"{f', GPU {gpu}' if gpu else ''}){why}"
        names = [lone.parameter, lone.value]
        return Verdict("tensor", text, names, run, first.step, lone.index, lone.rank, host, gpu)

    # 4 replay, of runs with other facts

    def _of_replays(self, others: Sequence[OtherStep]) -> Verdict:
        """Return what replays say of the first step beyond an ulp (of the first step at all, if
        there are facts to try), and of the first one beyond what rounding is known to reach."""
        seen = set[int]()
        for bound in (-1.0 if self._is_crossed else TIMES_ROUNDING * LEAST_ROUNDING, self._limit):
            far = [one for one in others if one.largest > bound or one.step == 0]
            if not far:
                continue
            begin = max((step for step in self._saved if step < far[0].step), default=0)
            if far[0].step not in seen and (found := self._of_interval(begin, far[0])):
                return found
            seen.add(far[0].step)
        if not seen:
            self.say("2 records", "never beyond 1e-6, so nothing has to be replayed")
        text = "rounding only"
        if self._names("code") and self.code_b is None:
            text += "; other code has run: --code-b CHECKOUT compares what its modules compute"
        return Verdict("rounding", text, step=others[0].step)

    @property
    def _is_crossed(self) -> bool:
        """Whether B has facts, or code, that can be tried from a checkpoint of A."""
        return self.code_b is not None or bool(self._names("key", "data"))

    def _of_interval(self, begin: int, other: OtherStep) -> Verdict | None:
        """Return the verdict of an interval; None: both runs come back, with the facts of each."""
        last, named = max(other.step, 1), self._names("key", "data", "code")
        retaken = self._retake(begin, last, is_crossed=self._is_crossed)
        if retaken is None:
            text = f"the facts that differ, and no replay tells more: {', '.join(named)}"
            kind: Kind = "code" if named else "unexplained"
            return Verdict(kind, text if named else "not known", named, step=last)
        if (step := retaken.first_crossed) or retaken.other_value:
            if retaken.other_value is None and step is not None and step > begin + 1:
                retaken = self._retake(begin, step, is_crossed=True, traced=step) or retaken
            return self._of_value(retaken.other_value, step or begin + 1)
        if retaken.first_off == (None, None):
            return None
        run = self._off(retaken)
        if self._names("code") and self.code_b is None:
            whose = {"A": "B", "B": "A", "": "neither run"}[run]
            text = f"the code here gives the record of {whose}: {', '.join(self._names('code'))}"
            return Verdict("code", f"{text}. --code-b CHECKOUT names the module", named, step=last)
        if not run:
            return Verdict("unexplained", "neither record comes back: this isn't their machine")
        later = [step for step in self._saved if step >= last]
        return self._went_wrong(run, other, self._lone(later[0], other) if later else None)

    def _retake(
        self, begin: int, last: int, *, is_crossed: bool, traced: int = 0
    ) -> Retaken | None:
        """Return an interval, taken again; None, which is said: it can't be taken here."""
        replays, traced = Replays(self.a, self.b, self.code_b), traced or begin + 1
        try:
            retaken = replays.on_one_process(begin, last, traced, is_crossed=is_crossed)
        except ConfigError as error:
            self.say("4 replay", f"can't be taken here: {first_line(error)}")
            return None
        parts = [
            f"{name} as recorded" if step is None else f"{name} not as recorded in step {step}"
            for name, step in zip("AB", retaken.first_off, strict=True)
        ]
        if is_crossed:
            step = retaken.first_crossed
            same = "the same" if step is None else f"something else in step {step}"
            parts.append(f"A with the facts of B gives {same}")
        span = f"steps {begin + 1} to {last} on 1 process (twin: {retaken.rounding:.1e})"
        self.say("4 replay", f"{span}: {', '.join(parts)}")
        if self.code_b is not None and retaken.source_b != (ran := self._starts[1]["source"]):
            self.say("4 replay", f"--code-b has the source {retaken.source_b}, and B ran {ran}")
        return retaken

    @staticmethod
    def _off(retaken: Retaken) -> Which:
        """Return the one run whose record doesn't come back."""
        a, b = (step is not None for step in retaken.first_off)
        return "" if a == b else "A" if a else "B"

    # 5 modules

    def _of_value(self, value: OtherValue | None, step: int) -> Verdict:
        """Return the verdict of a replay that the facts of B change."""
        if value is not None:
            index = ", ".join(map(str, value.element))
            text = f"{value.words}, element ({index}): {value.difference:.1e} where rounding "
            self.say("5 modules", f"step {step}: {text}explains {value.bound:.1e}")
        if self._names("key", "data"):
            return self._told_otherwise()
        if value is None:
            names = self._names("code")
            return Verdict("code", f"the code differs: {', '.join(names)}", names, step=step)
        text = f"the code differs: {value.words}"
        return Verdict("module", text, [value.name, value.kind], "", step, value.element)


def _gpus(start: Row) -> dict[int, tuple[str, str]]:
    """Return the host and the GPU of each rank."""
    return {
        int(rank): (host, gpu)
        for host, of_host in start["gpus"].items()
        for rank, gpu in of_host.items()
    }
