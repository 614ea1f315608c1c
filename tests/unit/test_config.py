"""What a TOML and a command line come to, and what is said of those that come to nothing."""

import contextlib
import re
import tomllib
from pathlib import Path
from random import Random

import pytest

from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config, parse_config, read, to_toml, with_lines
from meshwright.models.args import divisors_of
from meshwright.models.families import MODELS
from meshwright.system.errors import ConfigError, as_toml
from meshwright.system.log import print_error
from meshwright.train.resolve_model import resolve_model
from tests.helpers.resolved import broken, resolved

ROOT = Path(__file__).parents[2]
DEBUG = ROOT / "train_configs" / "debug_model.toml"


@pytest.fixture
def toml(tmp_path):
    """Write a TOML; give the arguments that load it."""

    def write(text: str, name: str = "a.toml") -> list[str]:
        (tmp_path / name).write_text(text)
        return ["--job.config_file", str(tmp_path / name)]

    return write


def error_of(arguments: list[str], ranks: int = 1) -> str:
    try:
        config = load_config(arguments)
        try:
            resolved(config, ranks)
        except ConfigError as error:
            raise with_lines(error, parse_config(arguments)) from None
    except ConfigError as error:
        # without the source lines and carets, which tests/unit/test_help.py looks at
        return "\n".join(x for x in str(error).splitlines() if not x.startswith("    "))
    pytest.fail("no error")


def test_command_line_over_toml_over_default(toml) -> None:
    arguments = toml("[training]\nsteps = 7\nseq_len = 64\n[compile]\nenable = true\n")
    config = load_config([*arguments, "--training.steps", "9", "--optimizer.lr=1e-3"])
    assert (config.training.steps, config.training.seq_len, config.optimizer.lr) == (9, 64, 1e-3)
    assert config.compile.enable
    assert config.training.local_batch_size == JobConfig().training.local_batch_size


def test_values_that_look_like_others() -> None:
    words = ["--parallelism.data_parallel_shard_degree", "-1", "--job.description", "true"]
    config = load_config([*words, "--training.max_norm", "inf", "--model.args.n_layers", "3"])
    assert config.parallelism.data_parallel_shard_degree == -1
    assert config.job.description == "true"
    assert config.training.max_norm == float("inf")
    assert config.model.args == {"n_layers": 3}


def test_extends_lays_one_toml_over_another(toml, tmp_path) -> None:
    toml("[training]\nsteps = 7\nseq_len = 64\n", "base.toml")
    arguments = toml('extends = "base.toml"\n[training]\nsteps = 8\n')
    written = read(parse_config(arguments))
    config = written.config()
    assert (config.training.steps, config.training.seq_len) == (8, 64)
    assert written.provenance.of("training.seq_len").endswith("base.toml:3")


