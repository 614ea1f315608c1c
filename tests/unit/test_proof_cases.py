"""A proof's cases have the user's options also where a step has several microbatches."""

import math
from dataclasses import replace

import pytest

from meshwright.commands.prove.bounds import BF16, BOUNDS, TIES, bounds_of
from meshwright.commands.prove.cases import Case, can_run, default_cases, reference_case
from meshwright.commands.prove.shrink import GLOBAL_BATCH, shrink
from meshwright.commands.prove.user_options import (
    SCHEDULE,
    for_mesh,
    own_options,
    reduction_choices,
    user_types,
)
from meshwright.config.changes import changed
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.train.resolve_model import resolve_model
from tests.campaigns.random_configs import draw
from tests.helpers.resolved import resolved

ACCUMULATES = ("--training.local_batch_size=1", "--training.global_batch_size=32")
"""On 1 to 32 ranks, and so several microbatches on fewer than 32."""


def cases_of(*words: str) -> tuple[JobConfig, list[Case]]:
    config = load_config([*ACCUMULATES, *words])
    args = resolve_model(config)[1]
    return config, default_cases(config, shrink(config, args), args)


def microbatches(case: Case) -> int:
    return resolved(case.config, case.world_size).config.num_microbatches


def value(config: JobConfig, key: str) -> object:
    found = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


REPLICAS = "parallelism.data_parallel_replicate_degree=2"
IN_BF16 = "training.mixed_precision_param=bfloat16"
OPTIONS = {
    "parallelism.fsdp_reshard_after_forward=never": [],
    "parallelism.fsdp_reshard_after_forward=always": ["parallelism.pipeline_parallel_degree=2"],
    "parallelism.fsdp_prefetch_layers=2": [],
    "parallelism.fsdp_cpu_backend=gloo": [],
    "parallelism.fsdp_reduce_gradients=every_microbatch": [REPLICAS],
    "parallelism.fsdp_reduce_gradients=last_microbatch": [],
    "parallelism.pipeline_parallel_schedule=GPipe": ["parallelism.pipeline_parallel_degree=2"],
    "activation_checkpoint.mode=full": [],
    "activation_checkpoint.mode=selective": ["parallelism.tensor_parallel_degree=2"],
    "activation_checkpoint.mode=memory_budget": ["compile.enable=true"],
    "activation_checkpoint.selective_ac_option=2": ["activation_checkpoint.mode=selective"],
    'activation_checkpoint.saved_ops=["aten.mm"]': ["activation_checkpoint.mode=selective"],
    "activation_checkpoint.memory_budget=0.25": ["activation_checkpoint.mode=memory_budget"],
    "compile.enable=true": [],
    "compile.backend=aot_eager": ["compile.enable=true"],
    "compile.cpu_attention=torch": ["compile.enable=true"],
    "training.enable_cpu_offload=true": [],
    "training.dtype=bfloat16": [IN_BF16],
    "training.mixed_precision_reduce=bfloat16": [IN_BF16],
    "training.max_norm=0.5": [],
    "optimizer.early_step_in_backward=true": ["training.max_norm=inf"],
    "optimizer.name=muon": [],
    "optimizer.muon.dtype=float32": ["optimizer.name=muon"],
    "checkpoint.average.decay=0.9": [],
}
"""Options away from their default, and what they need."""

IN_SMALL = {"checkpoint.average.decay": 0.75}
"""Values that the small job has for the user's: a mean that a few steps show."""


@pytest.mark.parametrize("word", OPTIONS)
def test_an_option_has_a_case_with_several_microbatches(word) -> None:
    config, cases = cases_of(*(f"--{word}" for word in (word, *OPTIONS[word])))
    key = word.partition("=")[0]
    wanted = IN_SMALL.get(key, value(config, key))
    assert wanted in [value(case.config, key) for case in cases if microbatches(case) > 1]


SEED = 49


@pytest.mark.parametrize("number", range(8))
def test_options_of_a_random_config_have_one_case_with_several_microbatches(number) -> None:
    """All at once, as in the user's job; and each case can run."""
    print(f"seed {SEED}, config {number}")
    words = draw(SEED, number, most_ranks=8).words
    config, cases = cases_of(*words)
    assert [case.name for case in cases if not can_run(case)] == []
    wanted = own_options(config)
    if config.compile.enable == "auto" and config.activation_checkpoint.mode != "memory_budget":
        wanted["compile"]["enable"] = False
    if config.parallelism.fsdp_reduce_gradients == "auto":
        del wanted["parallelism"]["fsdp_reduce_gradients"]  # which is resolved
    several = [case for case in cases if microbatches(case) > 1]
    assert any(changed(case.config, wanted) == case.config for case in several)


