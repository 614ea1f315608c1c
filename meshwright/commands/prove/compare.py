"""From the measurements of all ranks to a verdict."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.commands.prove.cases import Case
from meshwright.commands.prove.compare_records import compare_records
from meshwright.commands.prove.measure import LATER_STEP, Measurement


@dataclass(frozen=True)
class Bounds:
    """Relative errors up to which a case equals its reference; docs/correctness.md has reasons."""

    loss: float
    """Of step 1."""
    grad_norm: float
    """Of step 1."""
    gradient: float
    """For a parameter: norm of the difference over the norm."""
    update: float
    """For a parameter, of its change by the first steps: norm of the difference over the
    norm."""
    later_loss: float
    """Of the steps after the first, when weights differ by rounding; and of
    the validation, which is after it."""
    later_grad_norm: float
    later_gradient: float = math.inf
    """As `gradient`, after two updates, of models with experts."""
    other_choices: float = 1e-4
    """Part of tokens whose router may choose other experts than one process's, by rounding."""
    choice_gap: float = math.inf
    """By how much scores of such a choice may differ from the scores of one process's choice."""
    rounding: float = 0.0
    """Added to `gradient`: times the parameter's own error of rounding, in the reference."""
    update_rounding: float = 0.0
    """Added to `update`, likewise."""
    stored: float = 0.0
    """Added to `gradient`, for a parameter that is stored in bf16: its fp32 sum is rounded."""
    different: float = math.inf
    """Part of the elements of the gradients in bf16 that may differ at all. Of the others half may:
    fp32 sums of another order differ in their last bit."""


BF16 = 2.0**-8
"""Unit roundoff of bfloat16: the largest relative error of one rounding."""

TIES = 1 / 32
"""Part of gradients' elements that two sums in fp32 may round to different bf16 numbers."""

OTHERS = 8 * BF16
"""Part of tokens that may get other experts by rounding in bf16; 0.006 were seen in six steps."""

NAMED = 3
"""Tensors of a checkpoint in one line."""

SUMS = Bounds(1e-5, 1e-4, 1e-4, 16 * BF16, BF16 / 8, BF16, other_choices=OTHERS)
"""Of products of the same bf16 numbers, whose sums are in fp32."""

FLOAT8_SUMS = Bounds(1e-5, 1e-4, 1e-4, 64 * BF16, BF16 / 2, 4 * BF16)
"""The same in float8: numbers are 16 times as far apart, and errors 4 times as large."""

BOUNDS = {
    "fp32": Bounds(1e-5, 1e-4, 1e-4, 1e-3, 1e-5, 1e-4, later_gradient=1e-4, choice_gap=1e-5),
    "bf16 sums": SUMS,
    # products of numbers that were added up in parts, and rounded
    "bf16": Bounds(BF16, 4 * BF16, 1e-4, 0.5, BF16, 4 * BF16, other_choices=OTHERS, rounding=2.0),
    # after each step a weight may round to a neighbor, two roundings away: 18 until step 10
    "user types": replace(
        SUMS, later_loss=18 * BF16 / 8, later_grad_norm=18 * BF16, update_rounding=2.0
    ),
    "float8 sums": FLOAT8_SUMS,
    "float8 user types": replace(
        FLOAT8_SUMS, later_loss=72 * BF16 / 8, later_grad_norm=72 * BF16, update_rounding=2.0
    ),
    "float8": Bounds(4 * BF16, 16 * BF16, 1e-4, 1.0, 4 * BF16, 16 * BF16, rounding=2.0),
}
"""By `Case.bounds`."""


def bounds_of(case: Case) -> Bounds:
    """Return the entry of `BOUNDS`, widened for the config's types of gradients."""
    bounds, training = BOUNDS[case.bounds], case.config.training
    if training.mixed_precision_reduce == "bfloat16":
        # both ranks' parts and their sum are rounded, for each of 4 microbatches; uncorrelated
        # ones are together sqrt(4) times as large as their sum
        gradient = bounds.gradient + 3 * BF16 * 2
        # Adam's update is nearly a sign, and as large a part of the signs may change
        update = 2 * math.sqrt(gradient)
        return replace(bounds, gradient=gradient, grad_norm=gradient, update=update)
    if training.dtype == "bfloat16":
        return replace(bounds, stored=2 * BF16, different=TIES)
    return bounds


