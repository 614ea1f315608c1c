"""A package `fla` whose kernel is the recurrence on CPUs, with the rules of the real one (0.6)."""

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.helpers.delta import recurrence

calls: list[dict[str, Any]] = []
"""Of each call: shapes and types of tensors, and options."""


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As fla/ops/gated_delta_rule/chunk.py has it, without what isn't used here."""
    assert scale is None
    assert use_qk_l2norm_in_kernel
    assert initial_state is None
    assert not output_final_state
    assert q.shape == k.shape
    assert q.shape[-1] <= 256
    assert q.dtype == k.dtype == v.dtype
    assert g.dtype == torch.float32
    assert v.shape[2] % q.shape[2] == 0
    assert g.shape == beta.shape == v.shape[:3]
    calls.append({"q": q.shape, "v": v.shape, "dtype": q.dtype, "starts": cu_seqlens})
    sizes = [q.shape[1]]
    if cu_seqlens is not None:
        if q.shape[0] != 1:
            raise ValueError(f"The batch size is expected to be 1 rather than {q.shape[0]}")
        assert cu_seqlens[0] == 0
        assert cu_seqlens[-1] == q.shape[1]
        sizes = cu_seqlens.diff().tolist()
        assert min(sizes) > 0
    documents = zip(*(x.float().split(sizes, 1) for x in (q, k, v, g, beta)), strict=True)
    out = torch.cat([recurrence(*parts)[0] for parts in documents], 1)
    return out.to(q.dtype), None


def install(monkeypatch: Any, version: str = "0.6.0") -> None:
    """Have `import fla` find this for a test."""
    calls.clear()
    names = ("fla", "fla.ops", "fla.ops.gated_delta_rule")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["fla"], "__version__", version, raising=False)
    rule = chunk_gated_delta_rule
    monkeypatch.setattr(sys.modules[names[-1]], rule.__name__, rule, raising=False)
