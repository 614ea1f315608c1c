"""The help that a user gets for a config that is wrong."""

import itertools
import json
import pickle
import random
import re
import string
from pathlib import Path

import pytest

from meshwright.commands.config import schema
from meshwright.commands.main import run
from meshwright.config.explain import read_synonyms, suggest_key, suggest_section
from meshwright.config.fields import all_keys, find_section
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config, parse_config, preset_names, read
from meshwright.models.families import MODELS
from meshwright.system.errors import (
    CombinedConfigError,
    ConfigError,
    RecordError,
    config_error,
    did_you_mean,
)
from meshwright.train.optim.registry import OPTIMIZERS
from scripts import config_reference
from tests.helpers.cli import check_job

ROOT = Path(__file__).parents[2]


@pytest.fixture
def message(tmp_path):
    """Write a TOML over the debug preset; what `meshwright check` says of it."""

    def get(text: str) -> str:
        path = tmp_path / "a.toml"
        path.write_text(f'extends = "debug_model"\n{text}')
        with pytest.raises(ConfigError) as caught:
            check_job([path, "--ngpu", 2])
        return str(caught.value).replace(f"{path}", "a.toml").replace(f"{tmp_path}", "HERE")

    return get


THEIRS = """
learning_rate optimizer.lr|max_lr optimizer.lr|base_lr optimizer.lr|adam_beta1 optimizer.beta1
adam_beta2 optimizer.beta2|adam_epsilon optimizer.eps|optim optimizer.name
max_steps training.steps|max_iters training.steps|train_iters training.steps
num_training_steps training.steps|num_train_epochs training.max_epochs|epochs training.max_epochs
max_epochs training.max_epochs|batch_size training.local_batch_size
per_device_train_batch_size training.local_batch_size|micro_batch_size training.local_batch_size
gradient_accumulation_steps training.global_batch_size|grad_accum_steps training.global_batch_size
accumulate_grad_batches training.global_batch_size|global_batch_size training.global_batch_size
grad_clip training.max_norm|max_grad_norm training.max_norm|clip_grad training.max_norm
gradient_clip_val training.max_norm|gradient_clipping training.max_norm
precision training.mixed_precision_param|bf16 training.mixed_precision_param
mixed_precision training.mixed_precision_param|seq_length training.seq_len
block_size training.seq_len|max_seq_length training.seq_len|sequence_len training.seq_len
context_length training.seq_len|random_seed training.seed|dataset_name training.dataset
data_path training.dataset_path|data_dir training.dataset_path|train_file training.dataset_path
text_column training.dataset_column|tokenizer model.tokenizer_path
tokenizer_model model.tokenizer_path|hf_assets_path model.tokenizer_path
model_type model.name|num_hidden_layers model.args.n_layers|num_layers model.args.n_layers
hidden_size model.args.dim|n_head model.args.n_heads|num_attention_heads model.args.n_heads
output_dir job.dump_folder|out_dir job.dump_folder|save_steps checkpoint.interval
save_interval checkpoint.interval|save_total_limit checkpoint.keep_latest_k
resume_from_checkpoint checkpoint.enable|init_from checkpoint.initial_load_path
logging_steps metrics.log_freq|log_interval metrics.log_freq|log_every_n_steps metrics.log_freq
eval_interval validation.freq|eval_steps validation.freq|eval_iters validation.num_samples
val_check_interval validation.freq|warmup_iters lr_scheduler.warmup_steps
warmup_ratio lr_scheduler.warmup_steps|num_warmup_steps lr_scheduler.warmup_steps
lr_scheduler_type lr_scheduler.decay_type|lr_decay_style lr_scheduler.decay_type
min_lr lr_scheduler.min_lr_factor|lr_decay_iters lr_scheduler.decay_ratio
tensor_model_parallel_size parallelism.tensor_parallel_degree|tp parallelism.tensor_parallel_degree
pipeline_model_parallel_size parallelism.pipeline_parallel_degree
context_parallel_size parallelism.context_parallel_degree
gradient_checkpointing activation_checkpoint.mode|recompute_granularity activation_checkpoint.mode
torch_compile compile.enable|use_wandb metrics.enable_wandb|wandb_log metrics.enable_wandb
reshard_after_forward parallelism.fsdp_reshard_after_forward|cpu_offload training.enable_cpu_offload
max_time job.max_run_seconds|dp_replicate parallelism.data_parallel_replicate_degree
"""
"""Names of transformers, nanoGPT, Megatron-LM, Lightning, DeepSpeed, axolotl, torchtitan, litgpt,
and our keys: written by hand, not a copy of the package's table."""
NOT_OURS = "telemetry_url banner_text quux_factor mascot zebra_mode coffee_breaks lunar_phase xyzzy"
KEYS = [key for key, _ in all_keys() if len(key) == 2]


