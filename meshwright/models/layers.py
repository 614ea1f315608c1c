"""Layers that compute in the type of their input, whatever their weights are kept in.

Weights may be fp32, as the optimizer has them, and activations bfloat16. A weight is then cast
where it is used, and again where backward computes a layer again. Its gradient is cast back, and
microbatches are added up in the type of the weight. If the types are equal, nothing is copied.
"""

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.models.parameter import Parameter
from meshwright.models.table import FeedForwardSpec, Module, NormSpec


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in `dtype`, whose gradients are added up and rounded in that type.

    A weight itself may take them in a different one (`Tensor.grad_dtype`), as FSDP2's do from torch
    2.15 on: then the number of microbatches would decide how gradients are rounded.
    """
    return weight.view_as(weight) if weight.dtype == dtype else weight.to(dtype)


class Linear(nn.Linear):
    """A matrix product, with a bias or without."""

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.RMSNorm):
    """Division by the root mean square, then a weight.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.

    Attributes:
        is_offset: the factor is 1 + w, as Gemma's code has it. It is added and multiplied in fp32,
            since near 1 bf16 would round w away; w itself has the type of x, as FSDP2 gives it.
    """

    is_offset = False

    def forward(self, x: Tensor) -> Tensor:  # (..., D) -> (..., D)
        if self.is_offset:
            factor = 1.0 + cast(self.weight, x.dtype).float()
            return F.rms_norm(x.float(), self.normalized_shape, factor, self.eps).type_as(x)
        return F.rms_norm(x, self.normalized_shape, cast(self.weight, x.dtype), self.eps)


class Embedding(nn.Embedding):
    """A table of vectors. Ids have no type to follow, so `dtype` gives the activations' type.

    A token's gradients are added up in fp32 and rounded once to the type of the vectors: torch's
    kernel for CPUs adds up in bf16, where 2048 gradients of 1 make 256.

    Attributes:
        look_up: (V, D), (B, S) -> (B, S, D) in a type; tensor parallelism replaces it.
    """

    dtype: torch.dtype | None = None
    """None: the type of the table."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.look_up: Callable[[Tensor, Tensor, torch.dtype], Tensor] = _Vectors.apply

    def reset_parameters(self) -> None:
        """Draw values if the table has memory. On meta torch's code would import the compiler
        (0.8 s)."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, tokens: Tensor, *, table: Tensor | None = None) -> Tensor:
        """(B, S) int64 -> (B, S, D).

        Args:
            table: the result of `cast_table`, if it is used elsewhere as well.
        """
        table = self.weight if table is None else table
        dtype = self.dtype or table.dtype
        if dtype == table.dtype == torch.float32:
            return F.embedding(tokens, table)
        return self.look_up(table, tokens, dtype)

    def cast_table(self) -> Tensor:
        """Return the table in `dtype`, (V, D)."""
        return cast(self.weight, self.dtype or self.weight.dtype)


class _Vectors(torch.autograd.Function):
    """Vectors of a table in a type that may be another: the same as from a table that was cast, to
    the bit, forward and backward, without a second table."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.shape, ctx.dtype = table.shape, table.dtype
        return F.embedding(tokens, table).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        tokens, grad = tokens.flatten(), grad.flatten(0, 1)
        # a small table instead: equal tokens share the row of one of their places
        places = tokens.new_empty(ctx.shape[0])
        places[tokens] = torch.arange(len(tokens), device=tokens.device)
        rows = places[tokens]
        sums = torch.ops.aten.embedding_dense_backward(grad.float(), rows, len(rows), -1, False)
        of_table = grad.new_zeros(ctx.shape, dtype=ctx.dtype)
        of_table[tokens] = sums[rows].to(grad.dtype).to(ctx.dtype)
        return of_table, None, None


def build_layer(parameter: Parameter, eps: float = 1e-5, *, has_bias: bool = False) -> nn.Module:
    """Return the layer whose weight the table declares as `parameter`.

    Args:
        eps: of a norm.
        has_bias: of a matrix product.
    """
    *rows, columns = parameter.shape
    match parameter.role:
        case "embedding":
            return Embedding(rows[0], columns)
        case "norm":
            norm = RMSNorm(columns, eps=eps)
            norm.is_offset = parameter.is_offset
            return norm
    return Linear(columns, rows[0], bias=has_bias)


def build_norm(spec: NormSpec) -> nn.Module:
    """Return a norm of the residual stream."""
    return build_layer(spec.parameters["weight"], spec.eps)


def build_part(spec: Any) -> Any:
    """Return the module of a part of a model's table: of its `module`, which may be the user's."""
    module: Module = type(spec).module
    return (resolve_name(module) if isinstance(module, str) else module)(spec)


class OfHeads(nn.Module):
    """A parameter whose first dimension has heads: it isn't a matrix to multiply by."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, x: Tensor) -> Tensor:
        """Return it in fp32, as activations like `x` have it: rounded to its type."""
        return self.weight.to(x.dtype).float()


def add_layers(module: nn.Module, parameters: Mapping[str, Parameter], eps: float = 1e-5) -> None:
    """Give `module` the layers that its part of the table names."""
    for name, parameter in parameters.items():
        if not name.endswith(".weight"):
            continue
        layer = name.removesuffix(".weight")
        if parameter.layout == "heads":
            module.add_module(layer, OfHeads(parameter.shape))
            continue
        has_bias = f"{layer}.bias" in parameters
        module.add_module(layer, build_layer(parameter, eps, has_bias=has_bias))


class FeedForward(nn.Module):
    """Gated block, w2(silu(w1 x) * w3 x), or with gelu by tanh; without biases.

    Source: Shazeer 2020, arXiv:2002.05202 (FFN_SwiGLU, FFN_GEGLU). Names of weights are Meta's.
    """

    w1: Linear
    w2: Linear
    w3: Linear

    def __init__(self, spec: FeedForwardSpec) -> None:
        super().__init__()
        self.activation = spec.activation
        add_layers(self, spec.parameters)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, D) -> (B, S, D)
        gate = self.w1(x)
        gate = F.silu(gate) if self.activation == "silu" else F.gelu(gate, approximate="tanh")
        return self.w2(gate * self.w3(x))