def test_input_paths_start_where_they_are_written(toml, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir("/")
    arguments = toml('[model]\ntokenizer_path = "t/x.model"\n')
    assert load_config(arguments).model.tokenizer_path == str(tmp_path / "t/x.model")
    config = load_config([*arguments, "--model.tokenizer_path", "t/x.model"])
    assert config.model.tokenizer_path == "/t/x.model"


@pytest.mark.parametrize(
    ("words", "ranks", "fix"),
    [
        ([], 3, "the nearest is 18; or launch 2 or 4 ranks (NGPU)"),
        ([], 7, "the nearest is 14; or launch 4 or 8 ranks (NGPU)"),
        ([], 16, "the nearest is 32; or launch 8 ranks (NGPU)"),
        (["--training.local_batch_size=16"], 3, "the nearest is 48; or launch 1 rank (NGPU)"),
        (["--parallelism.tensor_parallel_degree=2"], 12, "12; or launch 8 or 16 ranks (NGPU)"),
        (["--training.local_batch_size=3"], 2, "the nearest is 18"),
        (["--parallelism.data_parallel_shard_degree=3"], 3, "the nearest is 18"),
    ],
)
def test_a_batch_that_ranks_cannot_share_offers_ranks_that_can(words, ranks, fix, tmp_path) -> None:
    given = [str(DEBUG), f"--job.dump_folder={tmp_path}", *words]
    said = error_of(given, ranks)
    assert said.endswith(fix), said
    for count in re.findall(r"\d+(?=[ \w]* ranks? \(NGPU\))", said.partition("launch")[2]):
        resolved(load_config(given), int(count))


def test_debug_model_runs_on_the_ranks_that_it_names() -> None:
    text = DEBUG.read_text()
    said = re.search(r"global_batch_size = 16 .*on (.*) ranks", text)
    assert said
    named = [int(count) for count in re.findall(r"\d+", said[1])]
    runs = []
    for ranks in range(1, 10):
        with contextlib.suppress(ConfigError):
            resolved(load_config([str(DEBUG)]), ranks)
            runs.append(ranks)
    assert runs == named


def test_resolved_config_loads_to_itself(toml, tmp_path) -> None:
    words = ["--model.args.n_layers", "2", "--job.dump_folder", str(tmp_path)]
    config = load_config(["--job.config_file", str(DEBUG), *words])
    filled_in = resolved(config, 2).config
    again = load_config(toml(to_toml(filled_in)))
    assert again.model_dump(exclude={"job"}) == filled_in.model_dump(exclude={"job"})
    assert again.parallelism.data_parallel_shard_degree == 2
    assert again.training.global_batch_size == 16
    assert 'dataset = "c4"' in to_toml(load_config(["--training.dataset=c4"]))


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("[training]\n\nsteps = true\n", 3, "training.steps = true"),
        ("[optimizer]\nlr = nan\n", 2, "optimizer.lr = nan"),
        ('extends = ["base.toml"]\n', 1, "must be the path of one TOML"),
        ("job = 3\n", 1, "job = 3: must be a table, [job]"),
        ('[job]\nconfig_file = "b.toml"\n', 2, "belongs on the command line"),
        ("[training\nsteps = 3\n", 1, "not TOML"),
        ("[[training]]\nsteps = 1\n", 1, "training"),
        ("[training]\nsteps = 3\n# more\nsteps = 4\n", 4, "not TOML: Cannot overwrite"),
        ("[training]\n[model]\n[training]\n", 3, "not TOML: Cannot declare"),
        ("[a]\nx = 1\n[b]\nx = 1\ny = 2\ny = 3\n", 6, "not TOML: Cannot overwrite"),
        ("x = 1\n[a]\ny = 1\ny.x = 2\n", 4, "not TOML: Cannot"),
        ("# of a web page:\u2028\n[training]\nsteps = 1.5\n", 3, "a whole number"),
    ],
)
def test_mistakes_in_a_toml_are_placed(toml, text, line, says) -> None:
    error = error_of(toml(text))
    assert re.match(rf"\S*a\.toml:{line}: ", error), error
    assert says in error
    assert len(error.splitlines()) <= 2


PATH_KEYS = sorted(
    f"{section}.{name}"
    for section, table in JobConfig.model_fields.items()
    for name in table.annotation.model_fields
    if re.search("_(path|folder|format)$|^folder$", name) and name != "dataset_path"
)


def test_an_address_is_no_path_but_of_data(toml) -> None:
    """It would be a folder called "s3:"."""
    for key in PATH_KEYS:
        section, name = key.split(".")
        for words in (
            [f"--{key}", "s3://bucket/a"],
            toml(f'[{section}]\n{name} = "s3://bucket/a"\n'),
        ):
            assert f"{key} = 's3://bucket/a': s3:// starts an address" in error_of(words)
    inside = '[[training.datasets]]\ndataset = "json"\ndataset_format = "hf://a/b"\n'
    assert "training.datasets.0.dataset_format = 'hf://a/b'" in error_of(toml(inside))
    for address in ("s3://bucket/a", "https://host/a.npy"):
        config = load_config(toml(f'[training]\ndataset_path = "{address}"'))
        assert config.training.dataset_path == address
    wrong = toml('[training]\ndataset_path = "file:///a"\n')
    assert "fix: leave out file://" in error_of(wrong)


def test_an_address_holds_no_login(toml, capsys) -> None:
    """Every log, checkpoint and report of the job would show it, and no client uses it."""
    for address in ("https://me:secret@host/a", "HTTPS://secret@host/a", "s3://me:secret@bucket/a"):
        for words in (
            ["--training.dataset_path", address],
            toml(f'[training]\ndataset_path = "{address}"\n'),
        ):
            print_error(error_of(words))
            said = capsys.readouterr().err
            assert "holds a login" in " ".join(said.split())
            assert "secret" not in said
    for address in ("abfss://container@account.net/a", "hf://datasets/a/b@v:1@/c", "https://h:1/@"):
        load_config(["--training.dataset_path", address])