def typing_errors(word: str, draw: random.Random) -> list[str]:
    """A letter more, twice, less, another, and two that changed places; the first one stays."""
    at, letter = draw.randrange(1, len(word)), draw.choice(string.ascii_lowercase)
    before, here, after = word[:at], word[at], word[at + 1 :]
    wrong = [before + letter + here, before + here + here, before, before + letter]
    return [*(part + after for part in wrong), before[:-1] + here + before[-1] + after]


def test_keys_of_others_and_of_other_sections_lead_to_ours() -> None:
    for pair in re.split(r"[|\n]", THEIRS.strip()):
        theirs, ours = pair.split()
        own, last = ours.split(".")[0], ours.rpartition(".")[2]
        for section in {own, "metrics", "validation", "checkpoint"}:
            if (section, theirs) not in KEYS:
                said = suggest_key((section, theirs))
                assert re.search(rf"{ours}(?!\w)|{section}\.{last}(?!\w)", said), (section, pair)
    moves = [
        (f"{section}.{key}", suggest_key((place, key)))
        for (section, key), place in itertools.product(KEYS, JobConfig.model_fields)
        if (place, key) not in KEYS and key != "config_file"
    ]
    # few have a meaning of others there, as metrics.interval
    assert sum(key in said for key, said in moves) > 0.97 * len(moves)


def test_no_synonym_contradicts_a_key_that_exists() -> None:
    """Advice such as "leave it out: not supported" may be older than the key."""
    bare = {f"{section}.{key}".replace("_", ""): f"{section}.{key}" for section, key in KEYS}
    for table in ("keys", "advice"):
        for theirs, target in read_synonyms()[table].items():
            if "." in theirs:
                assert theirs not in bare, (theirs, target)
            for key in {key for name, key in bare.items() if name.partition(".")[2] == theirs}:
                assert key in target or table == "keys", (theirs, target)


def test_typing_errors_are_found_and_no_guess_misleads() -> None:
    """At least 95 % of them: a key of three letters may be nearer to another."""
    draw, right, count = random.Random(2), 0, 0
    for section, key in KEYS:
        for wrong in {*typing_errors(key, draw)} - {inner for _, inner in KEYS}:
            said = suggest_key((section, wrong))
            right += f"did you mean {section}.{key}" in said
            is_short = len(key) < 6 or f"did you mean {section}.{key[:-1]}?" == said  # datasets
            assert f"{section}.{key}" in said or is_short or "did you mean" not in said
            count += 1
    assert right >= 0.95 * count > 500
    for section, name in itertools.product(JobConfig.model_fields, NOT_OURS.split()):
        assert suggest_key((section, name)).startswith("leave it out; `meshwright config --help ")
    for section in [name for name in JobConfig.model_fields if len(name) > 4]:
        for wrong in {*typing_errors(section, draw)} - {*JobConfig.model_fields}:
            assert suggest_section(wrong, []) == f"did you mean {section}?", wrong


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("training.lr", "did you mean optimizer.lr?"),
        ("lr", "did you mean optimizer.lr?"),
        ("optimizer.learning_rate", "did you mean optimizer.lr?"),
        ("training.seqLen", "did you mean training.seq_len?"),
        ("optimizer.anme", "did you mean optimizer.name?"),
        ("model.n_layers", "did you mean model.args.n_layers?"),
        ("metrics.gc_freq", "did you mean training.gc_freq?"),
        ("validation.dataset_name", "did you mean validation.dataset?"),
        # names that are ours, too, for something else
        ("dtype", "did you mean training.mixed_precision_param (of the arithmetic) or training.dt"),
        ("total_steps", "did you mean training.steps?"),
        ("decay_lr", "did you mean lr_scheduler.decay_type?"),
        ("training.enable_loss_parallel", "leave it out: tensor parallelism"),
        ("rope_scaling", "did you mean model.args.rope_scaling?"),
        ("training.num_workers", "leave it out: every rank reads ahead by itself"),
        ("training.mascot", "leave it out; `meshwright config --help training` documents "),
        ("optimizer.beta3", "leave it out; "),
    ],
)
def test_advice_on_a_key(key, advice) -> None:
    assert suggest_key(key.split(".")).startswith(advice)


