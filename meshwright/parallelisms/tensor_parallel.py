"""Tensor and sequence parallelism: each rank has a part of every matrix and of the sequence."""

import functools
import inspect
import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from meshwright.models.decoder import Decoder, Predictor
from meshwright.models.loss import SummedLoss, rows_at
from meshwright.models.parameter import Cut, Layout
from meshwright.parallelisms.meshes import all_gather


class VocabularyParallelLoss(SummedLoss):
    """A loss of which each rank computes the logits of its own rows of the weight.

    Ranks exchange two numbers per token: the log of their sum of exponentials, and the label's
    logit. Each then has the whole loss, and its part of the gradients. Collective over `mesh`.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """

    def __init__(self, mesh: DeviceMesh, cap: float | None = None) -> None:
        super().__init__(cap=cap)
        self.mesh, self.num_ranks, self._vocab_size = mesh, mesh.size(), 0

    def logits(self, x: Tensor, weight: Tensor, at: Tensor | None = None) -> Tensor:
        """(B, S/tp, D), a weight sharded along the vocabulary -> (B, S, V), the same on every rank.

        Args:
            at: (B,) positions in the whole sequences, as `SummedLoss.logits` takes them.
        """
        x, own = rows_at(gather_sequence(x, self.mesh), at), cast(DTensor, weight).to_local()
        shape = torch.Size((*x.shape[:2], weight.shape[0]))
        strides = (shape[1] * shape[2], shape[2], 1)
        logits = DTensor.from_local(
            super().logits(x, own), self.mesh, [Shard(2)], shape=shape, stride=strides
        )
        return logits.redistribute(placements=[Replicate()]).to_local().contiguous()

    def of_tokens(
        self, x: Tensor, weight: Tensor, labels: Tensor, factors: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(B, S/tp, D), a weight sharded over the vocabulary, (B, S) -> (B, S) fp32 and () fp32."""
        rows_per_rank = -(-weight.shape[0] // self.mesh.size())  # as `Shard` cuts
        first = min(self.mesh.get_local_rank() * rows_per_rank, weight.shape[0])
        own, self._vocab_size = cast(DTensor, weight).to_local(), weight.shape[0]
        chunk_tokens = self.tokens_per_chunk(weight, x.dtype)
        x = gather_sequence(x, self.mesh)
        return self.of_rows(x, own, labels, factors, chunk_tokens=chunk_tokens, first=first)

    def all_rows(self, logits: Tensor) -> Tensor:
        shape = torch.Size((len(logits), self._vocab_size))
        strides = (self._vocab_size, 1)
        logits = DTensor.from_local(logits, self.mesh, [Shard(1)], shape=shape, stride=strides)
        return logits.redistribute(placements=[Replicate()]).to_local()

    def join(self, log_sum: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        both = all_gather(torch.stack([log_sum, own]).unsqueeze(0), self.mesh)  # (tp, 2, tokens)
        return both[:, 0].logsumexp(0), both[:, 1].amax(0)


class NormOverRanks(nn.Module):
    """An RMS norm of vectors of which each rank has a part, (B, S, W/tp).

    Ranks exchange their sums of squares, one number per token and rank, forward and backward. The
    gradient of a rank's part of the weight needs no other rank.
    """

    def __init__(self, norm: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        assert isinstance(norm, nn.RMSNorm)
        assert norm.eps is not None
        self.weight = nn.Parameter(distribute_tensor(norm.weight, mesh, [Shard(0)]))
        self.eps, self.width, self.mesh = norm.eps, norm.weight.numel(), mesh

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, W/tp) -> (B, S, W/tp)."""
        wide = x.float()
        own = wide.square().sum(-1, keepdim=True).unsqueeze(0)  # (1, B, S, 1)
        # gathered and added up here, not summed by DTensor: up to torch 2.11 its backward would
        # leave out the other ranks' gradients of the sum. One by one, since the gradient of `sum`
        # is expanded, and torch 2.11 sends only dense tensors.
        square_sum = functools.reduce(torch.add, all_gather(own, self.mesh).unbind(0))
        weight = cast(DTensor, self.weight).to_local()
        return (wide * torch.rsqrt(square_sum / self.width + self.eps) * weight).type_as(x)


def apply_tp(model: Decoder, mesh: DeviceMesh) -> str:
    """Shard `model` in place over `mesh`, the tp axis; best while it is on the meta device.

    Between blocks a rank has (B, S/tp, D): each pair of a column-wise and a row-wise product
    gathers the sequence before and reduce-scatters it after. Source: Korthikanti et al. 2022,
    arXiv:2205.05198, section 4.2.2. The embedding is sharded over the vocabulary; so are the output
    and its loss, which gather the sequence themselves. Return a line for the log.

    Raises:
        ValueError: if a parameter has no layout in the model's table.
    """
    styles: dict[Layout, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(output_layouts=Shard(1)),
        # their output is added to the residual stream or rotated, which are plain tensors
        "on_sequence": SequenceParallel(use_local_output=True),
        "on_tokens": SequenceParallel(sequence_dim=0, use_local_output=True),
        "on_heads": SequenceParallel(sequence_dim=2, use_local_output=True),
    }
    plan: dict[str, ParallelStyle] = {}
    cuts: dict[str, list[tuple[str, int]]] = {}
    for name, _ in [*model.named_parameters()]:
        parameter = model.table.parameters.get(name)
        if parameter is None:
            raise ValueError(f"{name} has no layout: it is not in the table of the model")
        module = name.rpartition(".")[0]
        if parameter.layout == "experts":
            continue
        if isinstance(parameter.layout, Cut):
            own = name.removeprefix(f"{module}.")
            cuts.setdefault(module, []).append((own, parameter.layout.dim))
            part = ".".join(module.split(".")[:3])  # as "layers.3.attention"
            plan[part] = _gather(model.get_submodule(part))
            continue
        if parameter.layout == "over_heads":
            around, _, own = module.rpartition(".")
            norm = NormOverRanks(model.get_submodule(module), mesh)
            setattr(model.get_submodule(around), own, norm)
            continue
        if parameter.layout in ("output", "heads", "colwise_gathered"):
            cut = distribute_tensor(model.get_parameter(name), mesh, [Shard(0)])
            own = name.removeprefix(f"{module}.")
            model.get_submodule(module).register_parameter(own, nn.Parameter(cut))
            if parameter.layout == "colwise_gathered":
                model.get_submodule(module).__class__ = OwnRows
            if parameter.layout == "heads":
                model.get_submodule(module).register_forward_hook(_own_heads)
            continue
        plan[module] = styles[parameter.layout]
        if parameter.layout == "colwise":  # gathered once for all of them
            around = module.rpartition(".")[0]
            plan[around] = _gather(model.get_submodule(around))
    for module, own_cuts in cuts.items():
        _cut(model.get_submodule(module), own_cuts, mesh)
    whole = functools.partial(gather_sequence, mesh=mesh)  # one, so that blocks share a graph
    for name, block in model.layers.items():
        if "narrow" in model.table.layers[int(name)].attention.bare_modules:
            block.get_submodule("attention.narrow").forward = whole
    if model.output is not None:  # a tied one's weight is sharded as the embedding's
        model.output.loss = VocabularyParallelLoss(mesh, model.output.loss.cap)
    for module, style in plan.items():  # by name: torch reads a plan's keys as patterns, each anew
        parallelize_module(model.get_submodule(module), mesh, style)
    if model.tok_embeddings is not None:
        model.tok_embeddings.look_up = _look_up_in_shard
        model.tok_embeddings.register_forward_hook(_own_storage)
    for block in model.layers.values():
        if isinstance(block, Predictor):
            block.head_norm.register_forward_hook(_own_storage)
    what = "matrices, and the sequence between them, are"
    return f"tensor parallelism: {what} sharded over {mesh.size()} ranks"


def gather_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """(B, S/tp, W) -> (B, S, W), where a gradient is this rank's summand: its own heads', or rows'.

    Backward adds the summands up and gives each rank its part of the sequence."""
    whole = DTensor.from_local(x, mesh, [Shard(1)]).redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()])