ASYNC_TP = "--parallelism.enable_async_tensor_parallel --parallelism.tensor_parallel_degree 2"
EARLY = "--optimizer.early_step_in_backward --training.max_norm inf"
CLIP = "--optimizer.qk_clip_threshold 100"
OFFLOAD = "--training.enable_cpu_offload"
PIPELINE = "--parallelism.pipeline_parallel_degree 2"

MISTAKES = f"""
--training.stepz 3 => --training.stepz: unknown key training.stepz
--training.steps => --training.steps: needs a value fix: write --training.steps=VALUE
--training.steps 3 --training.steps=3 => --training.steps: given twice
training.steps=3 => expected --section.key value fix: write --training.steps=3
--training.steps.x 3 => training.steps = {{x = 3}}: must be a whole number
--training.seed 007 => --training.seed = '007': must be a whole number fix: write 7
--optimizer.lr=-1e-3 => --optimizer.lr = -0.001: should be greater than 0
--compile.enable my.toml => but a CONFIG fix: write --compile.enable=true my.toml
--training.datasets.0.weight 2 => fix: write all of training.datasets in the TOML
--model.frozen [norm.*,out] => quote it for the shell: '["norm.*", "out"]'
--lr_scheduler.decay_type constant => set lr_scheduler.decay_ratio = 0
--training.compile true => did you mean compile.enable?
--compile => did you mean --compile.enable?
--parallelism.fsdp false => data_parallel_shard_degree (1: nothing is sharded)
--model.trainable [] => list the others, which are not trained, in model.frozen
--model.flavor 8B => did you mean llama3.1_8b or llama3_8b?
--parallelism.tensor_parallel_degree 3 => the other given degrees multiply to 3
--model.name lama => did you mean llama?
--model.args.n_layer 2 => did you mean n_layers?
--model.args.n_kv_heads 3 => n_kv_heads = 3: must divide n_heads = 8
--model.args.dim 36 => must be a multiple of 2 * n_heads = 16
--model.args.vocab_size 1000 => set model.args.vocab_size = 2048
--model.tokenizer_path PRESET => not a SentencePieceTokenizer
--model.frozen ["layer.*"] => model.frozen = 'layer.*': matches no parameter
--model.frozen ["tok*","*.weight"] => leaves no parameter to train
--optimizer.groups [{{lr_scale=2.0}}] => optimizer.groups.0.parameters: must be given
--optimizer.groups [{{parameters=['*.bias']}}]
    => --optimizer.groups: optimizer.groups.0.parameters = '*.bias': matches no parameter
--model.frozen norm.weight
    => model.frozen = 'norm.weight': should be a valid list fix: write ["norm.weight"]
--training.datasets 3 => fix: write a table under [[training.datasets]]
--training.dataset c5 => choose from arrow, c4, fineweb,
--training.dataset s3://bucket/a => is written "owner/name"
--training.dataset json => dataset 'json' needs it
--training.dataset json --training.dataset_path /no/such.json => no such file or folder
--training.dataset_path /tmp => dataset 'sympy_source' reads no path
--training.global_batch_size 0 => must be a positive multiple of 4 = 2 data
--training.global_batch_size 6 => must be a positive multiple of 4 = 2 data
--parallelism.data_parallel_shard_degree 3 => multiply to 3, but there are 2 ranks
--parallelism.data_parallel_shard_degree 0 => set it to -1
--parallelism.tensor_parallel_degree 2 --model.args.n_kv_heads 1
    => does not divide n_kv_heads = 1 fix: use 1
--parallelism.tensor_parallel_degree 2 --training.seq_len 255
    => does not divide training.seq_len = 255
--parallelism.context_parallel_degree 2 --training.seq_len 254
    => the nearest training.seq_len is 256
--model.args.rope_theta -1 => rope_theta = -1.0: must be positive
--model.args.rope_scaling.factor 0 => factor = 0.0: must be positive
--model.name olmo3 --model.args.window 0 => window = 0: must be positive and below 2^31: use 1
--model.name mistral --model.args.window -3 => window = -3: must be positive and below 2^31: use 1
--training.seed 99999999999999999999 => training.seed = 99999999999999999999
--checkpoint.enable=false --checkpoint.exclude_from_loading ["optimizer"]
    => nothing is loaded while checkpoint.enable is false
{ASYNC_TP} --compile.enable=false => nothing is compiled by inductor
{ASYNC_TP} --compile.backend=aot_eager => nothing is compiled by inductor
--training.fp32_modules ["layers.0.atention"]
    => matches no module fix: did you mean layers.*.attention?
--training.fp32_modules ["out*"] --model.args.tie_embeddings true => which are one matrix
--training.fp32_modules ["layers.0.*"] --compile.enable
    => name whole blocks, as "layers.0", or set compile.enable = false
--training.fp32_modules ["*norm"] --activation_checkpoint.mode selective
    => or set activation_checkpoint.mode = "full"
--model.name qwen3_moe --training.fp32_modules ["*norm"] --activation_checkpoint.mode full
    => or set activation_checkpoint.mode = "none"
--training.dtype bfloat16 --training.mixed_precision_param float32
    => set training.mixed_precision_param = "bfloat16"
{PIPELINE} --parallelism.fsdp_prefetch_layers 2 => so nothing is gathered ahead
{PIPELINE} --parallelism.fsdp_reduce_gradients every_microbatch
    => a pipeline's schedule reduces gradients once
--checkpoint.average.decay 0.9 --checkpoint.average.window_tokens 9 => gives the mean as well
--checkpoint.enable=false --checkpoint.load_step 5 => nothing is loaded while
--checkpoint.enable=false --job.max_run_seconds 60 => would be lost
--lr_scheduler.total_steps=119 => the schedule ends before training.steps = 120
--lr_scheduler.total_steps=200 --lr_scheduler.decay_ratio=0.95
    => do not fit in lr_scheduler.total_steps = 200 after 20
--lr_scheduler.decay_start=60 --lr_scheduler.decay_ratio=0.5
    => decay_ratio = 0.5 gives the start as well fix: leave one of the two out
--lr_scheduler.decay_start=19 => lies within the warm-up of 20 steps
--lr_scheduler.decay_ratio 0.95 => do not fit in 120 after 20
--parallelism.context_parallel_degree 2 --training.attention_kernel fa3
    => context parallelism the logarithms of its sums fix: use "auto"
--parallelism.context_parallel_degree 2 --training.attention_kernel cudnn --sentry.interval 9
    => and the sentry compares bits of it fix: use "auto"
--profiling.profile_freq 2
    => profiler_warmup 3 + profiler_active 1 fix: raise it to their sum or more
--training.datasets [{{dataset="sympy_source",weight=1,loss_weight=2}}]
    => training.datasets.0.loss_weight = 2.0: every dataset has this weight
--optimizer.early_step_in_backward => max_norm = 1.0 cannot be kept
{EARLY} --parallelism.fsdp_reduce_gradients every_microbatch
    => would update with the gradients of one microbatch
{CLIP} --model.name qwen3 => the model normalizes queries and keys
{CLIP} --model.name gemma2 => qk_clip_threshold = 100.0: the model caps its logits fix: leave it
{CLIP} --model.frozen ["layers.0.*"] => ['layers.0.attention.wq.weight'], which it would change
{CLIP} --model.name deepseek_v3 --model.args.mtp_depth 1
    => qk_clip_threshold = 100.0: is not known to work with layers for MTP
{CLIP} {EARLY} => updates before a step is known to be good
--optimizer.qk_clip_interval 0 => qk_clip_interval = 0: should be greater than 0
{EARLY} --metrics.layer_stats_freq 10 => frees each gradient before its RMS is taken
{EARLY} --bad_steps.policy skip => bad_steps.policy = 'skip': optimizer.early_step
{EARLY} --bad_steps.spike_std 6 => bad_steps.spike_std = 6.0: optimizer.early_step
--job.dump_folder PRESET/x => is not a folder that can be written to
--job.dump_folder /proc/x => /proc is not a folder that can be written to
--checkpoint.load_step 5 => not among the checkpoints
--activation_checkpoint.mode memory_budget --compile.enable=false => set compile.enable = true
--activation_checkpoint.mode memory_budget --compile.backend=eager => backend eager does not
--metrics.enable_wandb => pip install 'meshwright[wandb]'
"""