def test_advice_on_a_section() -> None:
    assert suggest_section("optim", []) == "did you mean optimizer?"
    assert suggest_section("trainin", []) == "did you mean training?"
    assert suggest_section("foo", ["warmup_steps"]) == "did you mean lr_scheduler?"
    assert suggest_section("trainer", ["max_steps"]) == "did you mean training.steps?"
    assert suggest_section("trainer", ["devices"]).startswith("leave it out: the number of ranks")
    assert suggest_section("foo", ["bar"]).startswith("leave it out; the sections are job, ")


def test_a_toml_of_torchtitan_gets_one_message_for_each_key_that_names_ours(message) -> None:
    """Of release 0.2.2, as in its Llama 3 405B, and more of the 149 keys of its `JobConfig`."""
    text = (
        '[job]\nprint_config = true\n[model]\nhf_assets_path = "a"\nconverters = ["float8"]\n'
        '[compile]\ncomponents = ["model", "loss"]\n[validation]\nsteps = 12\n'
        "[debug]\nseed = 1\ndeterministic = true\n"
        "[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\nfilter_fqns = []\n"
        "[parallelism]\npipeline_parallel_microbatch_size = 1\n[fault_tolerance]\nenable = false\n"
    )
    said = dict(
        re.findall(r"^a.toml:\d+: unknown key (.*)\n.*\n.*\n  fix: (.*)", message(text), re.M)
    )
    assert {key: fix.removeprefix("did you mean ").split(" ")[0] for key, fix in said.items()} == {
        "job.print_config": "leave",
        "model.hf_assets_path": "model.tokenizer_path",
        "model.converters": "float8.enable?",
        "compile.components": "leave",
        "validation.steps": "validation.num_samples",
        "debug.seed": "training.seed?",
        "debug.deterministic": "training.deterministic?",
        "quantize.linear.float8.enable_fsdp_float8_all_gather": "leave",
        "quantize.linear.float8.filter_fqns": "float8.filter_fqns?",
        "parallelism.pipeline_parallel_microbatch_size": "training.local_batch_size",
        "fault_tolerance.enable": "leave",
    }
    assert "did you mean llama?" in message('[model]\nname = "llama3"\nflavor = "8B"\n')
    assert "did you mean llama3.1_8b" in message('[model]\nflavor = "8B"\n')


def test_every_synonym_names_a_key() -> None:
    known = {".".join(key) for key, _ in all_keys()}
    for theirs, target in read_synonyms()["keys"].items():
        for word in target.replace(" (", " or (").split(" or "):
            keys = [] if word.startswith("(") else word.split(" and ")
            assert all(k in known or k.startswith("model.args.") for k in keys), (theirs, target)
    assert set(read_synonyms()["sections"].values()) <= JobConfig.model_fields.keys()


def test_all_faults_at_once_each_with_its_line_and_a_caret(message) -> None:
    """Keys and types first; then what only the tables of models and datasets know."""
    text = (
        '[model]\nflavor = "debugmodl"  # small\ntokenizer_path = "x#y.model"\n'
        '[training]\nstep = 3\nseq_len = "64"\n'
        '[validation]\ndataset = "nope"\n'
    )
    assert message(text) == (
        "a.toml:6: unknown key training.step"
        "\n    step = 3\n    ^^^^\n  fix: did you mean training.steps?\n"
        "a.toml:7: training.seq_len = '64': must be a whole number\n"
        '    seq_len = "64"\n              ^^^^\n  fix: write 64, without quotes'
    )
    lines = message(text.replace("step =", "steps =").replace('"64"', "64")).splitlines()
    assert [re.match(r"a.toml:\d: [\w.]+", line)[0] for line in lines[::4]] == [
        f"a.toml:{place}"
        for place in ("3: model.flavor", "4: model.tokenizer_path", "9: validation.dataset")
    ]
    assert lines[3] == "  fix: did you mean debugmodel?"
    assert lines[5:8] == [
        *('    tokenizer_path = "x#y.model"', "                     ^^^^^^^^^^^"),
        "  fix: check the path: HERE exists, but holds no x#y.model",
    ]
    assert lines[11].endswith('text, tokens (one of the hub is written "owner/name")')