class OwnRows(nn.Linear):
    """A layer that multiplies by this rank's rows of its weight, and adds its part of the bias."""

    def forward(self, input: Tensor) -> Tensor:  # as nn.Linear has it
        """(..., in) -> (..., out/tp)."""
        weight = cast(DTensor, self.weight).to_local().to(input.dtype)
        bias = cast(DTensor | None, self.bias)
        return F.linear(input, weight, None if bias is None else bias.to_local().to(input.dtype))


def _cut(module: nn.Module, cuts: Sequence[tuple[str, int]], mesh: DeviceMesh) -> None:
    """Cut parameters of `module`, each along a dimension, and show it its own parts only."""
    for name, dim in cuts:
        parameter = distribute_tensor(module.get_parameter(name), mesh, [Shard(dim)])
        module.register_parameter(name, nn.Parameter(parameter))
    kind: Any = type(module)
    module.__class__ = _with_own_parts(kind, tuple(name for name, _ in cuts))


@functools.cache  # one class for all layers, so that they share a graph
def _with_own_parts(kind: Any, names: tuple[str, ...]) -> Any:
    """Return a class of modules as `kind`, in whose `forward` parameters of these names are a
    rank's parts. Outside of it they are DTensors, which FSDP2 and checkpoints look for."""

    def forward(self: Any, *inputs: Any) -> Any:
        # the gradient of a gathered input is a summand: of this rank's part of the parameter
        local = [
            x.to_local(grad_placements=[Partial()]) if isinstance(x, DTensor) else x for x in inputs
        ]
        self.shows_parts = True
        try:
            return kind.forward(self, *local)
        finally:
            self.shows_parts = False

    def own_part(name: str) -> property:
        def get(self: Any) -> Tensor:
            whole = self._parameters[name]
            return whole.to_local() if self.shows_parts else whole

        return property(get)

    members: dict[str, Any] = {name: own_part(name) for name in names}
    return type(kind.__name__, (kind,), members | {"forward": forward, "shows_parts": False})