@pytest.mark.parametrize("mistake", MISTAKES.replace("\n    =>", " =>").strip().splitlines())
def test_mistakes_on_the_command_line(mistake, tmp_path, monkeypatch) -> None:
    words, says = mistake.split(" => ")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # no wandb
    base = ["--job.config_file", str(DEBUG)]
    if "--job.dump_folder" not in words:
        base += ["--job.dump_folder", str(tmp_path / "out")]
    base += (word.replace("PRESET", str(DEBUG)) for word in words.split(" "))  # with blanks
    error = error_of(base, ranks=2)
    assert says in " ".join(error.split())
    assert not (tmp_path / "out").exists()


EVERY = ["tok_embeddings", *(f"layers.{index}" for index in range(6)), "norm", "output"]
MOE = "debug_qwen3_moe --activation_checkpoint.mode="
FFN_NORM = ["layers.0.ffn_norm"]


@pytest.mark.parametrize(
    ("job", "patterns", "found"),
    [
        ("debug_model", ["output"], ["output"]),
        ("debug_model", ["layers.*.ffn_norm"], [f"layers.{n}.ffn_norm" for n in range(6)]),
        ("debug_model", ["layers.1*", "layers.1.ffn_norm"], ["layers.1"]),
        ("debug_model", ["*"], EVERY),
        # of a block with experts, if nothing is recomputed, or of one without
        (f"{MOE}none", FFN_NORM, FFN_NORM),
        (f"{MOE}full --model.args.n_dense_layers=1", FFN_NORM, FFN_NORM),
    ],
)
def test_fp32_modules_are_found_by_pattern_once(job, patterns, found, tmp_path) -> None:
    words = [*job.split(), f"--training.fp32_modules={patterns}", f"--job.dump_folder={tmp_path}"]
    assert resolved(load_config(words), 1).fp32_modules == found


