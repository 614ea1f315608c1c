"""Whether something is sharded, asked while torch's modules are imported, or are not."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from meshwright.parallelisms.shards import is_dtensor, is_fsdp


@pytest.mark.parametrize("is_begun", [True, False])
def test_before_torchs_modules_are_imported_nothing_is_sharded(monkeypatch, is_begun: bool) -> None:
    for name in ("torch.distributed.tensor", "torch.distributed.fsdp"):
        if is_begun:  # by another thread, which has not come to the classes
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        else:
            monkeypatch.delitem(sys.modules, name, raising=False)
    assert not is_dtensor(torch.zeros(1))
    assert not is_fsdp(nn.Linear(1, 1))