@pytest.mark.parametrize(
    ("text", "mistakes"),
    [
        # what is missing because a key is wrong is not reported too
        ('[model]\nname = "qwen3"\nflavour = "x"\n[checkpoint]\nenabel = true\n', 2),
        ('[training]\ndataset = "json"\ndataset_pth = "a.jsonl"\n', 1),
        # nor is a mistake that two checks find reported twice
        ('[experimental]\ncustom_import = "no_such_module"\n', 1),
        ('[training]\ndataset = "text"\ndataset_path = ["a"]\n', 1),
        # rules between keys come together
        ('[profiling]\nprofile_freq = 1\n[model]\nname = "lama"\n', 2),
    ],
)
def test_every_mistake_is_reported_once(message, text, mistakes) -> None:
    assert len(re.findall(r"^a.toml:\d+: ", message(text), re.MULTILINE)) == mistakes


def test_the_tokenizer_of_a_preset_is_one_command_away() -> None:
    with pytest.raises(ConfigError, match="download Qwen/Qwen3-8B tokenizer.json tokenizer_con"):
        check_job(["qwen3_8b", "--ngpu", 8])


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("enable = True", "write true"),
        ("x = None", "leave the key out"),
        ("steps = 10k", "write 10000"),
        ("name = llama", 'quote it: "llama"'),
        ("steps = 1,000", "write 1_000"),
        ("lr = 0,001", "write 0.001"),
        (r'path = "C:\Users"', r"write it in single quotes, which leave \ unchanged: 'C:\Users'"),
        ("lr = .5e-3", "write 0.5e-3"),
        ("lr = 1.", "write 1.0"),
        # no guess is better than a wrong one
        ("import torch", ""),
        ("+steps = 3", ""),
        ("root:x:0:0", ""),
        ("steps = 2**10", ""),
        ("<<<<<<< HEAD", ""),
    ],
)
def test_a_slip_in_toml_gets_the_right_spelling(message, line, fix) -> None:
    said = message(f"[training]\n{line}\n")
    assert said.startswith("a.toml:3: not TOML: ")
    assert f"  fix: {fix}" in said if fix else "fix" not in said
    assert "^" in said


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ('optimizer.name = "adamw"', "did you mean AdamW?"),
        ('optimizer.name = "sgd"', f"choose from {', '.join(sorted(OPTIMIZERS, key=str.lower))}"),
        ('training.mixed_precision_param = "bf16"', 'write "bfloat16"'),
        ('training.mixed_precision_param = "float16"', 'write "bfloat16"'),
        ('training.dtype = "bfloat"', 'write "bfloat16"'),
        ('lr_scheduler.decay_type = "cosin"', 'write "cosine"'),
        ('compile.backend = "Inductor"', 'write "inductor"'),
        ('parallelism.pipeline_parallel_schedule = "1f1b"', 'write "1F1B"'),
        ('model.name = "lama"', "did you mean llama?"),
        ('model.name = "falcon"', "(docs/extending.md adds one)"),
        ('training.dataset = "sympy-source"', "did you mean sympy_source?"),
        ('training.dataset = "openwebtext"', "choose from"),
        ("training.deterministic = 1", "write true"),
        ('training.deterministic = "false"', "write false"),
        ('training.steps = "3"', "write 3"),
        ("training.steps = 3.0", "write 3"),
        ('optimizer.lr = "3e-4"', "write 3e-4"),
        ("training.dataset = 5", 'quote it: "5"'),
        ("training.steps = -7", "greater than"),
        ("parallelism.tensor_parallel_degree = 3", "multiple of 3"),
        ("parallelism.data_parallel_shard_degree = 5", "launch 5 ranks"),
        ("training.global_batch_size = 13", "the nearest is"),
        ('model.tokenizer_path = "no/a.model"', "check the path"),
        ('job.dump_folder = "s3://bucket/run"', "mount it"),
        ('model.frozen = ["layer.*"]', "matches no parameter"),
        ('checkpoint.initial_load_path = "/no/such/folder"', "check the path"),
    ],
)
def test_a_value_that_is_wrong_is_named_with_its_line_and_a_fix(message, line, fix) -> None:
    section, _, assignment = line.partition(".")
    said = message(f"[{section}]\n{assignment}\n")
    assert said.startswith(f"a.toml:3: {line.partition(' = ')[0]}")
    assert fix in said
    guesses = re.findall("fix: (did you mean|write) ", said)
    assert not guesses or fix.startswith(guesses[0])


