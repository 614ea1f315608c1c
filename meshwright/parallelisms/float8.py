"""Layers that multiply in float8, by torchao. Its import takes 2 s, so only jobs that have such
layers import this file, through `parallelize.apply_float8`."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchao.float8 import Float8LinearConfig
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    hp_tensor_and_scale_to_float8,
)
from torchao.float8.float8_utils import amax_to_scale

from meshwright.config.parallelism import Float8
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.shards import is_fsdp, local_shard
from meshwright.parallelisms.shared_memory import fsdp_groups


class Float8Layer(Float8Linear):  # type: ignore[misc] # untyped
    """torchao's layer, which also casts the weight where FSDP2 doesn't: on one rank.

    Attributes:
        has_one_scale: for all of the weight; else its rows and columns have their own, which each
            forward and backward computes.
        weight_scale: () fp32, that one, from `WeightScales`; None before that.
        is_gathered: FSDP2 gives the weight as it is multiplied, or in bf16.
    """

    has_one_scale: bool
    weight_scale: Tensor | None = None
    is_gathered = False

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        weight = self.weight
        if not self.is_gathered:
            weight = weight.to(x.dtype) if self.weight_scale is None else self.cast(weight)
        out = matmul_with_hp_or_float8_args.apply(x, weight.t(), self.linear_mm_config, self.config)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def cast(self, weight: Tensor) -> Tensor:
        """Return the fp32 weight in float8, with a gradient that passes unchanged."""
        return hp_tensor_and_scale_to_float8(
            weight, self.weight_scale, self.dtype, self.linear_mm_config, GemmInputRole.WEIGHT
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight in products."""
        return self.config.cast_config_weight.target_dtype


def replace_layers(model: nn.Module, names: Collection[str], options: Float8) -> None:
    """Put a `Float8Layer` in the place of the layers of these names; parameters stay."""
    config = Float8LinearConfig.from_recipe_name(options.recipe_name)
    config = dataclasses.replace(config, emulate=options.emulate)
    granularity = config.cast_config_weight.scaling_granularity
    for name, module in [*model.named_modules()]:
        if name in names:
            layer = Float8Layer.from_float(module, config)
            layer.has_one_scale = granularity is ScalingGranularity.TENSORWISE
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, layer)


def gather_in_float8(parameter: Any, layer: Float8Layer) -> None:
    """Have FSDP2 gather the weight of `layer`, of which it has `parameter`, in float8.

    FSDP2's hooks for that are methods of the tensor, so torchao's are a tensor subclass as the
    parameter: in checkpoints, optimizers and fingerprints too, with as many rows on each rank, and
    without the scale where shards are offloaded. So what FSDP2 does with a parameter is extended.
    The names aren't documented; if one goes, weights are gathered in bf16, and a test fails.
    """

    class Float8Param(type(parameter)):  # type: ignore[misc] # which has no public name
        all_gather_outputs: list[Tensor]

        def init_dtype_attrs(self, mp_policy: Any) -> None:
            super().init_dtype_attrs(mp_policy)
            self.param_dtype = None  # else FSDP2 casts it, with the others of its group

        @property
        def all_gather_inputs(self) -> list[Tensor]:
            """This rank's padded shard, flat."""
            (shard,) = super().all_gather_inputs
            # its largest element becomes the largest number of the type, up to rounding
            return [(shard.float() * layer.weight_scale).to(layer.dtype)]

        def init_unsharded_param(self) -> None:
            if hasattr(self, "unsharded_param"):  # it shares the memory that is gathered into
                return
            (gathered,) = self.all_gather_outputs
            config, role = layer.linear_mm_config, GemmInputRole.WEIGHT
            weight = Float8TrainingTensor(
                gathered, layer.weight_scale, torch.bfloat16, config, role
            )
            self.all_gather_outputs = [weight]
            super().init_unsharded_param()
            self.all_gather_outputs = [gathered]

    parameter.__class__ = Float8Param


def share_scales(model: nn.Module, meshes: Meshes) -> None:
    """Give each weight with one scale the scale of the full weight, on any mesh; and have FSDP2,
    where it shards, gather it in float8. To be called after FSDP2 is applied."""
    parameters = [
        parameter
        for group in (fsdp_groups(model) if is_fsdp(model) else ())
        for parameter in group.fsdp_params
    ]
    sharded = {parameter.sharded_param: parameter for parameter in parameters}
    with_scale = dict[Float8Layer, Any]()
    for layer in model.modules():
        if isinstance(layer, Float8Layer):
            parameter = sharded.get(layer.weight)
            layer.is_gathered = parameter is not None
            if layer.has_one_scale:
                with_scale[layer] = parameter
                if parameter is not None:
                    gather_in_float8(parameter, layer)
    if with_scale:  # before FSDP2's hook, which gathers weights
        model.register_forward_pre_hook(WeightScales(with_scale, meshes.stage), prepend=True)


class WeightScales:
    """Before a forward of a stage: the scale of each full weight, if weights have changed.

    It makes the largest element the largest number of the type. The maxima over shards are one
    all-reduce for all layers. Collective over the ranks that hold the stage.
    """

    def __init__(self, layers: Mapping[Float8Layer, Any], stage: DeviceMesh) -> None:
        """Of `layers`, with what FSDP2 has of their weights, or None."""
        self._layers, self._stage = layers, stage
        self._versions: list[int] = []
        self._table: Tensor | None = None

    @torch.no_grad()
    def __call__(self, module: nn.Module, inputs: Sequence[Any]) -> None:
        weights = [
            layer.weight if parameter is None else parameter.sharded_param
            for layer, parameter in self._layers.items()
        ]
        shards = [local_shard(weight) for weight in weights]
        # Torch counts changes of a parameter, and those of its shard by themselves; `update` has
        # it count those of optimizers. Not public: if it goes, measure at each forward.
        versions = [tensor._version for tensor in (*weights, *shards)]
        if versions == self._versions:
            return
        self._versions = versions
        norms = [shard.new_zeros(()) for shard in shards]  # of ranks that have no row
        for index, shard in enumerate(shards):
            if shard.numel():
                norms[index] = torch.linalg.vector_norm(shard, math.inf)
        device = inputs[0].device
        largest = torch.stack(norms).float().to(device, non_blocking=True)
        if self._stage.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._stage.get_group())
        layers = [*self._layers]
        if self._table is None:
            # a scale in 16 bytes: the compiler would copy tensors that are aligned to less
            self._table = torch.empty(len(layers), 4, device=device)
            for layer, row in zip(layers, self._table, strict=True):
                layer.weight_scale = row[0]
        self._table[:, 0] = amax_to_scale(largest, layers[0].dtype)