TP = "--compile.enable --parallelism.tensor_parallel_degree=2"
FULL = "--activation_checkpoint.mode=full"
CAPPED = "--model.name=gemma2 --activation_checkpoint.mode=selective"
CP = "--parallelism.context_parallel_degree=2"
DOCUMENTS = f"--training.mask_documents --{PIPELINE[2:]} --parallelism.pipeline_parallel_schedule="


@pytest.mark.parametrize(
    ("words", "of_cpu", "of_gpu"),
    [
        (f"{ASYNC_TP} --compile.enable", "needs GPUs, and this machine trains on its cpu", ""),
        ("--training.attention_kernel=flash", "needs GPUs, and this", ""),
        (f"{CP} --training.attention_kernel=cudnn", "needs GPUs, and this", ""),
        (f"{DOCUMENTS}ZBVZeroBubble", "", "not known to work with a"),
        (f"{DOCUMENTS}1F1B", "", ""),
        (f"{TP} {FULL}", "", ""),
        ("--training.mask_documents --model.args.head_dim=8", "", "takes no heads of 8, below 16"),
        ("--training.mask_documents --model.args.head_dim=16", "", ""),
        (
            f"{CAPPED} --compile.enable=false",
            "",
            "isn't known to work with eager flex attention that has a soft cap",
        ),
        (
            f"{CAPPED.replace('gemma2', 'gpt_oss')} --compile.enable=false",
            "",
            "isn't known to work with eager flex attention that has a soft cap or sinks",
        ),
        (f"{CAPPED} --compile.enable", "", ""),
        (f"{EARLY} {OFFLOAD}", "", "still being copied"),
        (EARLY, "", ""),
        (OFFLOAD, "", ""),
    ],
)
def test_what_devices_cannot(words, of_cpu, of_gpu, monkeypatch) -> None:
    monkeypatch.setattr("meshwright.system.modules.torch_version", lambda: "2.12.0")
    config = load_config(words.split())
    facts = {"model": resolve_model(config)[1]}
    for device_type, says in (("cpu", of_cpu), ("cuda", of_gpu), (None, "")):
        said = broken(config, device_type=device_type, **facts)
        assert says in said if says else not said, device_type


def test_updates_in_backward_wait_for_offloaded_gradients_from_torch_2_13(monkeypatch) -> None:
    monkeypatch.setattr("meshwright.system.modules.torch_version", lambda: "2.13.0+cu130")
    assert not broken(load_config([*EARLY.split(), OFFLOAD]), device_type="cuda")


def test_every_flavor_has_a_preset_that_says_what_it_is_for() -> None:
    models = set()
    for path in (ROOT / "train_configs").glob("*.toml"):
        config = load_config(["--job.config_file", str(path)])
        models.add((config.model.name, config.model.flavor))
        assert config.training.global_batch_size > 0, path  # the same batches on any ranks
        head = path.read_text().split("[", 1)[0]
        assert f"CONFIG_FILE=train_configs/{path.name}" in head
        assert head.startswith("#:schema schema.json\n")
    assert models == {(name, flavor) for name, one in MODELS.items() for flavor in one.flavors}


