"""From the measurements of all ranks to a verdict."""

import math
from collections.abc import Collection, Sequence

from meshwright.commands.prove.bounds import BOUNDS, ROUNDED_AGAIN, Bounds
from meshwright.commands.prove.compare_records import compare_records
from meshwright.commands.prove.measurement import LATER_STEP, Measurement, Reference
from meshwright.commands.prove.verdict import (
    DIFFERENT,
    GRADIENT_BOUND,
    LATER_GRADIENT,
    OTHER_CHOICES,
    Verdict,
    join_ranks,
    relative,
    some_names,
    worst_of,
)


def compare(
    reference: Reference, ranks: Sequence[Measurement], bounds: Bounds = BOUNDS["fp32"]
) -> Verdict:
    """Hold every rank's measurement against the reference."""
    verdict, seen = Verdict(), reference.seen
    _compare_weights(verdict, reference, ranks)
    _compare_samples(verdict, seen, ranks)
    verdict.errors["loss"] = _compare_series(
        verdict,
        "loss",
        seen.losses,
        [rank.losses for rank in ranks],
        bounds.loss,
        bounds.later_loss,
    )
    verdict.errors["norm"] = _compare_series(
        verdict,
        "gradient norm",
        seen.grad_norms,
        [rank.grad_norms for rank in ranks],
        bounds.grad_norm + _norm_of_tied(reference, bounds),
        bounds.later_grad_norm,
    )
    _compare_gradients(verdict, reference, ranks, bounds)
    _check_reductions(verdict, ranks)
    _compare_updates(verdict, reference, ranks, bounds)
    _compare_routers(verdict, reference, ranks, bounds)
    _compare_validation(verdict, seen, ranks, bounds.later_loss)
    _compare_metrics(verdict, reference, ranks, bounds)
    _compare_second_validation(verdict, ranks)
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
            verdict.failures.append(f"initial {name}: differs on rank {join_ranks(wrong)}")
    verdict.errors["weights"] = num_different


def _compare_samples(
    verdict: Verdict, reference: Measurement, ranks: Sequence[Measurement]
) -> None:
    wrong_ranks: dict[tuple[int, int], list[int]] = {}
    for number, rank in enumerate(ranks):
        for place, sample in rank.samples.items():
            if sample != reference.samples.get(place):
                wrong_ranks.setdefault(place, []).append(number)
    verdict.errors["batches"] = len(wrong_ranks)
    if wrong_ranks:
        (step, index), numbers = min(wrong_ranks.items())
        verdict.failures.append(
            f"batches: {len(wrong_ranks)} samples differ; the first is sample {index} of step "
            f"{step}, on rank {join_ranks(numbers)}"
        )
    read = {place for rank in ranks for place in rank.samples}
    if missing := reference.samples.keys() - read:
        verdict.failures.append(f"batches: {len(missing)} samples are read by no rank")


def _compare_series(
    verdict: Verdict,
    quantity: str,
    wanted: Sequence[float],
    ranks: Sequence[Sequence[float]],
    bound: float,
    later_bound: float,
) -> float:
    """Return the largest relative error over steps and ranks.

    Args:
        bound: of the first step.
        later_bound: of the steps after it.
    """
    errors = [
        (relative(abs(got - want), want), step, rank, got, want)
        for rank, series in enumerate(ranks)
        for step, (got, want) in enumerate(zip(series, wanted, strict=True), 1)
    ]
    bad = [entry for entry in errors if not entry[0] <= (bound if entry[1] == 1 else later_bound)]
    if bad:
        error, step, rank, got, want = min(bad, key=lambda entry: entry[1])
        verdict.failures.append(
            f"{quantity}: {got:.7g} instead of {want:.7g} at step {step} on rank {rank}, "
            f"relative error {error:.1e}"
        )
    return worst_of(error for error, *_ in errors)


def _norm_of_tied(reference: Reference, bounds: Bounds) -> float:
    """Return what the rounding of an embedding that two stages have adds to the bound of the norm
    of all gradients. If a part of a vector that has the share s of its norm changes by d, relative
    to the part, then the norm does by s^2 d, to first order."""
    squares = {name: norm**2 for name, norm in reference.norms["gradients"].items()}
    shares = (squares[name] for name in _tied_over_stages(reference, bounds) & squares.keys())
    return bounds.tied * sum(shares) / (sum(squares.values()) or 1.0)


def _tied_over_stages(reference: Reference, bounds: Bounds) -> set[str]:
    """Return the name of the embedding if its gradient is rounded otherwise because another stage
    has it too: as the output's weight, or since layers for MTP look up tokens."""
    is_tied = "output.weight" not in reference.shapes
    has_mtp = any(name.endswith(".eh_proj.weight") for name in reference.shapes)
    return {"tok_embeddings.weight"} if bounds.tied > 0 and (is_tied or has_mtp) else set()


