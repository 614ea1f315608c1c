"""Every key of the config acts, is refused, or is reported as idle: none is accepted in silence."""

import re
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest

import meshwright
from meshwright.config.fields import value_of
from meshwright.config.idle import IDLE_BESIDE, IDLE_WHERE, idle_options
from meshwright.config.job_config import JobConfig, needs_fsdp_alone
from meshwright.config.loader import load_config
from meshwright.config.parallelism import Float8
from meshwright.config.training import Training
from meshwright.datasets.named_sources import idle_source_options
from meshwright.parallelisms.rules.degrees import check_device
from meshwright.system import machine
from meshwright.system.errors import ConfigError
from meshwright.train.preflight import preflight
from tests.helpers.cli import check_job

PACKAGE = Path(meshwright.__file__).parent
DEFAULTS = JobConfig()
KEYS = [
    f"{section}.{key}"
    for section, field in JobConfig.model_fields.items()
    for key in field.annotation.model_fields
]
JSON_SOURCE = {"dataset": "json", "dataset_path": __file__, "weight": 1.0}
VALUES: dict[str, Any] = {
    "lr_scheduler.total_steps": 20_000,
    "model.flavor": "llama3_8b",
    "model.args": {"n_layers": 2, "vocab_size": 258},
    "model.frozen": ["norm.weight"],
    "training.datasets": [{"dataset": "python_stdlib", "weight": 1.0}],
    "training.dataset_format": "os.path:join",
    "training.fp32_modules": ["output"],
    "validation.dataset": "json",
    "validation.datasets": [{"dataset": "python_stdlib"}],
    "validation.sample_prompts": ["def "],
    "optimizer.groups": [{"parameters": ["norm.weight"]}],
    "parallelism.module_fqns_per_model_part": [["output"]],
    "activation_checkpoint.selective_ac_option": "2",
    "activation_checkpoint.saved_ops": ["aten.mm"],
    "checkpoint.exclude_from_loading": ["optimizer"],
    "compile.enable": True,
    "float8.filter_fqns": ["attention"],
}
"""Valid values where the type does not say one."""


def other_value(key: str) -> Any:
    """A valid value that is not the default."""
    if key in VALUES:
        return VALUES[key]
    section, name = key.split(".")
    default = value_of(DEFAULTS, key)
    annotation = JobConfig.model_fields[section].annotation.model_fields[name].annotation
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
        section, name = key.split("__")
        tables.setdefault(section, {})[name] = value
    return JobConfig.model_validate(tables)


def outcome(key: str, folder: Path) -> str:
    """What one process says to a value that is not the default."""
    dump = {} if key == "job.dump_folder" else {"job__dump_folder": str(folder / "out")}
    config = config_with(**dump | {key.replace(".", "__"): other_value(key)})
    try:
        idle = preflight(config, 1).idle_options
    except ConfigError:
        return "refused"
    assert value_of(config, key) != value_of(DEFAULTS, key)
    return "idle" if any(text.startswith(f"{key} = ") for text in idle) else "acts"


def keys_of(**sections: str) -> set[str]:
    return {f"{name}.{key}" for name, keys in sections.items() for key in keys.split()}