LLAMA_8B = ("--model.flavor=llama3_8b", "--training.seq_len=8192")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], ["last_microbatch"]),
        (LLAMA_8B, ["every_microbatch"]),  # 32 GB of unsharded gradients
        ([*LLAMA_8B, "--job.device_memory_gib=192"], ["last_microbatch"]),
        ([*LLAMA_8B, "--training.global_batch_size=-1"], ["auto"]),  # one microbatch on any mesh
        ([*LLAMA_8B, "--parallelism.pipeline_parallel_degree=2"], ["last_microbatch"]),
        ([*LLAMA_8B, "--parallelism.data_parallel_shard_degree=32"], ["auto"]),
    ],
)
def test_when_gradients_are_reduced_is_decided_for_the_users_model(words, wanted) -> None:
    keys = {word.partition("=")[0] for word in words}
    kept = [word for word in ACCUMULATES if word.partition("=")[0] not in keys]
    config = load_config([*kept, *words])
    args = resolve_model(config)[1]
    assert reduction_choices(config, args) == wanted
    cases = default_cases(config, shrink(config, args), args)
    own = [case for case in cases if case.name.startswith("as configured")]
    assert {case.config.parallelism.fsdp_reduce_gradients for case in own} == {*wanted}


def test_both_ways_to_reduce_are_proved_if_ranks_decide() -> None:
    """With more ranks, Muon's state leaves less for each gigabyte that is saved."""
    words = [*LLAMA_8B, "--job.device_memory_gib=110", "--optimizer.name=muon"]
    config, cases = cases_of(*words)
    assert reduction_choices(config, resolve_model(config)[1]) == [
        "every_microbatch",
        "last_microbatch",
    ]
    names = [case.name for case in cases if case.name.startswith("as configured, 2")]
    assert names == [
        "as configured, 2 microbatches: dp_shard 4",
        "as configured, 2 microbatches, last_microbatch: dp_shard 4",
    ]


@pytest.mark.parametrize(
    ("words", "keys", "gradient"),
    [
        (["--training.dtype=bfloat16"], ["dtype"], 1e-4 + 2 * BF16),
        (["--optimizer.name=muon"], ["muon.dtype"], 1e-4),
        (["--training.mixed_precision_reduce=bfloat16"], ["mixed_precision_reduce"], 6 * BF16),
        (["--training.dtype=bfloat16", "--optimizer.name=muon"], ["dtype", "muon.dtype"], None),
        (["--optimizer.name=muon", "--optimizer.muon.dtype=float32"], [], None),
        (["--optimizer.muon.dtype=bfloat16"], [], None),  # AdamW has no use for it
    ],
)
def test_types_of_the_user_have_one_case_and_others_are_fp32(words, keys, gradient) -> None:
    config, cases = cases_of("--training.mixed_precision_param=bfloat16", *words)
    own = [case for case in cases if case.kind == "user types"]
    assert user_types(config) == keys
    assert [case.name.partition(":")[0] for case in own] == [f"bf16 {', '.join(keys)}"] * bool(keys)
    assert all(user_types(case.config) == (keys if case in own else []) for case in cases)
    if gradient is not None:
        bounds = bounds_of(own[0])
        assert bounds.gradient + bounds.stored == pytest.approx(gradient, abs=2e-4)
        assert bounds.stored == (2 * BF16 if keys == ["dtype"] else 0)
        assert bounds.different == (TIES if keys == ["dtype"] else math.inf)
        assert bounds.update_rounding == 2
    assert bounds_of(cases[0]) == BOUNDS["fp32"]
    cut = changed(config, {"parallelism": {"pipeline_parallel_degree": 2}})
    staged = replace(cases[0], kind="bf16 sums", config=cut)
    assert bounds_of(staged).tied == (3 * BF16 if keys[:1] == ["dtype"] else BF16)


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("kind", ["bf16", "bf16 sums", "user types"])
def test_narrow_sums_over_ranks_narrow_no_bound(kind, float8) -> None:
    """They come on top of what products differ by. Updates in float8 had the bound of fp32."""
    _, cases = cases_of("--training.mixed_precision_param=bfloat16")
    words = {"training": {"mixed_precision_reduce": "bfloat16"}, "float8": {"enable": float8}}
    case = replace(cases[0], kind=kind, config=changed(cases[0].config, words))
    wide, narrow = bounds_of(case), BOUNDS[case.bounds]
    fields = ("loss", "grad_norm", "gradient", "update", "later_loss", "later_grad_norm")
    assert [name for name in fields if getattr(wide, name) < getattr(narrow, name)] == []
    assert (wide.gradient > narrow.gradient, wide.grad_norm > narrow.grad_norm) == (True, True)
    # squares of 4 times the gradients' errors
    assert wide.update**4 == pytest.approx(narrow.update**4 + (4 * wide.gradient) ** 2)


def test_a_step_of_one_process_adds_up_in_fp32_whatever_the_reduction() -> None:
    config, _ = cases_of(
        "--training.mixed_precision_param=bfloat16", "--training.mixed_precision_reduce=bfloat16"
    )
    small = shrink(config, resolve_model(config)[1])
    reference = reference_case(small, "user types").config.training
    assert reference.mixed_precision_reduce == "float32"
    assert (reference.local_batch_size, reference.global_batch_size) == (1, GLOBAL_BATCH)


def test_only_a_mesh_with_a_pipeline_takes_the_schedule() -> None:
    options = own_options(load_config(["debug_model", "--parallelism.pipeline_parallel_degree=2"]))
    assert SCHEDULE in for_mesh(options, {"pp", "tp"})["parallelism"]
    assert SCHEDULE not in for_mesh(options, {"tp"})["parallelism"]
