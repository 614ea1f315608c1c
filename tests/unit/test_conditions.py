"""A key that has no effect beside the others of a config is told, and no other is."""

from typing import Any

import pytest
import tomli

from meshwright.config import combinations
from meshwright.config.fields import all_keys
from meshwright.config.job_config import JobConfig, needs_fsdp_alone
from meshwright.config.loader import load_config
from meshwright.config.rules import Facts, Idle, Rule, idle_keys
from meshwright.config.training import Training
from meshwright.datasets.named_sources import idle_source_options
from meshwright.train.rules import RULES
from tests.helpers.cli import check_job
from tests.helpers.resolved import broken, resolved
from tests.helpers.tokenizer_files import byte_level_json

KEYS = {".".join(key) for key, _ in all_keys()}
JSON_SOURCE = '[{dataset="json",dataset_path="x",weight=1.0}]'
JSON = 'training.dataset="json" training.dataset_path="x"'
STREAMED = 'training.dataset_mode="streamed"'
TWO_RANKS = 'parallelism.tensor_parallel_degree=2 training.mixed_precision_param="float32"'
ON_ONE_RANK = {"parallelism__data_parallel_shard_degree": 1, "training__global_batch_size": 8}


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


def settings(text: str) -> dict[str, Any]:
    words = (word.split("=", 1) for word in text.split())
    return {k.replace(".", "__"): tomli.loads(f"v = {v}")["v"] for k, v in words}


def is_said_to_be_idle(option: str, beside: str) -> bool:
    config = config_with(**ON_ONE_RANK | settings(beside) | settings(option))
    said = [*idle_keys(config, Facts(), combinations.RULES), *idle_source_options(config)]
    return any(text.startswith(f"{option.split('=')[0]} = ") for text in said)