PART = '[[training.datasets]]\ndataset = "sympy_source"\n'
HEAD = '[model]\ntokenizer_path = "bytes"\nargs = { vocab_size = 258 }\n[training]\nseq_len = 64\n'
ANOTHER = f'{PART}name = "b"\n'
VALIDATION = "[validation]\nenable = true\n"
PROMPTS = f'sample_prompts = ["a", "{"é" * 16}"]\n'
LISTS = {  # keys after `HEAD`, and a part of the error
    PART: "training.datasets.0: has neither weight nor tokens",
    f"{PART}weight = 1\ntokens = 1\n": "has both weight and tokens",
    f"{PART}weight = 0\n": "a.toml:8: training.datasets.0.weight = 0: ",
    f"{PART}wieght = 1\n": "fix: did you mean training.datasets.0.weight?",
    f"{PART}weight = 1\n{PART}weight = 2\n": "training.datasets.1.name = 'sympy_source': another",
    f"{PART}weight = 1\n{ANOTHER}tokens = 2\n": "datasets.1: weights and tokens are mixed",
    f"local_batch_size = 4\nsteps = 10\n{PART}tokens = 2000\n{ANOTHER}tokens = 500\n": (
        "steps = 10: takes 2,560 tokens, but training.datasets give 2,500\n  fix: set it to 9"
    ),
    f'dataset = "c4"\n{PART}weight = 1\n': "a.toml:6: training.dataset = 'c4': is given together",
    f"{VALIDATION}num_samples = 0\n": "validation.num_samples = 0: must be positive or -1",
    f'{VALIDATION}dataset = "c4"\n': "validation.num_samples = -1: c4 is streamed",
    f'{VALIDATION}[[validation.datasets]]\ndataset = "json"\n': "datasets.0.dataset_path = ''",
    f"{VALIDATION}{PROMPTS}": f"a.toml:8: validation.sample_prompts.1 = '{'é' * 16}': its 33",
}


@pytest.mark.parametrize("text", LISTS)
def test_mistakes_in_lists_of_datasets(text, toml, tmp_path) -> None:
    assert LISTS[text] in error_of([*toml(HEAD + text), f"--job.dump_folder={tmp_path}/out"])


def test_paths_of_a_mixture_start_at_its_toml(toml, tmp_path) -> None:
    """Relative to their TOML, in lists too; a list replaces that of the TOML below."""
    base = HEAD + 'dataset = "c4"\n' + PART + "weight = 1\n"
    toml(base, "base.toml")
    parts = (
        '[[training.datasets]]\ndataset = "text"\ndataset_path = "texts/*.txt"\nweight = 2\n'
        '[[training.datasets]]\nname = "b"\ndataset = "json"\ndataset_path = "rows"\n'
        'dataset_format = "formats.py:f"\nweight = 0.5\n'
        '[[training.datasets]]\nname = "c"\ndataset = "json"\n'
        'dataset_format = "a.b:f"\nweight = 1\n'
    )
    config = load_config(toml(f'extends = "base.toml"\n[training]\ndataset = ""\n{parts}'))
    first, second, third = config.training.datasets
    assert first.dataset_path == f"{tmp_path}/texts/*.txt"
    assert second.dataset_path == f"{tmp_path}/rows"
    assert second.dataset_format == f"{tmp_path}/formats.py:f"
    assert third.dataset_format == "a.b:f"
    again = load_config(toml(to_toml(config), "again.toml"))
    assert again.training == config.training
    assert again.validation == config.validation


ONE_FILE = 'dataset = "json"\ndataset_path = "a.jsonl"\n'
MIXED = f"[[training.datasets]]\nweight = 1\n{ONE_FILE}[validation]\nenable = true\n"
MIXED += f'[[validation.datasets]]\nname = "a"\n{ONE_FILE}'


