"""A look inside FSDP2."""

from typing import Any

from torch.distributed.fsdp import FSDPModule, fully_shard

from meshwright.parallelisms.local_model import LocalModel


def groups_of(model: LocalModel) -> list[Any]:
    """What FSDP2 gathers together, in every stage of a model.

    Private: torch 2.13 may have several groups of a module, 2.11 one or none.
    """
    assert all(isinstance(stage, FSDPModule) for stage in model.stages)
    found = []
    for module in (module for stage in model.stages for module in stage.modules()):
        if isinstance(module, FSDPModule):
            state = fully_shard.state(module)
            if hasattr(state, "_fsdp_param_groups"):
                found += state._fsdp_param_groups
            elif state._fsdp_param_group is not None:
                found.append(state._fsdp_param_group)
    return found
