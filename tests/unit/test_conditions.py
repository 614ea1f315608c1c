"""A key that has no effect beside the others of a config is told, and no other is."""

from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import tomli

from meshwright.config.combinations import IDLE_BESIDE, IDLE_WHERE, idle_options
from meshwright.config.fields import all_keys, find_field, value_of
from meshwright.config.job_config import JobConfig, needs_fsdp_alone
from meshwright.config.loader import load_config
from meshwright.config.parallelism import Float8
from meshwright.config.training import Training
from meshwright.datasets.named_sources import idle_source_options
from meshwright.parallelisms.rules.degrees import check_device
from meshwright.train.preflight import preflight
from tests.helpers.cli import check_job

DEFAULTS = JobConfig()
KEYS = [".".join(key) for key, _ in all_keys()]
JSON_SOURCE = '[{dataset="json",dataset_path="x",weight=1.0}]'
VALUES: dict[str, Any] = {
    "lr_scheduler.total_steps": 20_000,
    "model.flavor": "llama3_8b",
    "model.args": {"n_layers": 2, "vocab_size": 258},
    "model.frozen": ["norm.weight"],
    "training.datasets": [{"dataset": "python_stdlib", "weight": 1.0}],
    "training.dataset_format": "os.path:join",
    "training.fp32_modules": ["output"],
    "training.dataset_where": ["a == 1"],
    "validation.dataset_where": ["a == 1"],
    "validation.dataset": "json",
    "validation.datasets": [{"dataset": "python_stdlib"}],
    "validation.sample_prompts": ["def "],
    "optimizer.groups": [{"parameters": ["norm.weight"]}],
    "optimizer.muon.coefficients": [2.0, -1.5, 0.5],
    "parallelism.module_fqns_per_model_part": [["output"]],
    "activation_checkpoint.selective_ac_option": "2",
    "activation_checkpoint.saved_ops": ["aten.mm"],
    "checkpoint.exclude_from_loading": ["optimizer"],
    "checkpoint.average.window_tokens": 10**9,
    "compile.enable": True,
    "float8.filter_fqns": ["attention"],
}
"""Valid values where the type does not say one."""


