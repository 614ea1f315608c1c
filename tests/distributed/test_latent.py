"""Ranks exchange latents, not keys and values, nor inputs of layers; a family of the user's may
have biases of its heads."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pytest
import torch.nn.functional as F

from meshwright.models.families import MODELS
from meshwright.models.families.deepseek_v3 import DeepseekV3Args
from meshwright.models.latent import LatentSpec
from meshwright.models.parameter import Parameter
from meshwright.models.table import AttentionSpec
from meshwright.parallelisms.rules.degrees import ParallelDims
from tests.distributed.test_families import batch_of
from tests.helpers.families import small
from tests.helpers.job import GLOBAL_BATCH, Job
from tests.helpers.operators import Operators
from tests.helpers.tiny import SEQ_LEN, plain_model

ARGS = small(MODELS["deepseek_v3"], vocab_size=131, q_lora_rank=13, kv_lora_rank=9)
GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


def exchanged(axis: str, args=ARGS) -> Counter[tuple[str, int]]:
    """How often a rank gathers, and sums up for, how many numbers of each of its tokens."""
    dims = ParallelDims(**({"dp_replicate": 1, "dp_shard": 1, "ep": 1} | {axis: 2}))
    job, found = Job(dims, args=args), Counter()
    own = GLOBAL_BATCH * SEQ_LEN // 2

    def note(name: str, _: object, inputs: tuple, outputs: list) -> None:
        kind = name.rpartition(".")[2]
        if kind in (GATHER, SCATTER):
            numbers = inputs[0].numel() if kind == GATHER else outputs[0].numel()
            found[kind, numbers // own] += numbers % own == 0

    with Operators(note):
        job.take_step(1, job.part(batch_of(is_packed=False)))
    return found


@pytest.mark.ranks(2)
def test_tensor_parallelism_gathers_both_latents_and_the_rotated_key() -> None:
    """9 + 4 numbers besides the query's 13, once a layer, and their gradients once; without a
    latent of queries, the layer's input of 32 in its place."""
    found, layers = exchanged("tp"), ARGS.n_layers
    assert found[GATHER, 26] == found[SCATTER, 26] == layers
    found = exchanged("tp", dataclasses.replace(ARGS, q_lora_rank=0))
    assert found[GATHER, 45] == found[SCATTER, 45] == layers
    assert found[GATHER, 26] == 0


@pytest.mark.ranks(2)
def test_context_parallelism_gathers_the_latent_and_the_rotated_key() -> None:
    """13 numbers of a token; keys and values of the 4 heads would be 72."""
    found = exchanged("cp")
    assert found[GATHER, 13] == found[SCATTER, 13] == ARGS.n_layers
    assert not [width for kind, width in found if kind == GATHER and width > 13]


class BiasedSpec(LatentSpec):
    """With a bias of queries, and of keys and values."""

    @property
    def parameters(self) -> dict[str, Parameter]:
        found = super().parameters
        for name in ("wq.weight", "wkv_b.weight"):
            rows, _ = found[name].shape
            bias = dataclasses.replace(found[name], shape=(rows,), std=0.5, token_share=0)
            found[name.replace("weight", "bias")] = bias
        return found


class BiasedArgs(DeepseekV3Args):
    def attention_layers(self, attention: AttentionSpec) -> Sequence[AttentionSpec]:
        (one, *_) = super().attention_layers(attention)
        parts = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
        return [BiasedSpec(**parts)] * self.n_layers


@pytest.mark.ranks(2)
def test_each_rank_adds_its_part_of_a_bias_of_gathered_input() -> None:
    """Of the input that several modules share; the bias took the place of the weight."""
    dimensions = {field.name: getattr(ARGS, field.name) for field in dataclasses.fields(ARGS)}
    args = BiasedArgs(**dimensions | {"q_lora_rank": 0})
    batch, model = batch_of(is_packed=False), plain_model(args)
    logits = model(batch.tokens)
    want = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    want.backward()
    job = Job(ParallelDims(dp_replicate=1, dp_shard=1, tp=2, ep=1), args=args)
    gradients = job.whole_gradients()
    result = job.take_step(1, job.part(batch))
    assert result.loss.item() == pytest.approx(want.item(), rel=2e-6)
    for name, parameter in model.named_parameters():
        error = (gradients[name] - parameter.grad).abs().max()
        # fp32 in another order; beside large biases the gradient of a weight is a small difference
        assert error <= 1e-4 * parameter.grad.abs().max(), name
    names = {name for name in gradients if name.endswith(("wq.bias", "wkv_b.bias"))}
    assert len(names) == 2 * args.n_layers