OPTIONS = {  # a value that is not the default, beside which others it is idle, and is not
    # a section that is off
    "validation.freq=7": ("", "validation.enable=true"),
    "checkpoint.interval=7": ("", "checkpoint.enable=true"),
    "compile.backend=\"eager\"": ("compile.enable=false", "compile.enable=true"),
    # a key of the same section that has, or has not, a value
    "parallelism.enable_async_tensor_parallel=true": ("", TWO_RANKS),
    'activation_checkpoint.saved_ops=["aten.mm"]': ("", 'activation_checkpoint.mode="selective"'),
    "training.dataset_mode=\"streamed\"": (f"training.datasets={JSON_SOURCE}", ""),
    "optimizer.decay_norm_and_bias=true": ("optimizer.weight_decay=0.0", ""),
    # other conditions
    "parallelism.fsdp_prefetch_layers=3": ("", TWO_RANKS),
    'parallelism.fsdp_reduce_gradients="every_microbatch"': (
        TWO_RANKS, "training.global_batch_size=16 training.enable_cpu_offload=true"
    ),
    'training.mixed_precision_reduce="bfloat16"': (
        'training.mixed_precision_param="float32"', TWO_RANKS
    ),
    'training.attention_kernel="flash"': ("training.mask_documents=true", ""),
    'compile.cpu_attention="torch"': (
        "compile.enable=true training.mask_documents=true", "compile.enable=true"
    ),
    "profiling.profile_freq=101": ("", "profiling.enable_profiling=true"),
    'checkpoint.export_dtype="bfloat16"': (
        "checkpoint.enable=true", "checkpoint.enable=true checkpoint.last_save_model_only=true"
    ),
    "checkpoint.last_save_in_hf=true": (
        "checkpoint.enable=true checkpoint.load_only=true", "checkpoint.enable=true"
    ),
    "optimizer.muon.steps=7": (
        'optimizer.groups=[{parameters=["*norm.weight"],optimizer="Adam"}]', 'optimizer.name="muon"'
    ),
    "checkpoint.average.decay=0.5": ("", "checkpoint.enable=true"),
    "checkpoint.average.window_tokens=1000000": ("", "validation.enable=true"),
    'lr_scheduler.decay_type="cosine"': ("training.steps=100", "lr_scheduler.warmup_steps=2"),
    "lr_scheduler.total_steps=500": ('lr_scheduler.name="inverse_sqrt"', ""),
    "lr_scheduler.min_lr_factor=0.25": (
        "lr_scheduler.decay_ratio=0.0", "lr_scheduler.decay_ratio=0.1"
    ),
    # sources
    'training.dataset_column="x"': ("", JSON),
    'training.dataset_format="os.path:join"': ("", JSON),
    'model.chat_template_path="x"': ("", JSON),
    'training.token_cache_folder="x"': (STREAMED, f"{STREAMED} validation.enable=true"),
    "training.block_cache_gib=7.0": (
        JSON, 'training.dataset="tokens" training.dataset_path="s3://bucket/a.npy"'
    ),
    "training.shuffle_window=7": ("", STREAMED),
    "training.stream_shards=7": ("", STREAMED),
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_idle_only_where_it_has_no_effect(option: str) -> None:
    idle_beside, active_beside = OPTIONS[option]
    assert is_said_to_be_idle(option, idle_beside)
    assert not is_said_to_be_idle(option, active_beside)


def test_rows_of_the_tables_name_keys() -> None:
    idle = {key for row in RULES if isinstance(row, Idle) for key in row.keys.split()}
    assert idle | {row.key for row in RULES if isinstance(row, Rule)} <= KEYS


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


def test_the_same_toml_runs_where_its_options_have_nothing_to_act_on(
    tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("meshwright.commands.check.why_bf16_is_slow", lambda: "")
    (tmp_path / "a.toml").write_text(MESH_OPTIONS)
    words = ["--job.config_file", str(tmp_path / "a.toml"), "--job.dump_folder", str(tmp_path)]
    words.append("--compile.enable=false")  # GPUs that are not counted compile
    check_job(["--ngpu", "1", *words])
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
        assert not broken(resolved(load_config(words), 1).config, device_type=device_type)


def test_a_config_of_defaults_says_nothing(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("meshwright.commands.check.why_bf16_is_slow", lambda: "")
    (tmp_path / "a.toml").write_text('[model]\ntokenizer_path = "bytes"\nargs.vocab_size = 258\n')
    words = [tmp_path / "a.toml", "--compile.enable=false"]  # the default compiles so long a job
    words += ["--training.global_batch_size=16"]
    check_job(["--ngpu", "2", *words, "--job.dump_folder", str(tmp_path)])
    assert capsys.readouterr().out == (
        f"{tmp_path / 'a.toml'} can run: 4,854,016 parameters, 2 ranks, 10,000 steps of 32,768 "
        "tokens\n"
    )


def test_of_keys_without_effect_only_the_user_s_own_are_told(tmp_path, capsys) -> None:
    """Not those of the preset, which the user did not write."""
    text = 'extends = "debug_model"\nvalidation.enable = false\ntraining.steps = 9\n'
    (tmp_path / "a.toml").write_text(text)
    words = [tmp_path / "a.toml", "--job.dump_folder", tmp_path]
    check_job(words)
    said = capsys.readouterr().out
    assert "has no effect" not in said
    # a rate of the preset, and steps of the user's own
    assert "never reached: lr_scheduler.warmup_steps = 20, and the job has 9" in " ".join(
        said.split()
    )
    check_job([*words, "--validation.num_samples", 9])
    said = "validation.num_samples = 9 has no effect: validation.enable = false"
    assert capsys.readouterr().out.count(said) == 1


@pytest.mark.parametrize(
    ("said", "words", "other"),
    [
        (
            "model.args.window = 256 leaves out no token, since training.seq_len = 256; a window "
            "of less than 256 would",
            "--model.name=mistral --model.args.window=256",
            "--model.name=mistral --model.args.window=255",
        ),
        (  # in Mistral all layers have the window, in OLMo 3 some are full
            "training.attention_kernel = 'flash' has no effect: every layer has a window, a soft "
            "cap or sinks, for which GPUs have flex attention",
            "--model.name=mistral --training.attention_kernel=flash",
            "--model.name=olmo3 --training.attention_kernel=flash",
        ),
    ],
)
def test_a_window_or_a_kernel_that_does_nothing_is_told(said: str, words: str, other: str) -> None:
    small = ["--model.tokenizer_path=bytes", "--training.seq_len=256"]
    assert said in resolved(load_config([*small, *words.split()]), 1).notes
    beginning = said.partition(" = ")[0]
    notes = resolved(load_config([*small, *other.split()]), 1).notes
    assert not any(note.startswith(beginning) for note in notes)


def test_a_window_is_told_if_the_longest_sequences_of_all_stages_lie_in_it(tmp_path) -> None:
    (tmp_path / "a.toml").write_text("""
training.steps = 20
model = {name = "mistral", tokenizer_path = "bytes", args = {window = 256}}
checkpoint.enable = true
[[training.stages]]
seq_len = 128
until_tokens = 10240
[[training.stages]]
seq_len = 512
""")
    words = [str(tmp_path / "a.toml"), "--training.global_batch_size=8", "--training.seq_len=64"]
    for window, is_told in (("256", False), ("1000", True)):
        notes = resolved(load_config([*words, f"--model.args.window={window}"]), 1).notes
        said = f"model.args.window = {window} leaves out no token, since training.seq_len = 512;"
        assert any(said in note for note in notes) == is_told
        assert any("leaves out" in note for note in notes) == is_told


def test_validation_on_other_data_than_training_is_told(tmp_path, capsys) -> None:
    (tmp_path / "a.txt").write_text("some words")
    own = 'dataset = "text"\ndataset_path = "a.txt"\n'
    toml, said = tmp_path / "a.toml", "validation reads sympy_source, and training text"
    toml.write_text(f'extends = "debug_model"\n[training]\n{own}')
    check_job([toml])
    assert capsys.readouterr().out.count(said) == 1
    toml.write_text(f'{toml.read_text()}[validation]\n{own}dataset_split = "train"\n')
    check_job([toml])
    out = " ".join(capsys.readouterr().out.split())
    assert said not in out
    assert f"training reads 1 file of the validation as well: {tmp_path}/a.txt" in out
    (tmp_path / "b.txt").write_text("other words")  # beside train.bin, for example, val.bin
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/c.txt").symlink_to(tmp_path / "a.txt")
    for path, is_shared in (("b.txt", False), ("*.txt", True), ("folder", True)):
        check_job([toml, "--training.dataset_path", tmp_path / path])
        assert ("of the validation as well: " in capsys.readouterr().out) == is_shared
    (tmp_path / "a.jsonl").write_text('{"text": "some words", "a": 1}')
    keys = ("dataset=json", f"dataset_path={tmp_path}/a.jsonl")
    both = [f"--{table}.{key}" for table in ("training", "validation") for key in keys]
    check_job([toml, *both])
    assert "of the validation as well: " in capsys.readouterr().out
    # of the others, a part may be the validation's
    for part in ("--training.dataset_where=['a == 1']", "--training.max_documents=1"):
        check_job([toml, *both, part])
        assert "of the validation as well: " not in capsys.readouterr().out
    toml.write_text(f'extends = "debug_model"\n[training]\n{own}validation_fraction = 0.5\n')
    check_job([toml])
    assert "of the validation as well: " not in capsys.readouterr().out


def test_documents_that_nothing_ends_are_told(tmp_path, capsys) -> None:
    file = byte_level_json(tmp_path / "tokenizer.json", ["<end of mine>"])
    words = ["debug_model", "--job.dump_folder", tmp_path, "--model.tokenizer_path", file]
    for eos, is_said in (
        ((), True),
        (("--model.eos_token", "<end of mine>"), False),
        (("--model.eos_token=",), False),
    ):
        check_job([*words, *eos])
        assert ("no EOS" in capsys.readouterr().out) == is_said


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
    (line,) = resolved(config, 1).idle_options.values()
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
    assert needs_fsdp_alone(training) == needs
    assert needs_fsdp_alone(training.model_copy(update={"enable_cpu_offload": True}))