def _compare_gradients(
    verdict: Verdict, reference: Reference, ranks: Sequence[Measurement], bounds: Bounds
) -> None:
    errors, tied = [], _tied_over_stages(reference, bounds)
    for error, name in _errors("gradients", reference, ranks):
        bound = bounds.gradient + (bounds.stored if name in reference.in_bf16 else 0.0)
        bound += bounds.tied if name in tied else 0.0
        if bounds.rounding:
            bound += bounds.rounding * reference.roundings["gradients"][name]
        if not error <= bound:
            text = f"gradient of {name}: relative error {error:.1e}, bound {bound:.1e}"
            verdict.failures.append(text)
        errors.append((error, bound, name))
    in_bf16 = {*reference.in_bf16}
    part = _check_different(verdict, ranks, in_bf16 - tied, bounds.different)
    _check_different(verdict, ranks, in_bf16 & tied, ROUNDED_AGAIN)
    verdict.errors[DIFFERENT] = part
    worst, bound, name = max(errors, key=lambda one: (math.isnan(one[0]), one[0] / one[1]))
    verdict.errors |= {"gradient": worst, GRADIENT_BOUND: bound, "of": name if worst else ""}


def _check_different(
    verdict: Verdict, ranks: Sequence[Measurement], names: Collection[str], bound: float
) -> float:
    """Return the part of the elements of these gradients that differ at all; it has a bound."""
    shards = (item for rank in ranks for item in rank.shards["gradients"].items())
    boxes = [box for name, box in shards if name in names]
    num_elements = sum(math.prod(box.shape) for box in boxes)
    part = sum(box.num_different for box in boxes) / max(num_elements, 1)
    if not part <= bound:
        text = f"{part:.1%} of their elements differ, bound {bound:.1%}"
        verdict.failures.append(f"gradients in bfloat16: {text}")
    return part


def _check_reductions(verdict: Verdict, ranks: Sequence[Measurement]) -> None:
    """Add the sums over ranks in too narrow a type, which no bound on their values can tell."""
    if wrong := [number for number, rank in enumerate(ranks) if rank.narrow_reductions]:
        names = some_names(ranks[wrong[0]].narrow_reductions)
        verdict.failures.append(
            f"sums over ranks: gradients of {names}, below "
            f"training.mixed_precision_reduce, on rank {join_ranks(wrong)}"
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
    gap = worst_of(rank.choice_gap for rank in ranks)
    if not gap <= bounds.choice_gap:
        verdict.failures.append(f"experts: chosen otherwise where scores differ by {gap:.1e}")
    # every rank takes the reference's choices: where both add up, their states are equal
    places = ["one process", *(f"rank {number}" for number in range(len(ranks)))]
    for place, seen in zip(places, [reference.seen, *ranks], strict=True):
        if seen.wrong_counts:
            names = some_names(seen.wrong_counts)
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
                worst[box.offset] = worst_of([worst.get(box.offset, 0.0), box.error])
        errors.append((relative(math.sqrt(sum(worst.values())), norm), name))
    return sorted(errors, key=lambda one: (math.isnan(one[0]), *one), reverse=True)


def _compare_validation(
    verdict: Verdict, reference: Measurement, ranks: Sequence[Measurement], bound: float
) -> None:
    all_errors = [0.0]
    for name, want in reference.validation.items():
        got = [rank.validation.get(name, math.nan) for rank in ranks]
        errors = [relative(abs(figure - want), want) for figure in got]
        all_errors += errors
        # the perplexity's error is the loss's, times the loss
        limit = bound * max(1, reference.validation["validation/loss"])
        if wrong := [number for number, error in enumerate(errors) if not error <= limit]:
            first = wrong[0]
            verdict.failures.append(
                f"{name}: {got[first]:.7g} instead of {want:.7g} on rank {join_ranks(wrong)}, "
                f"relative error {errors[first]:.1e}"
            )
    verdict.errors["validation"] = worst_of(all_errors)


def _compare_metrics(
    verdict: Verdict, reference: Reference, ranks: Sequence[Measurement], bounds: Bounds
) -> None:
    """Compare records. Norms of groups differ by no more than their gradients do; later metrics are
    bounded only where nothing but fp32 sums differs."""
    roundings = reference.roundings.get("gradients", {}).values()
    gradient = bounds.gradient + bounds.stored + bounds.rounding * max(roundings, default=0.0)
    gradient += bounds.tied if _tied_over_stages(reference, bounds) else 0.0
    is_fp32 = bounds.later_grad_norm <= bounds.grad_norm
    lines = compare_records(
        reference.seen.records,
        [rank.records for rank in ranks],
        sums=max(gradient, bounds.grad_norm),
        later_sums=bounds.later_grad_norm if is_fp32 else math.inf,
        slack=reference.seen.slack,
        # a user's function of rounded numbers, for example a count of zeros, has no bound
        own=bounds.grad_norm if bounds == BOUNDS["fp32"] else math.inf,
    )
    verdict.failures += lines
    verdict.errors["metrics"] = len(lines)


def _compare_second_validation(verdict: Verdict, ranks: Sequence[Measurement]) -> None:
    """Check that a second validation gives the same as the first, since it changes nothing."""
    if wrong := [number for number, rank in enumerate(ranks) if rank.unlike_before]:
        names = ", ".join(ranks[wrong[0]].unlike_before)
        verdict.failures.append(
            f"a second validation: differs from the first in {names}, on rank {join_ranks(wrong)}"
        )


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
                verdict.failures.append(f"{what} {some_names(wrong)}, on rank {number}")
    verdict.errors["resume"] = num_different