def other_value(key: str) -> Any:
    """A valid value that is not the default."""
    if key in VALUES:
        return VALUES[key]
    default, field = value_of(DEFAULTS, key), find_field(tuple(key.split(".")))
    annotation = field.annotation
    if get_origin(annotation) in (Union, UnionType):
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Literal:
        return next(choice for choice in get_args(annotation) if choice != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return max(default, 0) + 1
    return {str: "x", float: 0.25}[annotation if annotation in (str, float) else float]


def config_with(**values: Any) -> JobConfig:
    """A job on one process, with values by key; `__` stands for the dot."""
    tables: dict[str, dict[str, Any]] = {
        "model": {"tokenizer_path": "bytes", "args": {"vocab_size": 258}},
    }
    for key, value in values.items():
        *sections, name = key.split("__")
        table = tables
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    return JobConfig.model_validate(tables)


SOURCE = (
    "dataset_path dataset_subset dataset_revision dataset_split dataset_column dataset_format "
    "dataset_mode"
)
JSON = 'training.dataset="json" training.dataset_path="x"'
TWO_IN_FP32 = 'parallelism.tensor_parallel_degree=2 training.mixed_precision_param="float32"'
STREAMED = 'training.dataset_mode="streamed"'


def by_key(table: dict[str, str]) -> dict[str, str]:
    """From "section: key key" to "section.key"."""
    rows = ((*keys.split(": "), beside) for keys, beside in table.items())
    return {f"{section}.{key}": beside for section, keys, beside in rows for key in keys.split()}


FILTERS = "dataset_separator dataset_where max_documents"
AWAKE = by_key(
    {
        "parallelism: enable_async_tensor_parallel": "parallelism.tensor_parallel_degree=2",
        "parallelism: pipeline_parallel_schedule pipeline_parallel_stages_per_rank "
        "module_fqns_per_model_part": "parallelism.pipeline_parallel_degree=2",
        "parallelism: fsdp_reshard_after_forward fsdp_prefetch_layers "
        "fsdp_cpu_backend": TWO_IN_FP32,
        "parallelism: fsdp_reduce_gradients": "training.global_batch_size=16 "
        "training.enable_cpu_offload=true",
        "training: mixed_precision_reduce": TWO_IN_FP32,
        "training: fp32_modules": 'training.mixed_precision_param="bfloat16"',
        "training: dataset_column dataset_format dataset_path": JSON,
        "model: chat_template_path": JSON,
        "training: dataset_subset dataset_revision": 'training.dataset="c4"',
        "training: attention_kernel dataset_split dataset_mode token_cache_folder": "",
        "training: shuffle_window stream_shards": STREAMED,
        f"training: {FILTERS}": JSON,
        f"validation: {FILTERS}": 'validation.enable=true validation.dataset="json"',
        f"validation: freq num_samples datasets {SOURCE}": "validation.enable=true "
        'validation.dataset="json"',
        "validation: dataset sample_prompts": "validation.enable=true",
        "validation: sample_tokens": 'validation.enable=true validation.sample_prompts=["def"]',
        "lr_scheduler: decay_type": "lr_scheduler.warmup_steps=2",
        "lr_scheduler: min_lr_factor": "lr_scheduler.decay_ratio=0.1",
        "optimizer: decay_norm_and_bias": "",
        "optimizer: muon.momentum muon.nesterov muon.steps muon.coefficients muon.lr_scale "
        "muon.split_heads muon.dtype": 'optimizer.name="muon"',
        "checkpoint: average.decay": "checkpoint.enable=true",
        "checkpoint: average.window_tokens": "validation.enable=true",
        "bad_steps: budget": 'bad_steps.policy="skip"',
        "bad_steps: spike_window": "bad_steps.spike_std=6.0",
        "activation_checkpoint: selective_ac_option saved_ops": "activation_checkpoint.mode="
        '"selective"',
        "activation_checkpoint: memory_budget": 'activation_checkpoint.mode="memory_budget"',
        "compile: backend cpu_attention": "compile.enable=true",
        "float8: recipe_name filter_fqns emulate": "float8.enable=true",
        "checkpoint: folder interval keep_latest_k keep_every_n_steps async_mode keep_best "
        "on_save_failure load_only enable_first_step_checkpoint last_save_model_only "
        "last_save_in_hf verify": "checkpoint.enable=true",
        "checkpoint: export_dtype": "checkpoint.enable=true checkpoint.last_save_model_only=true",
        "metrics: save_tb_folder": "",
        "metrics: wandb_project wandb_entity wandb_name": "metrics.enable_wandb=true",
        "profiling: profile_freq": "profiling.enable_profiling=true",
    }
)
"""Beside which values each key that can be idle has an effect."""
ASLEEP = by_key(
    {
        f"training: {SOURCE} {FILTERS}": f"training.datasets={JSON_SOURCE}",
        "training: mixed_precision_reduce": 'training.mixed_precision_param="float32"',
        "training: fp32_modules": 'training.mixed_precision_param="float32"',
        "training: token_cache_folder": STREAMED,
        "training: attention_kernel": "training.mask_documents=true",
        "lr_scheduler: decay_type": "training.steps=100",
        "lr_scheduler: min_lr_factor": "lr_scheduler.decay_ratio=0.0",
        "optimizer: decay_norm_and_bias": "optimizer.weight_decay=0.0",
        "compile: backend": "compile.enable=false",
        "compile: cpu_attention": "compile.enable=true training.mask_documents=true",
        "metrics: save_tb_folder": "metrics.enable_tensorboard=false",
        "validation: sample_tokens": "validation.enable=true",
    }
)
"""Beside which it has none; of the others, beside the defaults."""
ON_ONE_RANK = {"parallelism__data_parallel_shard_degree": 1, "training__global_batch_size": 8}


def settings(text: str) -> dict[str, Any]:
    words = (word.split("=", 1) for word in text.split())
    return {k.replace(".", "__"): tomli.loads(f"v = {v}")["v"] for k, v in words}


def is_said_to_be_idle(key: str, beside: str) -> bool:
    value = {key.replace(".", "__"): other_value(key)}
    config = config_with(**ON_ONE_RANK | settings(beside) | value)
    said = [*idle_options(config, config.training.steps), *idle_source_options(config)]
    return any(text.startswith(f"{key} = ") for text in said)


@pytest.mark.parametrize("key", AWAKE)
def test_an_option_is_idle_only_where_it_has_no_effect(key: str) -> None:
    assert is_said_to_be_idle(key, ASLEEP.get(key, ""))
    assert not is_said_to_be_idle(key, AWAKE[key])


def test_every_row_of_the_table_is_tested() -> None:
    rows = {
        f"{cause.split('.')[0]}.{k}" for cause, keys in IDLE_BESIDE.items() for k in keys.split()
    }
    rows |= {key for keys, _, _ in IDLE_WHERE for key in keys.split()}
    assert rows <= AWAKE.keys() <= set(KEYS)


MESH_OPTIONS = """
[model]
tokenizer_path = "bytes"
args = { vocab_size = 260 }

[training]
seq_len = 64
steps = 100
mask_documents = true

[parallelism]
enable_async_tensor_parallel = true
pipeline_parallel_schedule = "Interleaved1F1B"
"""


def test_the_same_toml_runs_where_its_options_have_nothing_to_act_on(tmp_path, capsys) -> None:
    (tmp_path / "a.toml").write_text(MESH_OPTIONS)
    words = ["--job.config_file", str(tmp_path / "a.toml"), "--job.dump_folder", str(tmp_path)]
    check_job(["--ngpu", "1", *words, "--training.mixed_precision_param=float32"])
    *notes, can_run = capsys.readouterr().out.splitlines()
    assert can_run.startswith(f"{tmp_path / 'a.toml'} can run: ")
    lines = [line.split(" ", 1)[1] for line in notes]
    tp, pp = (f"parallelism.{axis}_parallel_degree = 1" for axis in ("tensor", "pipeline"))
    assert lines == [
        f"parallelism.enable_async_tensor_parallel = true has no effect: {tp}",
        f"parallelism.pipeline_parallel_schedule = 'Interleaved1F1B' has no effect: {pp}",
        "optimizer.lr = 0.0008 is never reached: lr_scheduler.warmup_steps = 200, and the job has "
        "100",
    ]
    for device_type in ("cpu", "cuda"):
        check_device(preflight(load_config(words), 1).config, device_type)


def test_a_config_of_defaults_says_nothing(tmp_path, capsys) -> None:
    (tmp_path / "a.toml").write_text('[model]\ntokenizer_path = "bytes"\nargs.vocab_size = 258\n')
    words = [tmp_path / "a.toml", "--compile.enable=false"]  # the default compiles so long a job
    words += ["--training.global_batch_size=16", "--training.mixed_precision_param=float32"]
    check_job(["--ngpu", "2", *words, "--job.dump_folder", str(tmp_path)])
    assert capsys.readouterr().out == (
        f"{tmp_path / 'a.toml'} can run: 4,854,016 parameters, 2 ranks, 10,000 steps of 32,768 "
        "tokens\n"
    )


def test_of_keys_without_effect_only_the_user_s_own_are_told(tmp_path, capsys) -> None:
    """Not those of the preset, which the user did not write."""
    (tmp_path / "a.toml").write_text('extends = "debug_model"\nvalidation.enable = false\n')
    words = [tmp_path / "a.toml", "--job.dump_folder", tmp_path]
    check_job(words)
    assert "has no effect" not in capsys.readouterr().out
    check_job([*words, "--validation.num_samples", 9])
    said = "validation.num_samples = 9 has no effect: validation.enable = false"
    assert capsys.readouterr().out.count(said) == 1


def test_validation_on_other_data_than_training_is_told(tmp_path, capsys) -> None:
    (tmp_path / "a.txt").write_text("some words")
    own = 'dataset = "text"\ndataset_path = "a.txt"\n'
    toml, said = tmp_path / "a.toml", "validation reads python_stdlib, and training text"
    toml.write_text(f'extends = "debug_model"\n[training]\n{own}')
    check_job([toml])
    assert capsys.readouterr().out.count(said) == 1
    toml.write_text(f'{toml.read_text()}[validation]\n{own}dataset_split = "train"\n')
    check_job([toml])
    assert said not in capsys.readouterr().out


@pytest.mark.parametrize(("batch", "ranks", "is_said"), [(-1, 2, 1), (-1, 1, 0), (16, 2, 0)])
def test_a_batch_that_follows_the_ranks_is_told(batch, ranks, is_said, tmp_path, capsys) -> None:
    words = [f"--training.global_batch_size={batch}", "--job.dump_folder", tmp_path]
    check_job(["debug_model", "--ngpu", ranks, *words])
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("= -1: the batch follows the number of ranks, here 4 sequences") == is_said


def test_a_group_of_frozen_parameters_is_idle(tmp_path) -> None:
    groups = [{"parameters": ["norm.*"]}, {"parameters": ["*norm.weight"]}]
    config = config_with(
        optimizer__groups=groups, model__frozen=["norm.*"], job__dump_folder=str(tmp_path)
    )
    (line,) = preflight(config, 1).idle_options.values()
    assert line == "optimizer.groups.0 has no effect: model.frozen has all its parameters"


@pytest.mark.parametrize(
    ("dtype", "param", "reduce", "needs"),
    [
        ("float32", "float32", "float32", False),
        ("float32", "bfloat16", "float32", False),
        ("float32", "bfloat16", "bfloat16", True),
        ("bfloat16", "bfloat16", "float32", True),  # autograd would add up in bf16
    ],
)
def test_one_rank_needs_fsdp_for_other_sums_than_in_fp32(dtype, param, reduce, needs) -> None:
    training = Training(dtype=dtype, mixed_precision_param=param, mixed_precision_reduce=reduce)
    assert needs_fsdp_alone(training, Float8()) == needs
    assert needs_fsdp_alone(training.model_copy(update={"enable_cpu_offload": True}), Float8())
    assert needs_fsdp_alone(training, Float8(enable=True))
