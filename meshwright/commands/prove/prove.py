"""Runs cases one after the other, and judges each."""

import contextlib
import functools
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.commands.prove.bounds import bounds_of
from meshwright.commands.prove.cases import Case, Kind, reference_case
from meshwright.commands.prove.compare import compare
from meshwright.commands.prove.measure import measure, record_reference
from meshwright.commands.prove.measurement import COMPARED, Reference
from meshwright.commands.prove.on_gpus import why_not_on
from meshwright.commands.prove.ranks import RankError, RankPool
from meshwright.commands.prove.verdict import Verdict
from meshwright.config.job_config import JobConfig
from meshwright.parallelisms.rules.compile_choice import why_no_compiler
from meshwright.system.errors import ConfigError

RANK_TIMEOUT_S = 300
"""For a collective: ranks compile side by side on few cores."""

Run = Callable[..., list[Any]]


@dataclass(frozen=True)
class Row:
    """A case and its result."""

    case: Case
    verdict: Verdict
    seconds: float


def prove(small: JobConfig, cases: Sequence[Case], gpus: int = 0) -> Iterator[Row]:
    """Run `small` on one process, then every case on real ranks; a row as each is done.

    Ranks of a pool are kept for all cases of its size, and only one size lives at a time.

    Args:
        gpus: of this machine, one for each rank; 0: ranks run on CPUs.

    Raises:
        ConfigError: if the job can't be run on one process either.
    """
    # Ranks compile code without vectors. For each kind of vectors inductor would have every rank,
    # one after the other, load a trial in a process that imports torch: up to ten, for a minute.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    pool: RankPool | None = None
    start_pool = functools.partial(
        RankPool, timeout_s=RANK_TIMEOUT_S, backend="nccl" if gpus else "gloo"
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        with contextlib.closing(start_pool(1)) as alone:
            kinds = {case.kind for case in cases}
            try:
                references = record_references(alone.run, small, kinds, Path(folder))
            except RankError as error:  # each case would say the same
                sentence = str(error).removeprefix("rank 0: ")
                rule = f"the small job stops on one process: {sentence}"
                args = small.model.args
                size = f"width {args['dim']} and {args['vocab_size']} tokens"
                fix = f"correct what the line does, for a model of {size} as well; no case was run"
                raise ConfigError("", f"{rule}\n  fix: {fix}") from error
        for case in sorted(cases, key=lambda case: case.world_size):
            if reason := _why_not(case, gpus):
                yield Row(case, Verdict(not_run=reason), 0.0)
                continue
            if pool is None or pool.world_size != case.world_size:
                stack.close()
                pool = start_pool(case.world_size)
                stack.callback(pool.close)
            start = time.perf_counter()
            reference, file = references[case.kind]
            try:
                is_tf32 = case.kind == "tf32"
                ranks = pool.run(measure, case.config, case.world_size, file, is_tf32)
                verdict = compare(reference, ranks, bounds_of(case))
            except RankError as error:  # a case that fails on the way takes its ranks with it
                verdict, pool = Verdict([f"stopped: {error}"], details=error.details), None
            yield Row(case, verdict, time.perf_counter() - start)


def _why_not(case: Case, gpus: int = 0) -> str:
    """Return why this machine can't run the case; "" if it can."""
    if gpus and (reason := why_not_on(case, gpus)):
        return reason
    compilation = case.config.compile  # a case with "auto" has an option that needs the compiler
    starts_compiler = compilation.enable is not False and compilation.backend == "inductor"
    return why_no_compiler(gpus > 0) if starts_compiler else ""


def record_references(
    run: Run, small: JobConfig, kinds: set[Kind], folder: Path
) -> dict[Kind, tuple[Reference, Path]]:
    """One process's measurement for each of `kinds`, and the file of its tensors.

    Args:
        run: as `RankPool.run`, of a single rank.
    """
    in_fp32 = _record(run, reference_case(small), folder / "fp32.pt")
    found: dict[Kind, tuple[Reference, Path]] = {"fp32": in_fp32}
    if "tf32" in kinds:
        case = reference_case(small, "tf32")
        found["tf32"] = _record(run, case, folder / "tf32.pt", in_fp32[1], allows_tf32=True)
    if kinds - {"fp32", "tf32"}:
        in_bf16 = _record(run, reference_case(small, "bf16"), folder / "bf16.pt", in_fp32[1])
        found |= {"bf16": in_bf16, "bf16 sums": in_bf16}
    if "user types" in kinds:
        case = reference_case(small, "user types")
        found["user types"] = _record(run, case, folder / "user_types.pt", found["bf16"][1])
    return found


def _record(
    run: Run, case: Case, file: Path, exact: Path | None = None, *, allows_tf32: bool = False
) -> tuple[Reference, Path]:
    """Run one process and read its output.

    Args:
        exact: file of the same in wider types, if there is one.
    """
    (seen,) = run(record_reference, case.config, file, allows_tf32)
    tensors = torch.load(file, weights_only=True)
    norms = {
        kind: {name: tensor.double().norm().item() for name, tensor in tensors[kind].items()}
        for kind in COMPARED
    }
    roundings: dict[str, dict[str, float]] = {}
    wide = {} if exact is None else torch.load(exact, weights_only=True)
    for kind in ("gradients", "updates") if wide else ():
        errors: dict[str, float] = {}
        for name, tensor in tensors[kind].items():
            difference = (tensor.double() - wide[kind][name].double()).norm().item()
            errors[name] = difference / (norms[kind][name] or 1)
        roundings[kind] = _largest_of_layers(errors)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors["weights"].items()}
    gradients = tensors["gradients"].items()
    in_bf16 = {name for name, gradient in gradients if gradient.dtype == torch.bfloat16}
    return Reference(seen, shapes, norms, roundings, in_bf16), file


def _largest_of_layers(errors: Mapping[str, float]) -> dict[str, float]:
    """Return for each parameter the largest error of its name in all layers.

    One error is one draw: of a norm with few elements it may be small by chance.
    """
    layers = {name: re.sub(r"\.\d+\.", ".*.", name) for name in errors}
    largest: dict[str, float] = {}
    for name, error in errors.items():
        largest[layers[name]] = max(error, largest.get(layers[name], 0.0))
    return {name: largest[layer] for name, layer in layers.items()}