@dataclass
class Verdict:
    """How far a case is from the reference, where, and the failures."""

    failures: list[str] = field(default_factory=list)
    """One line each, naming the quantity or the parameter; none: the case is proved, if it ran."""
    not_run: str = ""
    """The reason, if this machine cannot run the case."""
    errors: dict[str, float | str] = field(default_factory=dict)
    """Of each quantity in `MEANINGS`, by its name; and `OTHER_CHOICES`, `LATER_GRADIENT`,
    `GRADIENT_BOUND` and `DIFFERENT`."""


MEANINGS = {
    "weights": "initial weights that differ, bit by bit (bound: 0)",
    "batches": "samples that differ, bit by bit (bound: 0)",
    "loss": "largest relative error of the loss, over all steps and ranks "
    f"(bound in fp32: {BOUNDS['fp32'].loss:g})",
    "norm": f"the same of the gradient norm ({BOUNDS['fp32'].grad_norm:g})",
    "gradient": "relative error of a parameter's gradient at step 1, as norm of the difference "
    "over norm, and its bound: of the parameter nearest to its bound",
    "of": "that parameter",
    "update": "the same error of the sum of a parameter's first updates "
    f"({BOUNDS['fp32'].update:g})",
    "validation": f"largest relative error of its figures ({BOUNDS['fp32'].later_loss:g})",
    "metrics": "tokens, rates per device, learning rate, epochs and other figures of records that "
    "differ from one process's, of any step (bound: 0)",
    "resume": "tensors and figures that a save and a resume have changed, bit by bit (bound: 0)",
}
"""Of the columns of the table that are errors."""

OTHER_CHOICES, LATER_GRADIENT = "other choices", "later gradient"
"""Tokens, over all ranks and layers, whose router would have chosen other experts; and the largest
error of a gradient of step `LATER_STEP`."""

GRADIENT_BOUND, DIFFERENT = "gradient's bound", "different"
"""Keys of the bound on the error that "gradient" is, and of the part of the elements of gradients
in bf16 that differ."""


@dataclass(frozen=True)
class Reference:
    """The measurements of one process."""

    seen: Measurement
    shapes: Mapping[str, tuple[int, ...]]
    """Of every parameter."""
    norms: Mapping[str, Mapping[str, float]]
    """2-norms, by kind, of `COMPARED`, and by name."""
    roundings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By kind, "gradients" and "updates", and by name: relative error against one process that has
    wider types, the largest among the layers' parameters of the name."""
    in_bf16: Collection[str] = ()
    """Parameters whose gradients are in bf16, so none of a module in fp32."""


def compare(
    reference: Reference, ranks: Sequence[Measurement], bounds: Bounds = BOUNDS["fp32"]
) -> Verdict:
    """Hold every rank's measurement against the reference."""
    verdict, seen = Verdict(), reference.seen
    _compare_weights(verdict, reference, ranks)
    _compare_samples(verdict, seen, ranks)
    losses, norms = ([getattr(rank, of) for rank in ranks] for of in ("losses", "grad_norms"))
    verdict.errors["loss"] = _compare_series(
        verdict, "loss", seen.losses, losses, (bounds.loss, bounds.later_loss)
    )
    verdict.errors["norm"] = _compare_series(
        verdict, "gradient norm", seen.grad_norms, norms, (bounds.grad_norm, bounds.later_grad_norm)
    )
    _compare_gradients(verdict, reference, ranks, bounds)
    _check_reductions(verdict, ranks)
    _compare_updates(verdict, reference, ranks, bounds)
    _compare_routers(verdict, reference, ranks, bounds)
    _compare_validation(verdict, seen, ranks, bounds.later_loss)
    _compare_metrics(verdict, reference, ranks, bounds)
    if wrong := [number for number, rank in enumerate(ranks) if rank.unlike_before]:
        names = ", ".join(ranks[wrong[0]].unlike_before)
        verdict.failures.append(
            f"a second validation: differs from the first in {names}, on rank {_ranks(wrong)}"
        )
    _compare_resume(verdict, ranks)
    return verdict


def _compare_weights(verdict: Verdict, reference: Reference, ranks: Sequence[Measurement]) -> None:
    num_different = 0
    for name, shape in reference.shapes.items():
        weights = [(i, rank.shards["weights"]) for i, rank in enumerate(ranks)]
        boxes = [(i, shards[name]) for i, shards in weights if name in shards]
        held = {(box.offset, box.shape) for _, box in boxes}
        num_held = sum(math.prod(shape) for _, shape in held)
        if num_held != math.prod(shape):
            verdict.failures.append(
                f"initial {name}: ranks hold {num_held} of {math.prod(shape)} elements"
            )
        wrong = [i for i, box in boxes if box.num_different]
        if wrong:
            num_different += sum(box.num_different for _, box in boxes)
            verdict.failures.append(f"initial {name}: differs on rank {_ranks(wrong)}")
    verdict.errors["weights"] = num_different


