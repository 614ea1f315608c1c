"""The work of a step: one entry for each operator and collective."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import meshwright
from meshwright.commands.plan import torch_names
from meshwright.models.decoder import Decoder
from meshwright.parallelisms.meshes import Meshes

LOSS = "loss"
"""Stands for a module: the loss is a function."""

LOGITS = ("output", LOSS)

OTHER, UPDATE, FORWARD, BACKWARD, AGAIN = "other", "update", "forward", "backward", "recomputation"

LAST_FRAME = "step of the trainer"
"""Frames outside of it say nothing."""

TORCH, OURS = str(Path(torch.__file__).parent), str(Path(meshwright.__file__).parent)
"""Folders of the packages, since a folder above them may have any name."""


class Moment(NamedTuple):
    """Where in a step something happens."""

    phase: str
    module: str
    microbatch: int


class Scope:
    """Follows modules by hooks, and the rest by the frames of the Python stack: by names of files,
    so if torch moves one, bytes get a different purpose but no count changes."""

    def __init__(self) -> None:
        self.phase, self.module, self.purpose, self.microbatch = OTHER, "", "unattributed", 0
        self.is_fsdp = False
        """Whether the operator is one of FSDP2's own."""
        self._names: dict[int, str] = {}
        self._modules: list[str] = []
        self._forwards: dict[int, int] = {}  # of each stage
        self._numbers: list[int] = []  # of autograd's nodes, rising
        self._places: list[tuple[str, int]] = []  # module and microbatch from each number on

    @property
    def moment(self) -> Moment:
        """Where the operator that runs is called from."""
        return Moment(self.phase, self.module, self.microbatch)

    def name_modules(self, stages: Iterable[nn.Module]) -> None:
        """Learn the names of the modules of this rank's stages."""
        named = (pair for stage in stages for pair in stage.named_modules())
        self._names = {id(module): name for name, module in named}

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
        phase, purpose, kind, is_loss, self.is_fsdp = OTHER, "", "", False, False
        while frame is not None and kind != LAST_FRAME:
            kind, detail = _kind_of(frame.f_code.co_filename, frame.f_code.co_name)
            purpose = purpose or detail
            self.is_fsdp |= kind == "fsdp"
            is_loss |= kind == LOSS
            if kind == AGAIN or (phase == OTHER and kind in (BACKWARD, UPDATE)):
                phase = kind
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


UPDATES = frozenset(
    f"{OURS}/train/optim/{name}.py"
    for name in ("optimizers", "registry", "matrices", "update", "in_backward")
)
"""Files whose code runs in an update."""


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
    if file.startswith(f"{TORCH}/optim/") or file in UPDATES:
        return UPDATE, ""
    if file == f"{OURS}/models/loss.py":
        return LOSS, ""
    is_last = (file, name) == (f"{OURS}/train/trainer.py", "step")
    return LAST_FRAME if is_last else "", ""


def _purpose_in_fsdp(file: str, function: str) -> str:
    if "all_gather_outputs" in function:
        return "gathered parameters"
    if "accumulated_grad" in function:
        return "gradients"
    return "communication buffers" if file.endswith("_collectives.py") else ""


IN_RINGS = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}
SENT = {"broadcast": 1, "send": 1, "recv": 0}
"""Times that a rank of n sends the larger tensor; in rings, (n - 1) / n of it."""


MOVES_NOTHING = (
    *("empty", "empty_like", "empty_strided", "empty_permuted"),
    *("new_empty", "new_empty_strided", "unsafe_view"),
)
"""Operators that neither read nor write, though their schemas don't say so."""


