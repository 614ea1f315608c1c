"""In which type the microbatches of a step are added up."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from meshwright.parallelisms.data_parallel import accumulate_in_reduce_dtype
from tests.helpers.fsdp import groups_of
from tests.helpers.job import Job, mesh
from tests.helpers.tiny import parallel_model


def _gradients(num_microbatches: int, every: bool) -> dict[str, torch.Tensor]:
    """Of a step whose microbatches are all the same."""
    bf16 = torch.bfloat16
    job = Job(mesh(dp_shard=2), param_dtype=bf16, reduce_dtype=bf16)
    gradients = job.whole_gradients()
    job.take_step(1, job.batches(1) * num_microbatches, reduce_every_microbatch=every)
    return gradients


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_bf16_reduction_adds_up_microbatches_in_fp32_if_each_is_reduced() -> None:
    """Each of eight counts an eighth, exactly. So must their sum, unless its type has too few bits
    for three, five or seven times a number that fills them."""
    alone = _gradients(1, every=True)
    counts = []
    for every in (True, False):
        summed = _gradients(8, every)
        assert {gradient.dtype for gradient in summed.values()} == {torch.float32}
        counts.append(sum(int((summed[name] != alone[name]).sum()) for name in alone))
    on_shards, whole = counts
    assert on_shards == 0
    # why preflight refuses it; if torch adds up whole gradients in fp32 one day, allow it
    assert whole > 100


@pytest.mark.ranks(1)
def test_gradients_of_weights_alone_are_added_up_in_fp32() -> None:
    """As a schedule leaves them that computes gradients of weights one after the other, without
    those of inputs between, in which FSDP2 would add them up itself. In bf16, 256 + 1 is 256."""
    # not offloaded, one rank would do without FSDP2
    model, _ = parallel_model(mesh(), param_dtype=torch.bfloat16, enable_cpu_offload=True)
    stage, sums = model.stages[0], set[float]()
    modules = [module for module in stage.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.unshard()
    for value in (256.0, 1.0, 1.0):
        for parameter in stage.parameters():
            grad = torch.full_like(parameter, value)
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        accumulate_in_reduce_dtype(stage)
    for parameter in (parameter for group in groups_of(model) for parameter in group.fsdp_params):
        sums |= {*parameter.unsharded_accumulated_grad.flatten().tolist()}
    assert sums == {258.0}