@pytest.mark.parametrize("text", [MIXED, f"[training]\n{ONE_FILE}validation_fraction = 0.5\n"])
def test_the_written_config_of_other_data_can_run(text, toml, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    config = load_config(toml(f'extends = "debug_model"\n{text}'))
    again = load_config(toml(to_toml(config), "again.toml"))
    ready = resolved(again, 1).config.training
    for name in ("datasets", "validation_fraction"):
        assert getattr(ready, name) == getattr(config.training, name)
    # equal in each key: the best validation of the job would no longer count
    assert (again.training, again.validation) == (config.training, config.validation)


def test_an_error_of_a_record_begins_with_its_place_in_the_data(toml, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n')
    keys = '[training]\ndataset = "json"\ndataset_path = "a.jsonl"\n'
    said = error_of(toml(f'extends = "debug_model"\n{keys}'))
    assert said.startswith(f"{tmp_path}/a.jsonl:1"), said


OTHER_DATA = """
[training]
dataset = "c4"
dataset_subset = "de"
max_epochs = 2
[validation]
enable = true
dataset = "c4"
dataset_split = "validation"
freq = 7
"""


@pytest.mark.parametrize(
    ("over", "training", "validation"),
    [
        ('[training]\ndataset = "text"\n', ("text", ""), ("c4", "validation")),
        ('[training]\ndataset = "c4"\n', ("c4", "de"), ("c4", "validation")),
        ('[training]\nsteps = 3\n', ("c4", "de"), ("c4", "validation")),
        ('[training]\ndataset = "text"\ndataset_subset = "it"\n', ("text", "it"),
         ("c4", "validation")),
        ('[validation]\ndataset = "text"\n', ("c4", "de"), ("text", "train")),
        ("[training]\nvalidation_fraction = 0.1\n", ("c4", "de"), ("sympy_source", "train")),
        ('[training]\nvalidation_fraction = 0.1\n[validation]\ndataset = "json"\n',
         ("c4", "de"), ("json", "train")),
        (HEAD + PART + "weight = 1\n", ("sympy_source", ""), ("c4", "validation")),
    ],
)  # fmt: skip
def test_other_data_drops_the_inherited_keys_of_the_data_before(
    over, training, validation, toml
) -> None:
    """On the command line as in a TOML."""
    toml(OTHER_DATA, "base.toml")
    words = toml(f'extends = "base.toml"\n{over}')
    if "[[" not in over:
        tables = tomllib.loads(over).items()
        given = [f"--{s}.{key}={value}" for s, table in tables for key, value in table.items()]
        assert load_config([*toml(OTHER_DATA, "b.toml"), *given]).model_dump(
            exclude={"job": {"config_file"}}
        ) == load_config(words).model_dump(exclude={"job": {"config_file"}})
    config = load_config(toml(f'extends = "base.toml"\n{over}'))
    assert (config.training.dataset, config.training.dataset_subset) == training
    assert (config.validation.dataset, config.validation.dataset_split) == validation
    assert (config.training.max_epochs, config.validation.freq) == (2, 7)


def test_a_preset_for_rows_of_files_that_it_does_not_name_keeps_its_keys(toml) -> None:
    words = '[training]\ndataset = "parquet"\ndataset_path = "rows"\n'
    config = load_config(toml(f'extends = "fine_tune"\n{words}'))
    assert (config.training.dataset, config.training.dataset_format) == ("parquet", "messages")


def test_a_list_that_is_replaced_leaves_no_lines_behind(toml) -> None:
    toml(HEAD + PART + 'weight = 1\nname = "x"\n', "base.toml")
    child = 'extends = "base.toml"\n[[training.datasets]]\ndataset = "json"\nweight = 1\n'
    assert "a.toml:2: training.datasets.0.dataset_path" in error_of(toml(child))
    given = "--training.datasets=[{dataset='json', weight=1.0}]"
    assert error_of([*toml(HEAD + PART), given]).startswith("--training.datasets: ")


def test_divisors_of_a_slip_of_the_finger_are_found_at_once() -> None:
    for number in range(1, 200):
        found = divisors_of(number).replace(" or ", ", ").split(", ")
        assert found == [str(n) for n in range(1, number + 1) if number % n == 0]
    assert divisors_of(2**31 - 1) == "1 or 2147483647"


def test_text_in_an_error_is_toml() -> None:
    random, alphabet = Random(7), "ab 'é\"\\\n\t\x00\x7f\u200b🙂[]{}=#"
    for number in range(500):
        text = "".join(random.choices(alphabet, k=random.randrange(9)))
        given = {"text": text, "list": [text, number], "table": {text: number / 7}}
        for value in given.values():
            written = tomllib.loads(f"key = {as_toml(value)}")
            assert written == {"key": value}, (number, value)