def _compare_samples(
    verdict: Verdict, reference: Measurement, ranks: Sequence[Measurement]
) -> None:
    found: dict[tuple[int, int], list[int]] = {}
    for number, rank in enumerate(ranks):
        for place, sample in rank.samples.items():
            if sample != reference.samples.get(place):
                found.setdefault(place, []).append(number)
    verdict.errors["batches"] = len(found)
    if found:
        (step, index), wrong = min(found.items())
        verdict.failures.append(
            f"batches: {len(found)} samples differ; the first is sample {index} of step {step}, "
            f"on rank {_ranks(wrong)}"
        )
    read = {place for rank in ranks for place in rank.samples}
    if missing := reference.samples.keys() - read:
        verdict.failures.append(f"batches: {len(missing)} samples are read by no rank")


def _compare_series(
    verdict: Verdict,
    quantity: str,
    wanted: Sequence[float],
    ranks: Sequence[Sequence[float]],
    bounds: tuple[float, float],
) -> float:
    """Return the largest relative error over steps and ranks.

    Args:
        bounds: of the first step, and of those after it.
    """
    errors = [
        (_relative(abs(got - want), want), step, rank, got, want)
        for rank, series in enumerate(ranks)
        for step, (got, want) in enumerate(zip(series, wanted, strict=True), 1)
    ]
    bad = [entry for entry in errors if not entry[0] <= bounds[entry[1] > 1]]
    if bad:
        error, step, rank, got, want = min(bad, key=lambda entry: entry[1])
        verdict.failures.append(
            f"{quantity}: {got:.7g} instead of {want:.7g} at step {step} on rank {rank}, "
            f"relative error {error:.1e}"
        )
    return _worst(error for error, *_ in errors)


def _compare_gradients(
    verdict: Verdict, reference: Reference, ranks: Sequence[Measurement], bounds: Bounds
) -> None:
    errors = []
    for error, name in _errors("gradients", reference, ranks):
        bound = bounds.gradient + (bounds.stored if name in reference.in_bf16 else 0.0)
        if bounds.rounding:
            bound += bounds.rounding * reference.roundings["gradients"][name]
        if not error <= bound:
            text = f"gradient of {name}: relative error {error:.1e}, bound {bound:.1e}"
            verdict.failures.append(text)
        errors.append((error, bound, name))
    shards = (item for rank in ranks for item in rank.shards["gradients"].items())
    boxes = [box for name, box in shards if name in reference.in_bf16]
    num_elements = sum(math.prod(box.shape) for box in boxes)
    part = sum(box.num_different for box in boxes) / max(num_elements, 1)
    verdict.errors[DIFFERENT] = part
    if not part <= bounds.different:
        text = f"{part:.1%} of their elements differ, bound {bounds.different:.1%}"
        verdict.failures.append(f"gradients in bfloat16: {text}")
    worst, bound, name = max(errors, key=lambda one: (math.isnan(one[0]), one[0] / one[1]))
    verdict.errors |= {"gradient": worst, GRADIENT_BOUND: bound, "of": name if worst else ""}


def _check_reductions(verdict: Verdict, ranks: Sequence[Measurement]) -> None:
    """Add the sums over ranks in too narrow a type, which no bound on their values can tell."""
    if wrong := [number for number, rank in enumerate(ranks) if rank.narrow_reductions]:
        names = ranks[wrong[0]].narrow_reductions
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        verdict.failures.append(
            f"sums over ranks: gradients of {', '.join(names[:NAMED])}{more}, below "
            f"training.mixed_precision_reduce, on rank {_ranks(wrong)}"
        )


def _compare_updates(
    verdict: Verdict, reference: Reference, ranks: Sequence[Measurement], bounds: Bounds
) -> None:
    errors = _errors("updates", reference, ranks)
    verdict.errors["update"] = errors[0][0]

    def bound(name: str) -> float:
        rounding = bounds.update_rounding and reference.roundings["updates"][name]
        return bounds.update + bounds.update_rounding * rounding

    if bad := [(error, name) for error, name in errors if not error <= bound(name)]:
        worst, name = bad[0]
        verdict.failures.append(
            f"update: wrong for {len(bad)} of {len(errors)} parameters; most for {name}, "
            f"relative error {worst:.1e}"
        )


