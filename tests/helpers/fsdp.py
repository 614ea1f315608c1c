"""A look inside FSDP2."""

from typing import Any

from torch.distributed.fsdp import FSDPModule, fully_shard


def parameter_groups(module: FSDPModule) -> list[Any]:
    """What FSDP2 gathers together of the parameters of `module`, without those of FSDP2 inside it.

    Private: torch 2.13 may have several groups, 2.11 one or none.
    """
    state = fully_shard.state(module)
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
