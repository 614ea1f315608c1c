"""The words of `meshwright replay`."""

import textwrap
from collections.abc import Iterator, Sequence
from statistics import median

from meshwright.commands.replay.compared import ComparedStep, metrics_of
from meshwright.commands.replay.replay import Replayed
from meshwright.commands.replay.samples import SampleTable
from meshwright.commands.replay.scan import Scan, ScannedDocument
from meshwright.system.log import align

WIDTH, KEY_WIDTH = 74, 16
"""Columns of a line, and of its key."""


def entry(key: str, text: str) -> Iterator[str]:
    """Yield the lines of a key and its text."""
    # a path stays whole, so that it can be copied
    lines = textwrap.wrap(
        text, WIDTH - KEY_WIDTH - 2, break_long_words=False, break_on_hyphens=False
    )
    for line in lines or [""]:
        yield f"  {key:{KEY_WIDTH}}{line}"
        key = ""


def lines_of_replay(replayed: Replayed, groups: Sequence[str], run: str) -> Iterator[str]:
    """Yield the lines about the steps and about the samples of the last.

    Args:
        groups: names of the groups of parameters whose norms were taken.
        run: the dump folder, as the user has named it.
    """
    *before, last = replayed.steps
    if before:
        yield from entry(_steps(before), _agreement(before, replayed))
    yield from _of_last(replayed, groups)
    yield from _of_horizon(replayed)
    yield ""
    yield from _of_samples(replayed.table, last.taken["step"])
    yield from _next(replayed, run)


def _steps(steps: Sequence[ComparedStep]) -> str:
    first, last = steps[0].taken["step"], steps[-1].taken["step"]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _agreement(steps: Sequence[ComparedStep], replayed: Replayed) -> str:
    """Return how well steps agree with their records, in words."""
    recorded = [step for step in steps if step.recorded is not None]
    if not recorded:
        return "not in the record (metrics.every_step keeps all)"
    which = "" if len(recorded) == len(steps) else f" in {len(recorded)} of them"
    if all(step.is_equal for step in recorded):
        return f"equal to the record in every bit{which}"
    loss, norm = (max(step.differences[index] for step in recorded) for index in (0, 1))
    text = f"as recorded{which} but for rounding"
    if any(replayed.is_beyond(step.differences) for step in recorded):
        text = "not as recorded"
    text += f": loss {loss:.1e}, gradient norm {norm:.1e}"
    if rounding := [step.rounding for step in steps if step.rounding]:
        of_loss, of_norm = (max(row[index] for row in rounding) for index in (0, 1))
        text += f" (rounding twin: {of_loss:.1e}, {of_norm:.1e})"
    return text


def _of_last(replayed: Replayed, groups: Sequence[str]) -> Iterator[str]:
    *before, last = replayed.steps
    loss, grad_norm, *norms = metrics_of(last.taken)
    of_loss, of_norm = f"loss {loss:.7g}", f"gradient norm {grad_norm:.6g}"
    if last.recorded is not None:
        loss_then, norm_then, *_ = metrics_of(last.recorded)
        of_loss += f" (recorded {loss_then:.7g})"
        of_norm += f" (recorded {norm_then:.6g})"
    yield from entry(f"step {last.taken['step']}", of_loss)
    yield from entry("", of_norm)
    if len(before) > 3:
        times = grad_norm / median(one.taken["grad_norm"] for one in before)
        yield from entry("", f"{times:.2g} x the median norm of {_steps(before)}")
    yield from entry("", _agreement([last], replayed))
    if norms:
        ordered = sorted(zip(groups, norms, strict=True), key=lambda pair: -pair[1])
        yield from entry("norms", ", ".join(f"{name} {value:.3g}" for name, value in ordered))


def _of_horizon(replayed: Replayed) -> Iterator[str]:
    if beyond := replayed.beyond_horizon:
        text = (
            f"rounding by itself changes the loss of step {beyond.taken['step']} by "
            f"{beyond.rounding[0]:.1e}: replay from a nearer checkpoint, or on the mesh of the run"
        )
        yield from entry("beyond horizon", text)
    elif other := replayed.not_as_recorded:
        index, (most, bound) = max(
            enumerate(zip(other.differences, replayed.bounds, strict=False)),
            key=lambda pair: pair[1][0] / pair[1][1],
        )
        what = ("the loss", "the gradient norm")[index] if index < 2 else "the norm of a group"
        text = (
            f"{what} of step {other.taken['step']} by {most:.1e}, and rounding explains "
            f"{bound:.1e}. The code, the data, a kernel or the hardware isn't what it was; "
            "history.jsonl has what the run had"
        )
        yield from entry("differs", text)


def _of_samples(table: SampleTable, step: int) -> Iterator[str]:
    yield f"samples of step {step} that deviate most"
    rows: list[Sequence[str]] = [("sample", "loss", "deviations", "gradient", "documents")]
    for sample in table.samples:
        norm = "" if sample.grad_norm is None else f"{sample.grad_norm:.4g}"
        documents = ", ".join(part.name for part in sample.documents[:3])
        if len(sample.documents) > 3:
            documents += f", {len(sample.documents) - 3} more"
        rows.append(
            (str(sample.index), f"{sample.loss:.3f}", f"{sample.deviations:+.1f}", norm, documents)
        )
    yield align(rows)
    out = [sample for sample in table.samples if sample.index in table.without]
    if not out:
        yield "no loss stands out: the cause is no single sample, or one with a large gradient"
        return
    if table.norm_without is not None:
        names = ", ".join(str(sample.index) for sample in out)
        samples = "samples" if len(out) > 1 else "sample"
        yield f"without {samples} {names} the gradient norm would be {table.norm_without:.4g}"
    told = set[str]()
    for sample in out:
        part = sample.documents[0]
        if part.name in told:
            continue
        told.add(part.name)
        tokens = ", ".join(f"{text!r} {loss:.1f}" for text, loss in sample.costliest)
        yield from entry(part.name, part.place)
        yield from entry("", f"costliest tokens of sample {sample.index}: {tokens}")


def _next(replayed: Replayed, run: str) -> Iterator[str]:
    table, step = replayed.table, replayed.steps[-1].taken["step"]
    named = [s.documents[0] for s in table.samples if s.index in table.without]
    cached = [part.name for part in named if part.place]
    if not cached:
        return
    yield "next:"
    yield f"  meshwright data {run}/config.toml --documents {cached[0]}"
    yield f"  meshwright replay {run} --step {step} --scan"
    name, _, number = cached[0].rpartition(" ")
    is_from_checkpoint = replayed.steps[0].taken["step"] > 1
    back = f"--checkpoint.rewind_to {step - 1}" if is_from_checkpoint else "--job.dump_folder NEW"
    yield f"  meshwright train CONFIG {back} \\"
    yield f"      --training.exclude '[\"{name} document {number}\"]'"


def lines_of_scan(scan: Scan) -> Iterator[str]:
    """Yield the documents at both ends."""
    for words, documents in (("highest", scan.highest), ("lowest", scan.lowest)):
        yield f"{words} loss of {scan.num_documents:,} documents"
        rows: list[Sequence[str]] = [("document", "loss", "deviations", "tokens", "place")]
        yield align([*rows, *map(_row, documents)])


def _row(document: ScannedDocument) -> Sequence[str]:
    loss, deviations = f"{document.loss:.3f}", f"{document.deviations:+.1f}"
    return document.name, loss, deviations, f"{document.tokens:,}", document.place