@dataclass(frozen=True)
class TraceEntry:
    """One operator of this rank, or one collective or message."""

    name: str
    at: Moment
    is_fsdp: bool
    """It is one of FSDP2's own. A collective then overlaps with computation."""
    num_bytes: int
    """Of all tensors that an operator reads and writes; of the larger of a collective's input and
    output."""
    flops: int = 0
    """Of matrix products and attention, of all its pairs; a multiply-add is two."""
    dtype: str = ""
    axis: str = ""
    """Of a collective; "": it is an operator."""
    ranks: range = range(1)
    """Of a collective's group: along an axis of the mesh they are evenly spaced."""
    sent_bytes: float = 0.0
    """That this rank sends, in a ring; or where ranks exchange parts of any size, sends or gets,
    whichever is more."""
    pairs: float = 1.0
    """Part of the pairs that a kernel of attention computes of those in `flops`."""
    head_width: int = 0
    """Of a kernel of attention."""
    is_float8: bool = False
    """It is a product of a layer that multiplies in float8; here in bf16."""
    read_bytes: int = 0
    """Of a product's operands."""


@cache
def ranks_in_node(ranks: range, per_node: int) -> int:
    """Return how many of `ranks` are in the node that has the fewest of them."""
    return min(Counter(rank // per_node for rank in ranks).values())


class Trace:
    """The operators and collectives of a step, in the order of the program."""

    def __init__(
        self, meshes: Meshes, scope: Scope, float8_layers: Collection[str] = frozenset()
    ) -> None:
        self._groups, self._scope = _axes(meshes), scope
        self._float8_layers = float8_layers
        self.entries: list[TraceEntry] = []

    def see(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Take note of an operator."""
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            self._see_collective(func, args, output)
            return
        name = getattr(func, "__name__", str(func)).partition(".")[0]
        if _is_view(func) or name.lstrip("_") in MOVES_NOTHING:
            return
        outputs = [x for x in torch_names.tree_iter(output) if isinstance(x, Tensor)]
        leaves = {id(x): x for x in torch_names.tree_iter((args, kwargs, output))}.values()
        first = next((x for x in outputs if x.is_floating_point()), None)
        size = sum(x.numel() * x.element_size() for x in leaves if isinstance(x, Tensor))
        flops = _flops(func, args, kwargs, output)
        dtype = str(first.dtype if first is not None else "").removeprefix("torch.")
        scope, heads = self._scope, _heads(args) if "attention" in name else []
        entry = TraceEntry(
            *(name, scope.moment, scope.is_fsdp, size, flops, dtype),
            pairs=_pairs(func, args, kwargs),
            head_width=heads[0].shape[3] if heads else 0,
            is_float8=flops > 0 and scope.module in self._float8_layers,
            read_bytes=size - sum(x.numel() * x.element_size() for x in outputs) if flops else 0,
        )
        self.entries.append(entry)

    def _see_collective(self, func: Any, args: Any, output: Any) -> None:
        name = func.__name__.partition(".")[0]
        kinds = (kind for kind in IN_RINGS | SENT if kind.replace("_", "") in name.replace("_", ""))
        kind = next(kinds, None)
        axis, ranks = self._group(args) if kind else ("", range(1))
        if kind is None or len(ranks) == 1:  # wait_tensor and barrier have no kind
            return
        tensors = [x for x in torch_names.tree_iter((args, output)) if isinstance(x, Tensor)]
        size = max((x.numel() * x.element_size() for x in tensors), default=0)
        part, scope = (len(ranks) - 1) / len(ranks), self._scope
        sent = size * (IN_RINGS[kind] * part if kind in IN_RINGS else float(SENT[kind]))
        if kind == "all_to_all" and func.namespace == "_c10d_functional":
            rows, by, to, *_ = args
            sent = _exchanged_bytes(rows, by, to, ranks.index(torch.distributed.get_rank()))
        found = TraceEntry(kind, scope.moment, scope.is_fsdp, size, 0, "", axis, ranks, sent)
        self.entries.append(found)

    def _group(self, args: Any) -> tuple[str, range]:
        for argument in args:
            name = argument if isinstance(argument, str) else torch_names.group_name(argument)
            if name in self._groups:
                return self._groups[name]
        return ("unknown", range(2))


def _axes(meshes: Meshes) -> dict[str, tuple[str, range]]:
    """Axis and ranks of every group, by its name; a group of several axes has the last."""
    found: dict[str, tuple[str, range]] = {}
    for mesh in meshes.all:
        for axis, group in zip(mesh.mesh_dim_names or (), mesh.get_all_groups(), strict=True):
            ranks = torch.distributed.get_process_group_ranks(group)
            step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
            found[group.group_name] = (axis, range(ranks[0], ranks[-1] + 1, step))
    return found


def _exchanged_bytes(rows: Tensor, by: list[int], to: list[int], own: int) -> float:
    """Return the bytes that a rank sends to others or gets from them, whichever is more.

    Args:
        by, to: rows from each rank of the group, and to each.
        own: the rank's place in the group.
    """
    others = max(sum(splits) - splits[own] for splits in (by, to))
    return float(others * rows.shape[1:].numel() * rows.element_size())


@cache
def _is_view(func: Any) -> bool:
    """Return whether all outputs are memory of the inputs, unwritten."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.returns:
        return False
    aliases = [value.alias_info for value in schema.returns]
    return all(alias is not None and not alias.is_write for alias in aliases)


def _flops(func: Any, args: Any, kwargs: Any, output: Any) -> int:
    packet = getattr(func, "overloadpacket", func)
    name = getattr(packet, "__name__", "")
    if name.startswith(("_scaled_dot_product", "flex_attention")):
        # torch has no formula for CPU's and flex; torch 2.11's rejects grouped heads
        return _attention_flops(args, is_backward="backward" in name)
    formula = torch_names.flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=output))


def _pairs(func: Any, args: Any, kwargs: Any) -> float:
    """Return the part of the pairs that a kernel of attention computes: half if it is causal.

    Context parallelism calls kernels for a chunk of queries and all keys before it, which skip
    none. Flex attention's mask is causal, and skips later keys also where a rank has an early and a
    late chunk of queries: together they see half of the pairs.
    """
    if "flex_attention" in str(func):
        seen, every = _blocks_of_keys(args)
        q, k, *_ = _heads(args)
        if seen < every and q.shape[2] < k.shape[2]:  # a window, whose keys other ranks sent
            return 1.0
        return 1 - seen / every / 2  # the first queries have fewer blocks before them
    schema = getattr(func, "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    if "is_causal" not in names:
        return 1.0
    place = names.index("is_causal")
    is_causal = args[place] if place < len(args) else (kwargs or {}).get("is_causal", False)
    return 0.5 if is_causal else 1.0


def _heads(args: Any) -> list[Tensor]:
    """Return a kernel's queries, keys, values and their gradients."""
    found = (x for x in torch_names.tree_iter(args) if isinstance(x, Tensor))
    return [x for x in found if x.ndim == 4 and x.is_floating_point()]


def _blocks_of_keys(args: Any) -> tuple[int, int]:
    """Return how many blocks of keys a query of flex attention sees at most, and how many there
    are; (1, 1) of other kernels."""
    found = (x for x in torch_names.tree_iter(args) if isinstance(x, Tensor) and x.ndim == 4)
    lists = next((x for x in found if not x.is_floating_point()), None)
    if lists is None:
        return 1, 1
    return lists.shape[3], -(-_heads(args)[1].shape[2] // torch_names.MASK_BLOCK)


def _attention_flops(args: Any, *, is_backward: bool) -> int:
    """Return the FLOPs of all pairs, as if not causal: two products forward, five backward. Where
    flex attention has a window, of as many keys as the blocks that a query sees have."""
    tensors = _heads(args)
    q, k, v = tensors[1:4] if is_backward and tensors[0].shape == tensors[1].shape else tensors[:3]
    seen, every = _blocks_of_keys(args)
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * seen // every
    widths = (3 * q.shape[3] + 2 * v.shape[3]) if is_backward else (q.shape[3] + v.shape[3])
    return 2 * pairs * widths
