"""Whether tensors and modules are sharded by torch, asked without importing torch's modules for it.

Jobs of one rank need none of these modules: they take 0.4 s to import, and 0.8 s with the compiler,
which FSDP2 imports. What has not been imported shards nothing.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Return whether `value` is a DTensor."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(value, tensor.DTensor)


def is_fsdp(module: object) -> TypeIs[FSDPModule]:
    """Return whether `module` is the root of a group of FSDP2."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)
