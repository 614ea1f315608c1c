"""From the measurements of all ranks to a verdict."""

import math
from collections.abc import Sequence

from meshwright.commands.prove.bounds import BOUNDS, Bounds
from meshwright.commands.prove.compare_records import compare_records
from meshwright.commands.prove.compare_tensors import (
    check_reductions,
    compare_gradients,
    compare_routers,
    compare_updates,
    compare_weights,
    norm_of_tied,
    tied_over_stages,
)
from meshwright.commands.prove.measurement import Measurement, Reference
from meshwright.commands.prove.verdict import Verdict, join_ranks, relative, some_names, worst_of


def compare(
    reference: Reference, ranks: Sequence[Measurement], bounds: Bounds = BOUNDS["fp32"]
) -> Verdict:
    """Hold every rank's measurement against the reference."""
    verdict, seen = Verdict(), reference.seen
    compare_weights(verdict, reference, ranks)
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
        bounds.grad_norm + norm_of_tied(reference, bounds),
        bounds.later_grad_norm,
    )
    compare_gradients(verdict, reference, ranks, bounds)
    check_reductions(verdict, ranks)
    compare_updates(verdict, reference, ranks, bounds)
    compare_routers(verdict, reference, ranks, bounds)
    _compare_validation(verdict, seen, ranks, bounds.later_loss)
    _compare_metrics(verdict, reference, ranks, bounds)
    _compare_second_validation(verdict, ranks)
    _compare_resume(verdict, ranks)
    return verdict


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


def _compare_second_validation(verdict: Verdict, ranks: Sequence[Measurement]) -> None:
    """Check that a second validation gives the same as the first, since it changes nothing."""
    if wrong := [number for number, rank in enumerate(ranks) if rank.unlike_before]:
        names = ", ".join(ranks[wrong[0]].unlike_before)
        verdict.failures.append(
            f"a second validation: differs from the first in {names}, on rank {join_ranks(wrong)}"
        )


def _compare_metrics(
    verdict: Verdict, reference: Reference, ranks: Sequence[Measurement], bounds: Bounds
) -> None:
    """Compare records. Norms of groups differ by no more than their gradients do; later metrics are
    bounded only where nothing but fp32 sums differs."""
    roundings = reference.roundings.get("gradients", {}).values()
    gradient = bounds.gradient + bounds.stored + bounds.rounding * max(roundings, default=0.0)
    gradient += bounds.tied if tied_over_stages(reference, bounds) else 0.0
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