SOURCE = (
    "dataset dataset_path dataset_subset dataset_revision dataset_split dataset_column "
    "dataset_format"
)
OUTCOMES = {
    "refused": keys_of(
        job="max_run_seconds",
        model="name tokenizer_path",
        training="dataset dataset_path dataset_subset dataset_revision dataset_split "
        "global_batch_size",
        optimizer="early_step_in_backward",
        parallelism="data_parallel_replicate_degree tensor_parallel_degree context_parallel_degree "
        "pipeline_parallel_degree",
        checkpoint="load_step exclude_from_loading initial_load_path initial_load_in_hf keep_best",
        float8="enable",
        metrics="enable_wandb",
        experimental="custom_import",
    ),
    "idle": keys_of(
        model="chat_template_path",
        training="dataset_column dataset_format shuffle_window stream_shards max_bad_records",
        validation=f"freq num_samples datasets {SOURCE} dataset_mode sample_prompts sample_tokens",
        bad_steps="budget spike_window",
        parallelism="enable_async_tensor_parallel "
        "pipeline_parallel_schedule pipeline_parallel_stages_per_rank module_fqns_per_model_part "
        "fsdp_reshard_after_forward fsdp_prefetch_layers fsdp_cpu_backend fsdp_reduce_gradients",
        activation_checkpoint="selective_ac_option saved_ops memory_budget",
        compile="backend cpu_attention",
        float8="recipe_name filter_fqns emulate",
        checkpoint="folder interval keep_latest_k keep_every_n_steps async_mode on_save_failure "
        "load_only enable_first_step_checkpoint last_save_model_only last_save_in_hf export_dtype "
        "verify",
        metrics="wandb_project wandb_entity wandb_name",
        profiling="profile_freq",
    ),
    "acts": keys_of(
        job="config_file dump_folder description device_memory_gib",
        model="flavor args frozen",
        training="datasets dataset_mode max_epochs mask_documents token_cache_folder "
        "local_batch_size loss_chunk_tokens seq_len max_norm steps dtype mixed_precision_param "
        "fp32_modules mixed_precision_reduce enable_cpu_offload gc_freq seed attention_kernel "
        "deterministic",
        validation="enable",
        optimizer="name lr beta1 beta2 eps weight_decay decay_norm_and_bias groups",
        bad_steps="policy spike_std",
        lr_scheduler="warmup_steps total_steps decay_ratio decay_type min_lr_factor",
        parallelism="data_parallel_shard_degree",
        activation_checkpoint="mode",
        compile="enable",
        checkpoint="enable",
        metrics="log_freq peak_tflops grad_norm_by_group enable_tensorboard save_tb_folder",
        profiling="enable_profiling enable_memory_snapshot save_traces_folder profiler_warmup "
        "profiler_active save_memory_snapshot_folder",
        comm="init_timeout_seconds train_timeout_seconds",
    ),
}
"""What one process, with all else by default, says to another value of each key. A new key belongs
under `acts` only if it does."""


