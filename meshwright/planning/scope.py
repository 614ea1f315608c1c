"""Which module, phase and microbatch an operator belongs to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import meshwright
from meshwright.models.decoder import Decoder
from meshwright.planning import torch_names

LOSS = "loss"
"""Stands for a module: the loss is a function."""
LOGITS = ("output", LOSS)
OTHER, UPDATE, FORWARD, BACKWARD, AGAIN = "other", "update", "forward", "backward", "recomputation"
LAST_FRAME = "train_step"
"""Frames outside of it say nothing."""

TORCH, OURS = str(Path(torch.__file__).parent), str(Path(meshwright.__file__).parent)
"""Folders of the packages, since a folder above them may have any name."""

_Seen = Callable[[Any, Any, Any, Any], None]


class Scope:
    """Follows modules by hooks, and the rest by looking at the frames of the Python stack.

    Frames are told apart by the names of files, so if torch moves one, bytes get another purpose
    but no count changes.

    Args:
        seen: called with each operator, its arguments and its output.
    """

    def __init__(self, seen: _Seen) -> None:
        self.seen = seen
        self.phase, self.module, self.purpose, self.microbatch = OTHER, "", "unattributed", 0
        self.is_fsdp = False
        """Whether the operator is one of FSDP2's own."""
        self._names: dict[int, str] = {}
        self._modules: list[str] = []
        self._forwards: dict[int, int] = {}  # of each stage
        self._numbers: list[int] = []  # of autograd's nodes, rising
        self._places: list[tuple[str, int]] = []  # module and microbatch from each number on

    def name_modules(self, stages: Iterable[nn.Module]) -> None:
        """Learn the names of the modules of this rank's stages."""
        for stage in stages:
            for name, module in stage.named_modules():
                self._names[id(module)] = name

    def __enter__(self) -> Scope:
        self._handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter_module(self, module: nn.Module, _: object) -> None:
        if isinstance(module, Decoder):
            self._forwards[id(module)] = self._forwards.get(id(module), 0) + 1
            self.microbatch = self._forwards[id(module)]
        outer = self._modules[-1] if self._modules else ""
        self._modules.append(self._names.get(id(module), outer) or outer)

    def _leave_module(self, *_: object) -> None:
        self._modules.pop()

    def look(self, frame: FrameType | None) -> None:
        """Find out where the operator that runs is called from."""
        phase, purpose, is_loss, self.is_fsdp = OTHER, "", False, False
        while frame is not None:
            kind, detail = _kind_of(frame.f_code.co_filename, frame.f_code.co_name)
            if kind == "":
                pass
            elif kind == "fsdp":
                self.is_fsdp = True
                purpose = purpose or detail
            elif kind == AGAIN:
                phase = AGAIN
            elif kind in (BACKWARD, UPDATE):
                phase = kind if phase == OTHER else phase
            elif kind == "receive":
                purpose = purpose or detail
            elif kind == LOSS:
                is_loss = True
            else:
                break
            frame = frame.f_back
        if phase == OTHER and (self._modules or is_loss):
            phase = FORWARD
        self.phase = phase
        self._find_module(LOSS if is_loss else "")
        if not purpose and self.module in LOGITS and phase in (FORWARD, BACKWARD):
            purpose = "logits and loss"
        self.purpose = purpose or ("unattributed" if phase == OTHER else "temporary")

    def _find_module(self, function: str) -> None:
        if self.phase in (FORWARD, AGAIN, OTHER):
            if function or self._modules:
                self.module = function or self._modules[-1]
            elif self.phase == OTHER:
                self.module = ""
        if self.phase == FORWARD:
            place = (self.module, self.microbatch)
            if not self._places or self._places[-1] != place:
                self._numbers.append(torch_names.sequence_number() - 1)
                self._places.append(place)
        elif self.phase == BACKWARD:
            number = torch_names.backward_number()
            if number is not None and self._numbers:
                index = bisect_right(self._numbers, number) - 1
                self.module, self.microbatch = self._places[max(index, 0)]


@cache
def _kind_of(file: str, name: str) -> tuple[str, str]:
    """Return the kind of a frame of this function, and the purpose of tensors made in it."""
    if file.startswith(f"{TORCH}/distributed/fsdp/_fully_shard/"):
        return "fsdp", _purpose_in_fsdp(file, name)
    if file == f"{TORCH}/utils/checkpoint.py" and name == "unpack_hook":
        return AGAIN, ""
    if file == f"{TORCH}/autograd/graph.py":
        return BACKWARD, ""
    if file.startswith(f"{TORCH}/distributed/pipelining/") and "recv" in name:
        return "receive", "communication buffers"
    if file.startswith((f"{TORCH}/optim/", f"{OURS}/optim/")):
        return UPDATE, ""
    if file == f"{OURS}/models/layers/loss.py":
        return LOSS, ""
    return (LAST_FRAME if name == LAST_FRAME else ""), ""


def _purpose_in_fsdp(file: str, function: str) -> str:
    if "all_gather_outputs" in function:
        return "gathered parameters"
    if "accumulated_grad" in function:
        return "gradients"
    return "communication buffers" if file.endswith("_collectives.py") else ""
