"""In which type the microbatches of a step are added up."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from meshwright.parallelisms.data_parallel import accumulate_in_reduce_dtype
from tests.helpers.fsdp import parameter_groups
from tests.helpers.job import Job, mesh
from tests.helpers.tiny import parallel_model


def _gradients(num_microbatches: int, every: bool) -> dict[str, torch.Tensor]:
    """Of a step whose microbatches are all the same."""
    bf16 = torch.bfloat16
    job = Job(mesh(dp_shard=2), param_dtype=bf16, reduce_dtype=bf16)
    gradients = job.whole_gradients()
    job.take_step(1, job.batches(1) * num_microbatches, reduce_every_microbatch=every)
    return gradients


def _differences() -> tuple[int, int]:
    """Elements that differ between one microbatch and the sum of eight, by where it is made.

    Each of eight counts an eighth, exactly. So must their sum, unless its type has too few bits for
    three, five or seven times a number that fills them.
    """
    alone = _gradients(1, every=True)
    counts = []
    for every in (True, False):
        summed = _gradients(8, every)
        assert {gradient.dtype for gradient in summed.values()} == {torch.float32}
        counts.append(sum(int((summed[name] != alone[name]).sum()) for name in alone))
    return counts[0], counts[1]


@pytest.mark.slow
def test_bf16_reduction_adds_up_microbatches_in_fp32_if_each_is_reduced(on_ranks) -> None:
    for on_shards, whole in on_ranks(2, _differences):
        assert on_shards == 0
        # why preflight refuses it; if torch adds up whole gradients in fp32 one day, allow it
        assert whole > 100


def _sums_of_weights_alone() -> set[float]:
    """As a schedule leaves them that computes gradients of weights one after the other, without
    those of inputs between, in which FSDP2 would add them up itself."""
    model, _ = parallel_model(
        mesh(),
        param_dtype=torch.bfloat16,
        enable_cpu_offload=True,  # otherwise one rank would do without FSDP2
    )
    stage, sums = model.stages[0], set[float]()
    modules = [module for module in stage.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.unshard()
    for value in (256.0, 1.0, 1.0):
        for parameter in stage.parameters():
            grad = torch.full_like(parameter, value)
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        accumulate_in_reduce_dtype(stage)
    for module in modules:
        for group in parameter_groups(module):
            for parameter in group.fsdp_params:
                sums |= {*parameter.unsharded_accumulated_grad.flatten().tolist()}
    return sums


def test_gradients_of_weights_alone_are_added_up_in_fp32(on_ranks) -> None:
    """In bf16, 256 + 1 is 256."""
    assert on_ranks(1, _sums_of_weights_alone) == [{258.0}]
