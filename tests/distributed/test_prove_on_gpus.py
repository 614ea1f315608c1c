"""Bounds of `prove --gpu`, against runs on CPUs whose products are rounded as those of GPUs are."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.commands.prove.bounds import BOUNDS, bounds_of
from meshwright.commands.prove.cases import Case, build_case
from meshwright.commands.prove.compare import compare
from meshwright.commands.prove.measure import measure
from meshwright.commands.prove.measurement import LAST_RESUMED_STEP, Reference
from meshwright.commands.prove.on_gpus import as_it_trains
from meshwright.commands.prove.prove import record_references
from meshwright.commands.prove.shrink import ON_GPUS, shrink
from meshwright.config.changes import changed
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.train.resolve_model import resolve_model

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default)
DROPPED = {"tf32": 13, "bf16": 16}
"""Bits of an fp32 number that its rounding drops."""


class Rounded(TorchDispatchMode):
    """Within, factors of products in fp32 are rounded to a narrower type, as tensor cores do."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self._bits = DROPPED[dtype]

    def _rounded(self, factor: Any) -> Any:
        if not isinstance(factor, Tensor) or factor.dtype != torch.float32 or factor.dim() < 2:
            return factor
        raw = factor.contiguous().view(torch.int32) + (1 << (self._bits - 1))
        return (raw & -(1 << self._bits)).view(torch.float32)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            first = args[:-2]  # what addmm adds to
            args = (*first, *map(self._rounded, args[-2:]))
        return func(*args, **(kwargs or {}))


def call_rounded(dtype: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of a rank whose last argument says whether products may be rounded."""
    if not args[-1]:
        return function(*args)
    with Rounded(dtype):
        return function(*args)


def small_job() -> JobConfig:
    config = load_config(["--training.mixed_precision_param=float32"])
    small = shrink(config, resolve_model(config)[1], ON_GPUS)
    training = {"steps": LAST_RESUMED_STEP, "seq_len": 64}
    args = small.model.args | {"n_layers": 2}
    return changed(small, {"training": training, "model": {"args": args}})


@pytest.fixture(scope="module")
def small() -> JobConfig:
    return small_job()


@pytest.fixture
def reference(on_ranks, small, tmp_path) -> tuple[Reference, Path]:
    run = partial(on_ranks, 1, call_rounded, "tf32")
    return record_references(run, small, {"tf32"}, tmp_path)["tf32"]


@pytest.mark.slow
def test_tf32_is_within_its_bounds_and_bf16_is_not(on_ranks, small, reference) -> None:
    """A case in fp32 is as far from the reference in TF32 as that is from exact products: e."""
    config = load_config(["--training.mixed_precision_param=float32"])
    own = build_case("case", small, {}, num_microbatches=4)
    case: Case = as_it_trains(config, small, own, allows_tf32=True)
    assert (case.kind, case.config.num_microbatches) == ("tf32", 4)
    (seen, file), bounds = reference, bounds_of(case)
    run = partial(on_ranks, 1, call_rounded)
    exact = run("tf32", measure, case.config, 1, file, False)
    verdict = compare(seen, exact, bounds)
    print(verdict.errors)
    assert verdict.failures == []
    failures = "\n".join(compare(seen, exact, BOUNDS["fp32"]).failures)
    for quantity in ("loss: ", "gradient of ", "update: "):
        assert quantity in failures
    # the nearest to its bound, which is 2 e for the largest e of a layer
    assert verdict.errors["gradient"] > 0.4 * verdict.errors["gradient's bound"]
    rounded = run("tf32", measure, case.config, 1, file, True)
    assert compare(seen, rounded, bounds).failures == []
    coarser = run("bf16", measure, case.config, 1, file, True)
    coarse = "\n".join(compare(seen, coarser, bounds).failures)
    assert "gradient of " in coarse
