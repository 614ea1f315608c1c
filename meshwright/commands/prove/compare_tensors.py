"""Compares the tensors of a case, put together from the shards of all ranks."""

import math
from collections.abc import Collection, Sequence

from meshwright.commands.prove.bounds import ROUNDED_AGAIN, Bounds
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


def compare_weights(verdict: Verdict, reference: Reference, ranks: Sequence[Measurement]) -> None:
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


def compare_gradients(
    verdict: Verdict, reference: Reference, ranks: Sequence[Measurement], bounds: Bounds
) -> None:
    errors, tied = [], tied_over_stages(reference, bounds)
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


def tied_over_stages(reference: Reference, bounds: Bounds) -> set[str]:
    """Return the name of the embedding if its gradient is rounded otherwise because another stage
    has it too: as the output's weight, or since layers for MTP look up tokens."""
    is_tied = "output.weight" not in reference.shapes
    has_mtp = any(name.endswith(".eh_proj.weight") for name in reference.shapes)
    return {"tok_embeddings.weight"} if bounds.tied > 0 and (is_tied or has_mtp) else set()


def norm_of_tied(reference: Reference, bounds: Bounds) -> float:
    """Return what the rounding of an embedding that two stages have adds to the bound of the norm
    of all gradients. If a part of a vector that has the share s of its norm changes by d, relative
    to the part, then the norm does by s^2 d, to first order."""
    squares = {name: norm**2 for name, norm in reference.norms["gradients"].items()}
    shares = (squares[name] for name in tied_over_stages(reference, bounds) & squares.keys())
    return bounds.tied * sum(shares) / (sum(squares.values()) or 1.0)


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


def check_reductions(verdict: Verdict, ranks: Sequence[Measurement]) -> None:
    """Add the sums over ranks in too narrow a type, which no bound on their values can tell."""
    if wrong := [number for number, rank in enumerate(ranks) if rank.narrow_reductions]:
        names = some_names(ranks[wrong[0]].narrow_reductions)
        verdict.failures.append(
            f"sums over ranks: gradients of {names}, below "
            f"training.mixed_precision_reduce, on rank {join_ranks(wrong)}"
        )


def compare_updates(
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


def compare_routers(
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