TEXT = "[training]\ndataset = 'text'\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[model.args]\ndim = '256'\n", "a.toml:3: model.args.dim = '256': must be a whole number"),
        ("[model.args]\nn_layers = 99999\n", "a.toml:3: model.args.n_layers = 99999: must be at"),
        ("[optimizer.groups]\nparameters = []\n", "fix: write a table under [[optimizer.groups]]"),
        ("[job]\ndump_folder = ''\n", "job.dump_folder = '': must not be empty"),
        (f"[training]\nsteps = {2**63}\n", "must be a number of 64 bits"),
        (f"[training]\nseed = {-(2**63) - 1}\n", "must be a number of 64 bits"),
        ("[tool.ruff]\nline = 3\n", "a.toml:2: unknown section tool"),
        ("[training.optimizer]\nlr = 1e-3\n", "fix: write [optimizer]"),
        ("[optimizer]\nbetas = [0.9]\n", "did you mean optimizer.beta1 and optimizer.beta2?"),
        ("[training]\ndataset_path = '$HOME/a'\ndataset = 'text'\n", "variables are not replaced"),
        (f"{TEXT}dataset_path = 'nodir/*.txt'\n", "HERE exists, but holds no nodir"),
        (f"{TEXT}dataset_path = '*.txt'\n", "HERE holds none; names that start with . or _ are"),
        ("[training]\ndataset = 'c4'\ndataset_path = 'a.tml'\n", "did you mean a.toml?"),
        ("[training]\ndataset_format = 'b.py:f'\n", "HERE exists, but holds no b.py"),
        ("[model]\ntokenizer_path = ''\n", "path: not given\n  fix: name a tokenizer.model, a"),
    ],
)
def test_values_of_the_wrong_kind_and_missing_files_are_named_with_a_fix(
    message, text, says
) -> None:
    assert says in message(text)


def test_files_that_are_no_config_are_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_bytes(b"\n# caf\xe9")
    said = "a.toml:2: cannot be read as UTF-8: it has byte 0xe9\n  fix: save it as UTF-8"
    with pytest.raises(ConfigError, match=said):
        load_config(["a.toml"])
    with pytest.raises(ConfigError, match="is a folder\n  fix: name a file in it"):
        load_config([str(tmp_path)])
    with pytest.raises(ConfigError, match="no/such.toml: no such file"):
        load_config(["--job.config_file", "no/such.toml"])