def _compare_routers(
    verdict: Verdict, reference: Reference, ranks: Sequence[Measurement], bounds: Bounds
) -> None:
    """Compare what routers of experts have seen and done; of other models nothing is measured."""
    errors = _errors("later_gradients", reference, ranks)
    verdict.errors[LATER_GRADIENT] = errors[0][0] if errors else 0.0
    for error, name in errors:
        if not error <= bounds.later_gradient:
            text = f"gradient of {name} at step {LATER_STEP}: relative error {error:.1e}"
            verdict.failures.append(text)
    others, tokens = (sum(rank.other_choices[i] for rank in ranks) for i in (0, 1))
    verdict.errors[OTHER_CHOICES] = others
    if others > bounds.other_choices * tokens:
        verdict.failures.append(f"experts: chosen otherwise for {others} of {tokens} tokens")
    gap = _worst(rank.choice_gap for rank in ranks)
    if not gap <= bounds.choice_gap:
        verdict.failures.append(f"experts: chosen otherwise where scores differ by {gap:.1e}")
    # every rank takes the reference's choices: where both add up, their states are equal
    places = ["one process", *(f"rank {number}" for number in range(len(ranks)))]
    for place, seen in zip(places, [reference.seen, *ranks], strict=True):
        if seen.wrong_counts:
            names = ", ".join(seen.wrong_counts[:NAMED])
            verdict.failures.append(f"state: not as the choices add up: {names}, on {place}")


def _errors(
    kind: str, reference: Reference, ranks: Sequence[Measurement]
) -> list[tuple[float, str]]:
    """Return the relative error of every tensor of a kind, put together from the ranks' shards, and
    its name; the worst first."""
    errors = []
    for name, norm in reference.norms[kind].items():
        worst: dict[tuple[int, ...], float] = {}  # of the ranks that hold the same part
        for rank in ranks:
            if (box := rank.shards[kind].get(name)) is not None:
                worst[box.offset] = _worst([worst.get(box.offset, 0.0), box.error])
        errors.append((_relative(math.sqrt(sum(worst.values())), norm), name))
    return sorted(errors, key=lambda one: (math.isnan(one[0]), *one), reverse=True)


def _compare_validation(
    verdict: Verdict, reference: Measurement, ranks: Sequence[Measurement], bound: float
) -> None:
    found = [0.0]
    for name, want in reference.validation.items():
        got = [rank.validation.get(name, math.nan) for rank in ranks]
        errors = [_relative(abs(figure - want), want) for figure in got]
        found += errors
        # the perplexity's error is the loss's, times the loss
        limit = bound * max(1, reference.validation["validation/loss"])
        if wrong := [number for number, error in enumerate(errors) if not error <= limit]:
            first = wrong[0]
            verdict.failures.append(
                f"{name}: {got[first]:.7g} instead of {want:.7g} on rank {_ranks(wrong)}, "
                f"relative error {errors[first]:.1e}"
            )
    verdict.errors["validation"] = _worst(found)


def _compare_metrics(
    verdict: Verdict, reference: Reference, ranks: Sequence[Measurement], bounds: Bounds
) -> None:
    """Compare records. Norms of groups differ by no more than their gradients do; later figures are
    bounded only where nothing but fp32 sums differs."""
    roundings = reference.roundings.get("gradients", {}).values()
    gradient = bounds.gradient + bounds.stored + bounds.rounding * max(roundings, default=0.0)
    is_fp32 = bounds.later_grad_norm <= bounds.grad_norm
    lines = compare_records(
        reference.seen.records,
        [rank.records for rank in ranks],
        sums=max(gradient, bounds.grad_norm),
        later_sums=bounds.later_grad_norm if is_fp32 else math.inf,
    )
    verdict.failures += lines
    verdict.errors["metrics"] = len(lines)


def _compare_resume(verdict: Verdict, ranks: Sequence[Measurement]) -> None:
    num_different = 0
    for number, rank in enumerate(ranks):
        repeated = {place: rank.samples.get(place) for place in rank.resumed_samples}
        samples = ["samples"] if rank.resumed_samples != repeated else []
        for what, wrong in (
            ("checkpoint: does not hold", rank.wrong_in_checkpoint),
            ("loaded: not as it was saved:", rank.wrong_after_load),
            ("resume: not as without it:", samples + rank.wrong_after_resume),
        ):
            num_different += len(wrong)
            if wrong:
                more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
                names = ", ".join(wrong[:NAMED])
                verdict.failures.append(f"{what} {names}{more}, on rank {number}")
    verdict.errors["resume"] = num_different


def _worst(errors: Iterable[float]) -> float:
    return max(errors, key=lambda error: (math.isnan(error), error))


def _relative(difference: float, of: float) -> float:
    return difference / of if of else (0.0 if difference == 0 else math.inf)


def _ranks(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))
