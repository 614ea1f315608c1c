"""How a job keeps gradients between microbatches, and which jobs cannot fit a device."""

import math
from collections.abc import Iterable

import pytest
import torch

from meshwright.config.changes import changed
from meshwright.config.loader import load_config
from meshwright.models.families import olmoe
from meshwright.models.families.llama import FLAVORS
from meshwright.parallelisms.rules.memory import heaviest_load
from meshwright.system import hardware
from meshwright.system.errors import ConfigError
from meshwright.train import job as train
from meshwright.train.resolve import ResolvedJob
from tests.helpers.resolved import resolved

GIB = 2**30
EARLY = {"optimizer__early_step_in_backward": True, "training__max_norm": "inf"}


def plan(ranks: int = 8, batch: int = 16, **keys: object) -> ResolvedJob:
    """Of Llama 3 8B: 32.1 GB of gradients in fp32."""
    words = {
        "model.flavor": "llama3_8b",
        "model.tokenizer_path": "bytes",
        "training.local_batch_size": 1,
        "training.global_batch_size": batch,
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    config = load_config([f"--{key}={value}" for key, value in words.items()])
    return resolved(config, ranks)


ONCE, EVERY = "last_microbatch", "every_microbatch"
REDUCTION = "parallelism__fsdp_reduce_gradients"
SHARD = "parallelism__data_parallel_shard_degree"
REPLICATE = "parallelism__data_parallel_replicate_degree"
PIPELINE = {"parallelism__pipeline_parallel_degree": 2}
BF16_SUMS = {"training__mixed_precision_reduce": "bfloat16"}
BF16_WEIGHTS = {"training__dtype": "bfloat16"}
SMALL = {"model__flavor": "llama3_1b"}


@pytest.mark.parametrize(
    ("want", "ranks", "batch", "keys"),
    [
        (EVERY, 8, 16, {}),
        (ONCE, 8, 16, {REDUCTION: ONCE}),
        ("auto", 8, 8, {}),  # one microbatch: no choice
        (EVERY, 8, 8, {REDUCTION: EVERY}),
        (ONCE, 8, 16, PIPELINE),
        (ONCE, 8, 16, EARLY),
        (ONCE, 8, 16, BF16_WEIGHTS),
        (ONCE, 8, 16, {SHARD: 1, REPLICATE: 8}),  # the shard is all
        (EVERY, 8, 16, {SHARD: 4, REPLICATE: 2}),
        (ONCE, 8, 16, {"parallelism__tensor_parallel_degree": 4}),  # 8 GB, of which 4 are the shard
        (ONCE, 8, 16, SMALL | {"job__device_memory_gib": 24}),
        (EVERY, 8, 16, SMALL | {"job__device_memory_gib": 18}),  # 4.0 GiB; a quarter is 3.9
        (ONCE, 8, 16, {"model__flavor": "llama3_3b"}),  # 10.5 GiB; it is 18
        (EVERY, 8, 16, SMALL | BF16_SUMS),
        (EVERY, 8, 16, {"training__enable_cpu_offload": True}),
    ],
)
def test_how_gradients_are_reduced(want, ranks, batch, keys) -> None:
    assert plan(ranks, batch, **keys).config.parallelism.fsdp_reduce_gradients == want


def test_microbatches_are_not_added_up_in_bfloat16() -> None:
    copies = {SHARD: 4, REPLICATE: 2}
    for keys in (
        *({REDUCTION: ONCE}, copies, copies | {REDUCTION: EVERY}, PIPELINE, EARLY),
        BF16_WEIGHTS | {REDUCTION: EVERY},
    ):
        rule = "^training.mixed_precision_reduce = .* would also add up the . microbatches"
        with pytest.raises(ConfigError, match=rule):
            plan(8, 32, **keys, **BF16_SUMS)


def test_shards_in_bfloat16_do_not_add_up_microbatches() -> None:
    with pytest.raises(ConfigError, match="would add up the 4 microbatches .*, bfloat16") as error:
        plan(8, 32, **BF16_WEIGHTS, **{REDUCTION: EVERY})
    assert error.value.key == "parallelism.fsdp_reduce_gradients"
    plan(8, 8, **BF16_WEIGHTS, **{REDUCTION: EVERY})
    plan(8, 32, **BF16_WEIGHTS, **{REDUCTION: EVERY, SHARD: 4, REPLICATE: 2})


P = 8_030_261_248  # parameters of Llama 3 8B


def test_a_stage_without_modules_has_no_load() -> None:
    job = plan(2, 2, **SMALL)
    args, names = job.model_args, [name for stage in job.pipeline_modules for name in stage]
    for stages in ([names, []], [[], names]):
        config = changed(job.config, {"parallelism": {"pipeline_parallel_degree": 2}})
        load = heaviest_load(config, args.table, stages, frozenset())
        assert load.parameters == load.trained_in_stage == args.table.num_params


def test_gathered_experts_are_cut_by_ep_alone() -> None:
    table = olmoe.FLAVORS["olmoe_1b_7b"].table
    degrees = {"tensor_parallel_degree": 2, "expert_parallel_degree": 4}
    config = changed(load_config([]), {"parallelism": degrees})
    frozen = {"layers.0.feed_forward.experts.w1", "tok_embeddings.weight"}
    load = heaviest_load(config, table, [[*table.by_block]], frozenset(frozen))

    def size(names: Iterable[str], of_experts: int) -> int:
        shapes = {name: table.parameters[name].shape for name in names}
        cut = {n: of_experts if ".experts." in n else len(shape) for n, shape in shapes.items()}
        return sum(math.prod(shape) // cut[name] for name, shape in shapes.items())

    every, trained = table.parameters, table.parameters.keys() - frozen
    assert load == (size(every, 2), size(trained, 2), size(trained, 4), size(every, 4))


@pytest.mark.parametrize(
    ("want", "batch", "keys"),
    [
        # weights, two moments, and gradients or what is there in backward
        ((4 + 8 + 4) * P / 8, 16, {}),
        ((4 + 8) * P / 8 + 4 * P, 16, {REDUCTION: ONCE}),
        ((4 + 8 + 4) * P / 8, 8, {REDUCTION: ONCE}),
        ((4 + 8) * P / 8 + 4 * P, 16, EARLY),
        ((4 + 8) * P / 8, 8, EARLY),
        ((2 + 4) * P / 8 + 4 * P, 16, BF16_WEIGHTS),
        ((4 + 8) * P / 8 + 2 * P, 8, {"parallelism__fsdp_reshard_after_forward": "never"}),
        (4 * P, 16, {"training__enable_cpu_offload": True, REDUCTION: ONCE}),
        (0, 16, {"training__enable_cpu_offload": True}),
    ],
)
def test_the_least_memory_of_a_rank(want, batch, keys) -> None:
    assert sum(plan(8, batch, **keys).least_bytes.values()) == pytest.approx(want)


def test_the_least_memory_of_frozen_and_of_cut_models() -> None:
    args = FLAVORS["llama3_8b"]
    ends = args.vocab_size * args.dim
    frozen = plan(8, 8, model__frozen='["tok_embeddings.*", "output.*"]')
    assert sum(frozen.least_bytes.values()) == pytest.approx((4 * P + 12 * (P - 2 * ends)) / 8)
    # matrices divide by tp, and norms (65 of them) by the other ranks alone
    norms = 65 * args.dim
    cut = plan(8, 2, parallelism__tensor_parallel_degree=4)
    assert sum(cut.least_bytes.values()) == pytest.approx(16 * ((P - norms) / 8 + norms / 2))
    # the last of two stages has as many layers as the first, and a norm besides; what backward
    # has whole: bf16 weights and fp32 gradients
    stage = P / 2 + args.dim / 2
    pipeline = plan(8, 16, **PIPELINE)
    assert sum(pipeline.least_bytes.values()) == pytest.approx(stage * (12 / 4 + 2 + 4))
    # with two stages on a rank, one may be done before the other begins backward; the last has
    # seven layers, the norm and the output
    quarters = plan(8, 16, **PIPELINE, parallelism__pipeline_parallel_schedule="Interleaved1F1B")
    largest = 7 * (P - 2 * ends - args.dim) / 32 + args.dim + ends
    assert sum(quarters.least_bytes.values()) == pytest.approx(stage * 12 / 4 + largest * (2 + 4))


def test_a_job_that_cannot_fit_the_device_is_refused_with_the_ways_out() -> None:
    says = '(?s)41.1 GiB of its device.s 40.0.*unsharded gradients 29.9.* = "every_microbatch"'
    with pytest.raises(ConfigError, match=says):
        plan(8, 16, **{REDUCTION: ONCE}, job__device_memory_gib=40)
    plan(8, 16, **{REDUCTION: ONCE}, job__device_memory_gib=42)
    with pytest.raises(ConfigError, match="more ranks"):
        plan(2, 16, job__device_memory_gib=40)


def test_a_rank_compares_the_gpu_that_it_finds(monkeypatch) -> None:
    monkeypatch.setattr(hardware, "pick_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(hardware, "memory_gib", lambda device: 14.5)
    monkeypatch.setattr(hardware, "has_float8", lambda device: True)
    with pytest.raises(ConfigError, match="at least 15.0 GiB of its device's 14.5"):
        train.run(plan())