def _gather(module: nn.Module) -> PrepareModuleInput:
    """Give `module` whole sequences as its first input; others are the same on every rank."""
    others = (None,) * (len(inspect.signature(module.forward).parameters) - 1)
    return PrepareModuleInput(
        input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others)
    )


def enable_async_tp(mesh: DeviceMesh) -> str:
    """Let inductor overlap collectives over `mesh`, the tp axis, with products next to them.

    It fuses an all-gather and the products that follow, or a product and the reduce-scatter that
    follows, into operations that go piece by piece. Of effect on all that this process compiles
    from now on; needs a CUDA device. Source: Wang et al. 2023, ASPLOS (Overlap Communication with
    Dependent Computation via Decomposition in Large Deep Learning Models). Return a line for the
    log.
    """
    # No public name up to torch 2.13. If it moves, compiled blocks still give the same numbers, but
    # without overlap.
    torch._inductor.config._micro_pipeline_tp = True
    # Private too, and said to be deprecated and needless, but without it inductor's pass (2.13)
    # takes the group for one that has no symmetric memory, and silently leaves it unchanged.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(mesh.get_group().group_name)
    return "asynchronous tensor parallelism: collectives overlap with the products next to them"


def _own_heads(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Return this rank's part of a number for each head, whose gradient needs no other rank."""
    return cast(DTensor, output).to_local()


def _look_up_in_shard(table: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """(V, D) and (B, S) -> (B, S, D), all DTensors, for whose rules it is a single operator. On
    CPUs its gradients are added up in `dtype`."""
    return F.embedding(tokens, table).to(dtype)


def _own_storage(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Copy the result. Compiled blocks fail in backward ('Tensor' object has no attribute
    '_local_tensor', torch 2.13) when their input is a reduce-scatter's own result, and FSDP2 warns
    of a module whose result is a view."""
    return output.clone()