def test_the_mark_of_windows_editors_is_no_text(tmp_path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf[training]\r\nsteps = 7\r\n")
    config = load_config([str(tmp_path / "a.toml")])
    assert config.training.steps == 7


def test_lines_after_a_list_of_lists_keep_their_numbers(message) -> None:
    lists = 'module_fqns_per_model_part = [\n["tok_embeddings", "layers.0"],\n["norm"]\n]\n'
    said = message(f"[parallelism]\n{lists}tensor_parallel_degree = 0  # [none]\n")
    assert said.startswith("a.toml:7: parallelism.tensor_parallel_degree = 0")


def test_errors_survive_processes() -> None:
    error = CombinedConfigError([ConfigError("a", "one"), ConfigError("b", "two")])
    again = pickle.loads(pickle.dumps(error))
    assert [(e.key, str(e)) for e in again.errors] == [("a", "one"), ("b", "two")]
    record = pickle.loads(pickle.dumps(RecordError("a", "row 3 is bad")))
    assert (isinstance(record, ConfigError), str(record)) == (True, "row 3 is bad")


@pytest.mark.parametrize("kind", [ConfigError, RecordError])
def test_advice_never_follows_advice(kind: type[ConfigError]) -> None:
    """Also where a message with advice is the rule of another; each of several errors has its."""
    first = config_error("a", 1, "is wrong", "lower it")
    wrapped = kind("b", f"b: {first}\n  fix: look elsewhere\n  fix: ask")
    assert str(wrapped) == "b: a = 1: is wrong\n  fix: lower it"
    assert str(pickle.loads(pickle.dumps(wrapped))) == str(wrapped)
    assert str(CombinedConfigError([first, first])).count("  fix: lower it") == 2


def test_the_schema_that_is_shipped_is_the_config_s() -> None:
    """Otherwise: meshwright schema > train_configs/schema.json"""
    assert json.loads((ROOT / "train_configs" / "schema.json").read_text()) == schema()
    definitions = schema()["$defs"]
    for key, field in all_keys():
        if key != ("job", "config_file"):
            declared = definitions[find_section(key[:-1]).__name__]["properties"][key[-1]]
            assert declared.get("description"), key
            assert field.is_required() or "default" in declared or field.default_factory, key
    assert definitions["Training"]["properties"]["steps"]["exclusiveMinimum"] == 0
    assert definitions["Training"]["additionalProperties"] is False


def test_an_editor_completes_names_and_marks_a_wrong_one() -> None:
    """Unless a module of the user's may add it. TOML's inf reaches a schema as null."""
    definitions, condition = schema()["$defs"], schema()["if"]
    complete, free = definitions["Optimizer"]["properties"]["name"]["anyOf"]
    assert (complete["enum"], free) == ([*OPTIMIZERS], {"type": "string"})
    strict = schema()["then"]["properties"]
    assert strict["model"]["properties"]["name"]["enum"] == list(MODELS)
    assert strict["optimizer"]["properties"]["name"] == complete
    assert condition["not"]["properties"]["experimental"]["required"] == ["custom_import"]
    assert condition["properties"]["extends"]["enum"] == preset_names()
    assert {"type": "null"} in definitions["Training"]["properties"]["max_norm"]["anyOf"]


def test_the_page_of_all_keys_is_the_config_s() -> None:
    """Otherwise: python -m scripts.config_reference > docs/config_reference.md"""
    shipped = (ROOT / "docs/config_reference.md").read_text("utf-8").splitlines()
    assert shipped == "\n".join(config_reference.page()).splitlines()
    keys = [line for line in shipped if line.startswith("### ")]
    keys += [name for line in shipped if line.startswith("As in") for name in line.split(", ")]
    assert len(keys) == len(list(all_keys()))


def test_every_example_of_the_reference_is_valid(tmp_path) -> None:
    examples = re.findall(
        r", for example `(.+)`$", "\n".join(config_reference.page()), re.MULTILINE
    )
    assert len(examples) > 130
    for number, example in enumerate(examples):
        file = tmp_path / f"{number}.toml"
        file.write_text(example)
        load_config([str(file)])


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["check", "my_job"], "my_job.toml"),
        (["check", "my_jbo.toml"], "my_job.toml"),
        (["check", "./here/my_jbo.toml"], "HERE/here/my_job.toml"),
        (["check", "my_job.toml", "--experimental.custom_import=my_prats.py"], "HERE/my_parts.py"),
        (["check", "my_job.toml", "--model.flavor=./my_modle"], "HERE/my_model"),
        (["report", "my_modle"], "HERE/my_model"),
    ],
)
def test_a_name_that_is_nearly_there_is_guessed(words, near, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("my_job.toml", "my_parts.py", "here/my_job.toml", "my_model/config.json"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).touch()
    with pytest.raises(ConfigError) as error:
        run(words)
    said = re.sub(r"\s+", " ", str(error.value))
    assert f"fix: did you mean {near.replace('HERE', str(tmp_path))}?" in said


def test_a_job_has_not_the_description_of_the_one_that_it_extends(tmp_path) -> None:
    (tmp_path / "a.toml").write_text('extends = "debug_model"\n')
    assert load_config(["debug_model"]).job.description
    written = read(parse_config([str(tmp_path / "a.toml")]))
    assert not written.config().job.description
    assert written.provenance.origin("job.description") == "default"


def test_a_name_in_other_letters_is_meant_before_one_that_is_near() -> None:
    assert did_you_mean("Adamw", ["Adam", "AdamW"]) == "did you mean AdamW?"