def test_every_key_acts_or_is_answered(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # no wandb, no torchao
    monkeypatch.setenv("CXX", "none")  # so nothing is compiled by default
    got: dict[str, set[str]] = {name: set() for name in OUTCOMES}
    for key in KEYS:
        got[outcome(key, tmp_path)].add(key)
    assert got == OUTCOMES


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_read_by_what_it_is_for(key: str) -> None:
    """Outside of the config's own rules, which would answer for a key that nothing else reads."""
    name = key.split(".")[1]
    text = "".join(file.read_text() for file in PACKAGE.rglob("*.py") if not _is_rule(file))
    assert re.search(rf"\.{name}\b|\"{name}\"", text) or key == "job.config_file"


def _is_rule(file: Path) -> bool:
    return "config" in file.relative_to(PACKAGE).parts or file.name == "idle.py"


JSON = {"training__dataset": "json", "training__dataset_path": "x"}
TWO_IN_FP32 = {
    "parallelism__tensor_parallel_degree": 2,
    "training__mixed_precision_param": "float32",
}
STREAMED = {"training__dataset_mode": "streamed"}
AWAKE: dict[str, dict[str, Any]] = {
    "parallelism.enable_async_tensor_parallel": {"parallelism__tensor_parallel_degree": 2},
    **{
        f"parallelism.{key}": {"parallelism__pipeline_parallel_degree": 2}
        for key in (
            *("pipeline_parallel_schedule", "pipeline_parallel_stages_per_rank"),
            "module_fqns_per_model_part",
        )
    },
    **{
        f"parallelism.{key}": TWO_IN_FP32
        for key in ("fsdp_reshard_after_forward", "fsdp_prefetch_layers", "fsdp_cpu_backend")
    },
    "parallelism.fsdp_reduce_gradients": {
        "training__global_batch_size": 16,
        "training__enable_cpu_offload": True,
    },
    "training.mixed_precision_reduce": TWO_IN_FP32,
    "training.fp32_modules": {"training__mixed_precision_param": "bfloat16"},
    "training.attention_kernel": {},
    "training.dataset_column": JSON,
    "training.dataset_format": JSON,
    "training.dataset_path": JSON,
    "model.chat_template_path": JSON,
    "training.dataset_subset": {"training__dataset": "c4"},
    "training.dataset_revision": {"training__dataset": "c4"},
    "training.dataset_split": {},
    "training.dataset_mode": {},
    "training.shuffle_window": STREAMED,
    "training.max_bad_records": STREAMED,
    "training.stream_shards": STREAMED,
    "training.token_cache_folder": {},
    **{
        f"validation.{key}": {"validation__enable": True, "validation__dataset": "json"}
        for key in ("freq", "num_samples", "datasets", *SOURCE.split()[1:], "dataset_mode")
    },
    "validation.dataset": {"validation__enable": True},
    "validation.sample_prompts": {"validation__enable": True},
    "validation.sample_tokens": {
        "validation__enable": True,
        "validation__sample_prompts": ["def "],
    },
    "lr_scheduler.decay_type": {"lr_scheduler__warmup_steps": 2},
    "lr_scheduler.min_lr_factor": {"lr_scheduler__decay_ratio": 0.1},
    "optimizer.decay_norm_and_bias": {},
    "bad_steps.budget": {"bad_steps__policy": "skip"},
    "bad_steps.spike_window": {"bad_steps__spike_std": 6.0},
    "activation_checkpoint.selective_ac_option": {"activation_checkpoint__mode": "selective"},
    "activation_checkpoint.saved_ops": {"activation_checkpoint__mode": "selective"},
    "activation_checkpoint.memory_budget": {"activation_checkpoint__mode": "memory_budget"},
    "compile.backend": {"compile__enable": True},
    "compile.cpu_attention": {"compile__enable": True},
    **{
        f"float8.{key}": {"float8__enable": True}
        for key in ("recipe_name", "filter_fqns", "emulate")
    },
    **{
        f"checkpoint.{key}": {"checkpoint__enable": True}
        for key in (
            *("folder", "interval", "keep_latest_k", "keep_every_n_steps", "async_mode"),
            "verify",
            *("keep_best", "on_save_failure", "load_only", "enable_first_step_checkpoint"),
            *("last_save_model_only", "last_save_in_hf"),
        )
    },
    "checkpoint.export_dtype": {
        "checkpoint__enable": True,
        "checkpoint__last_save_model_only": True,
    },
    "metrics.save_tb_folder": {},
    **{
        f"metrics.{key}": {"metrics__enable_wandb": True}
        for key in ("wandb_project", "wandb_entity", "wandb_name")
    },
    "profiling.profile_freq": {"profiling__enable_profiling": True},
}
"""Beside which values each key that can be idle has an effect."""
ASLEEP: dict[str, dict[str, Any]] = {
    **{
        f"training.{key}": {"training__datasets": [JSON_SOURCE]}
        for key in (*SOURCE.split()[1:], "dataset_mode")
    },
    "training.mixed_precision_reduce": {"training__mixed_precision_param": "float32"},
    "training.fp32_modules": {"training__mixed_precision_param": "float32"},
    "training.token_cache_folder": STREAMED,
    "training.attention_kernel": {"training__mask_documents": True},
    "parallelism.fsdp_reshard_after_forward": {},
    "parallelism.fsdp_prefetch_layers": {},
    "parallelism.fsdp_cpu_backend": {},
    "lr_scheduler.decay_type": {"training__steps": 100},
    "lr_scheduler.min_lr_factor": {"lr_scheduler__decay_ratio": 0.0},
    "optimizer.decay_norm_and_bias": {"optimizer__weight_decay": 0.0},
    "compile.backend": {"compile__enable": False},
    "compile.cpu_attention": {"compile__enable": True, "training__mask_documents": True},
    "metrics.save_tb_folder": {"metrics__enable_tensorboard": False},
    "validation.sample_tokens": {"validation__enable": True},
}
"""Beside which it has none; of the others, beside the defaults."""
ON_ONE_RANK = {"parallelism__data_parallel_shard_degree": 1, "training__global_batch_size": 8}


def is_said_to_be_idle(key: str, beside: dict[str, Any]) -> bool:
    value = {key.replace(".", "__"): other_value(key)}
    config = config_with(**ON_ONE_RANK | beside | value)
    said = [*idle_options(config), *idle_source_options(config)]
    return any(text.startswith(f"{key} = ") for text in said)


@pytest.mark.parametrize("key", AWAKE)
def test_an_option_is_idle_only_where_it_has_no_effect(key: str) -> None:
    assert is_said_to_be_idle(key, ASLEEP.get(key, {}))
    assert not is_said_to_be_idle(key, AWAKE[key])


def test_every_row_of_the_table_is_tested() -> None:
    rows = {f"{cause.split('.')[0]}.{k}" for cause, _, keys in IDLE_BESIDE for k in keys.split()}
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
module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["norm", "output"]]
"""


def test_the_same_toml_runs_where_its_options_have_nothing_to_act_on(
    tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "of a CPU fast in bfloat16")
    (tmp_path / "a.toml").write_text(MESH_OPTIONS)
    words = ["--job.config_file", str(tmp_path / "a.toml"), "--job.dump_folder", str(tmp_path)]
    check_job(["--ngpu", "1", *words])
    *notes, can_run = capsys.readouterr().out.splitlines()
    assert can_run.startswith(f"{tmp_path / 'a.toml'} can run: ")
    lines = [line.split(" ", 1)[1] for line in notes]
    tp, pp = (f"parallelism.{axis}_parallel_degree = 1" for axis in ("tensor", "pipeline"))
    given = "[['tok_embeddings', 'layers.0'], ['norm', 'output']]"
    assert lines == [
        f"parallelism.enable_async_tensor_parallel = True has no effect: {tp}",
        f"parallelism.pipeline_parallel_schedule = 'Interleaved1F1B' has no effect: {pp}",
        f"parallelism.module_fqns_per_model_part = {given} has no effect: {pp}",
        "optimizer.lr = 0.0008 is never reached: lr_scheduler.warmup_steps = 200, and the job has "
        "100",
    ]
    plan = preflight(load_config(words), 1)
    for device_type in ("cpu", "cuda"):
        check_device(plan.config, device_type)
    eager = [*words, "--compile.enable=false", "--parallelism.tensor_parallel_degree=2"]
    with pytest.raises(ConfigError, match="nothing is compiled by inductor"):
        check_job(["--ngpu", "2", *eager])


def test_a_config_of_defaults_says_nothing(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "of a CPU fast in bfloat16")
    (tmp_path / "a.toml").write_text('[model]\ntokenizer_path = "bytes"\nargs.vocab_size = 258\n')
    words = [tmp_path / "a.toml", "--compile.enable=false"]  # the default compiles so long a job
    words += ["--training.global_batch_size=16"]
    check_job(["--ngpu", "2", *words, "--job.dump_folder", str(tmp_path)])
    assert capsys.readouterr().out == (
        f"{tmp_path / 'a.toml'} can run: 4,854,016 parameters, 2 ranks, 16 sequences of 2,048 "
        f"tokens per step, to {tmp_path}\n"
    )


def test_of_keys_without_effect_only_the_user_s_own_are_told(tmp_path, capsys) -> None:
    """Not those of the preset, which the user did not write."""
    (tmp_path / "a.toml").write_text('extends = "debug_model"\nvalidation.enable = false\n')
    words = [tmp_path / "a.toml", "--job.dump_folder", tmp_path]
    check_job(words)
    assert "has no effect" not in capsys.readouterr().out
    check_job([*words, "--validation.num_samples", 9])
    said = "validation.num_samples = 9 has no effect: validation.enable = False"
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
    assert preflight(config, 1).idle_options == [
        "optimizer.groups.0 has no effect: model.frozen has all its parameters"
    ]


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
    types = {"mixed_precision_param": param, "mixed_precision_reduce": reduce}
    training, off = Training(dtype=dtype, **types), Float8()
    assert needs_fsdp_alone(training, off) == needs
    assert needs_fsdp_alone(training.model_copy(update={"enable_cpu_offload": True}), off)
    assert needs_fsdp_alone(training, Float8(enable=True))
