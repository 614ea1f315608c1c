"""Break valid configs in one place each, and judge the help that a user gets.

python -m tests.campaigns.config_mutations --count 150 --seed 1               in this process
python -m tests.campaigns.config_mutations --count 150 --seed 1 --processes  `meshwright check` each

Each mutation knows its line, the key or rule that a message has to name, and the words that help.
right: all of them are there. misleading: it guesses ("did you mean", "write") without the right
word among its guesses. The names of other frameworks below are theirs (transformers, nanoGPT,
Megatron-LM, Lightning, DeepSpeed, axolotl, torchtitan, litgpt), not a copy of our table.
"""

import argparse
import itertools
import json
import os
import random
import re
import string
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from meshwright.config.fields import all_keys
from meshwright.config.job_config import JobConfig
from meshwright.system.errors import ConfigError
from meshwright.system.log import COLUMNS

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "assets" / "tokenizers" / "python_2k.model"
RANKS = 2

BASES = (
    (ROOT / "train_configs" / "debug_model.toml")
    .read_text()
    .replace("../assets/tokenizers/python_2k.model", str(TOKENIZER)),
    f"""\
[job]
dump_folder = "outputs/mutated"
max_run_seconds = 3600

[model]
name = "llama"
flavor = "debugmodel"
tokenizer_path = "{TOKENIZER}"   # sentencepiece

[training]
dataset = "sympy_source"
seq_len = 512
local_batch_size = 4
global_batch_size = 16           # two microbatches
max_norm = 0.5
steps = 1000
seed = 7
deterministic = true
mixed_precision_param = "bfloat16"

[optimizer]
name = "AdamW"
lr = 3e-4
beta1 = 0.9
beta2 = 0.95
eps = 1e-8
weight_decay = 0.1

[lr_scheduler]
warmup_steps = 100
decay_ratio = 0.5
decay_type = "cosine"
min_lr_factor = 0.1

[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
context_parallel_degree = 1

[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"

[compile]
enable = false

[checkpoint]
enable = true
interval = 250
keep_latest_k = 3
async_mode = "thread"

[metrics]
log_freq = 5
enable_tensorboard = false

[profiling]
enable_profiling = true
profile_freq = 100

[comm]
train_timeout_seconds = 60
""",
)

OTHERS = """
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
"""Their name, our key; right is any key of that name's last part, or this one."""

NOT_OURS = """
telemetry_url banner_text quux_factor mascot payment_plan zebra_mode gif_output coffee_breaks
horoscope lunar_phase favourite_colour xyzzy foobar blockchain_id
"""

MOVES = tuple(JobConfig.model_fields)


class Mutation(NamedTuple):
    """A config with one mistake."""

    kind: str
    text: str
    line: int | None
    """Where the mistake is, from 1; None: it is an absence."""
    says: tuple[str, ...]
    """The message has all of these ..."""
    helps: tuple[str, ...]
    """... and one of these; empty: no guess at all is right."""


def mutations(count: int, seed: int) -> Iterator[Mutation]:
    """Draw `count` mutations, the kinds in turn as often as their weight."""
    draw = random.Random(seed)
    kinds = [make for make, weight in KINDS.items() for _ in range(weight)]
    seen = set[str]()
    for make in itertools.cycle(kinds):
        if len(seen) == count:
            return
        mutation = make(draw)
        if mutation is not None and mutation.text not in seen:
            seen.add(mutation.text)
            yield mutation


def _assignments(text: str) -> list[tuple[int, str, str, str]]:
    """Line number, section, key and value of every assignment."""
    found, section = [], ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\[([\w.]+)\]", line):
            section = header[1]
        elif match := re.match(r"(\w+) = (.*?)\s*(#.*)?$", line):
            found.append((number, section, match[1], match[2]))
    return found


def _with_line(text: str, number: int, line: str) -> str:
    lines = text.splitlines()
    lines[number - 1] = line
    return "\n".join(lines) + "\n"


def _inserted(text: str, section: str, line: str) -> tuple[str, int]:
    """`text` with `line` under the header of `section` (added if it is not there)."""
    lines = text.splitlines()
    if f"[{section}]" not in lines:
        lines += ["", f"[{section}]"]
    number = lines.index(f"[{section}]") + 2
    lines.insert(number - 1, line)
    return "\n".join(lines) + "\n", number


def _typing_error(draw: random.Random, word: str) -> str:
    at = draw.randrange(1, len(word))  # the first letter is seldom wrong
    letter = draw.choice(string.ascii_lowercase)
    return draw.choice(
        [
            word[:at] + letter + word[at:],
            word[:at] + word[at] + word[at:],
            word[:at] + word[at + 1 :],
            word[:at] + letter + word[at + 1 :],
            word[: at - 1] + word[at] + word[at - 1] + word[at + 1 :],
        ]
    )


def misspelled_key(draw: random.Random) -> Mutation | None:
    text = draw.choice(BASES)
    number, section, key, value = draw.choice(_assignments(text))
    wrong = _typing_error(draw, key)
    is_key = any(found == (section, wrong) for found, _ in all_keys())
    if is_key or len(wrong) < 2 or wrong == key or len(key) < 3:
        return None
    line = f"{wrong} = {value}"
    says = (f"unknown key {section}.{wrong}",)
    helps = (f"did you mean {section}.{key}",)
    return Mutation("misspelled key", _with_line(text, number, line), number, says, helps)


def wrong_section(draw: random.Random) -> Mutation | None:
    text = draw.choice(BASES)
    section, key = draw.choice([found for found, _ in all_keys() if len(found) == 2])
    place = draw.choice(MOVES)
    if any(found == (place, key) for found, _ in all_keys()) or key == "config_file":
        return None
    broken, number = _inserted(text, place, f"{key} = 1")
    # where several sections have the key, the list of all of them is as right
    return Mutation(
        "wrong section", broken, number, (f"unknown key {place}.{key}",), (f"{section}.{key}",)
    )


def other_frameworks(draw: random.Random) -> Mutation | None:
    text = draw.choice(BASES)
    name, ours = draw.choice([pair.split() for pair in re.split(r"[|\n]", OTHERS) if pair])
    section = ours.split(".")[0] if draw.random() < 0.6 else draw.choice(MOVES)
    if any(found == (section, name) for found, _ in all_keys()):
        return None
    broken, number = _inserted(text, section, f"{name} = 1")
    says = (f"unknown key {section}.{name}",)
    here = f"{section}.{ours.rpartition('.')[2]}"  # [validation] has a dataset too
    return Mutation("other framework", broken, number, says, (ours, here))


def nonsense(draw: random.Random) -> Mutation | None:
    text, section = draw.choice(BASES), draw.choice(MOVES)
    name = draw.choice(NOT_OURS.split())
    broken, number = _inserted(text, section, f"{name} = 1")
    return Mutation("nonsense", broken, number, (f"unknown key {section}.{name}",), ())


def misspelled_section(draw: random.Random) -> Mutation | None:
    text = draw.choice(BASES)
    section = draw.choice([found[1] for found in re.finditer(r"^\[(\w+)\]", text, re.M)])
    wrong = _typing_error(draw, section)
    if wrong in MOVES:
        return None
    number = text.splitlines().index(f"[{section}]") + 1
    broken = _with_line(text, number, f"[{wrong}]")
    says = (f"unknown section {wrong}",)
    return Mutation("misspelled section", broken, number, says, (f"did you mean {section}?",))


def wrong_type(draw: random.Random) -> Mutation | None:
    text = draw.choice(BASES)
    number, section, key, value = draw.choice(_assignments(text))
    if value in ("true", "false"):
        wrong = draw.choice([f'"{value}"', "1" if value == "true" else "0"])
        helps = (f"write {value}",)
    elif value.isdecimal():
        wrong = draw.choice([f'"{value}"', f"{value}.0", f"{value}e0"])
        helps = (f"write {value}",)
    elif re.fullmatch(r"[\d.e-]+", value):
        wrong, helps = f'"{value}"', (f"write {value}",)
    else:
        wrong = str(draw.randrange(10))
        helps = (f'quote it: "{wrong}"',) if key != "async_mode" else ()
        declared = dict(all_keys())[(section, key)]
        if "Literal" in str(declared.annotation):  # no choice is near a number
            helps = ()
    broken = _with_line(text, number, f"{key} = {wrong}  # as before")
    return Mutation("wrong type", broken, number, (f"{section}.{key} = ",), helps)


def not_toml(draw: random.Random) -> Mutation | None:
    text = draw.choice(BASES)
    number, _, key, value = draw.choice(_assignments(text))
    if value in ("true", "false"):
        wrong, helps = f"{key} = {value.title()}", f"write {value}"
    elif value.startswith('"'):
        bare = value.strip('"')
        wrong, helps = f"{key} = {bare}", f'quote it: "{bare}"'
        if bare.isdecimal():
            return None  # a number, and so TOML
    elif value.isdecimal() and value.endswith("000"):
        wrong, helps = f"{key} = {value[:-3]}k", f"write {value}"
    else:
        wrong, helps = f"{key} = None", "leave the key out"
    return Mutation("not TOML", _with_line(text, number, wrong), number, ("not TOML",), (helps,))


def out_of_bounds(draw: random.Random) -> Mutation | None:
    text = draw.choice(BASES)
    number, section, key, value = draw.choice(_assignments(text))
    if not re.fullmatch(r"-?[\d.e-]+", value):
        return None
    broken = _with_line(text, number, f"{key} = -7")
    says = (f"{section}.{key} = -7", "greater than")
    return Mutation("out of bounds", broken, number, says, ("greater than",))


CHOICES = (
    ("optimizer", "name", "adamw", "did you mean AdamW?"),
    ("optimizer", "name", "Adamw", "did you mean AdamW?"),
    ("optimizer", "name", "sgd", "choose from Adam, AdamW, muon"),
    ("training", "mixed_precision_param", "bf16", 'write "bfloat16"'),
    ("training", "mixed_precision_param", "fp32", 'write "float32"'),
    ("training", "mixed_precision_param", "float16", "'float32' or 'bfloat16'"),
    ("training", "dtype", "bfloat", 'write "bfloat16"'),
    ("lr_scheduler", "decay_type", "cosin", 'write "cosine"'),
    ("lr_scheduler", "decay_type", "polynomial", "'linear', 'sqrt' or 'cosine'"),
    ("activation_checkpoint", "mode", "selectiv", 'write "selective"'),
    ("compile", "backend", "Inductor", 'write "inductor"'),
    ("model", "name", "lama", "did you mean llama?"),
    ("model", "name", "falcon", "(docs/extending.md adds one)"),
    ("model", "flavor", "debug_model", "did you mean debugmodel?"),
    ("training", "dataset", "sympy-source", "did you mean sympy_source?"),
    ("training", "dataset", "openwebtext", "choose from"),
    ("parallelism", "pipeline_parallel_schedule", "1f1b", 'write "1F1B"'),
)


def wrong_choice(draw: random.Random) -> Mutation | None:
    section, key, value, helps = draw.choice(CHOICES)
    text = draw.choice(BASES)
    for number, found, name, _ in _assignments(text):
        if (found, name) == (section, key):
            broken = _with_line(text, number, f'{key} = "{value}"')
            break
    else:
        broken, number = _inserted(text, section, f'{key} = "{value}"')
    says = (f"{section}.{key} = '{value}'",)
    return Mutation("wrong choice", broken, number, says, (helps,))


RULES = (
    ("parallelism", "tensor_parallel_degree", "3", "does not divide 2 ranks", "multiple of 3"),
    ("parallelism", "data_parallel_shard_degree", "5", "but there are 2 ranks", "launch 5 ranks"),
    ("parallelism", "data_parallel_shard_degree", "0", "but there are 2 ranks", "set it to -1"),
    ("training", "global_batch_size", "13", "positive multiple of", "the nearest is"),
    ("training", "tokenizer_pth", "0", "unknown key training.tokenizer_pth", "tokenizer_path"),
    ("model", "tokenizer_path", '"no/tokenizer.model"', "no such file", "check the path"),
    ("model", "tokenizer_path", f'"{TOKENIZER}x"', "no such file", f"did you mean {TOKENIZER}"),
    ("training", "dataset_path", '"/tmp"', "reads no path", "leave it out"),
    ("lr_scheduler", "decay_ratio", "0.999", "do not fit in", "lower it"),
    ("job", "dump_folder", '"s3://bucket/run"', "begins an address", "mount it"),
    (
        "job",
        "dump_folder",
        '"/proc/1/mem/x"',
        "not a folder that can be written",
        "name another folder",
    ),
    ("checkpoint", "load_step", "5", "not among the checkpoints", ""),
    ("optimizer", "early_step_in_backward", "true", "training.max_norm", "max_norm = inf"),
    ("model", "frozen", '["layer.*"]', "matches no parameter", ""),
    ("checkpoint", "initial_load_path", '"/no/such/folder"', "no such folder", "check the path"),
)


def broken_rule(draw: random.Random) -> Mutation | None:
    section, key, value, rule, helps = draw.choice(RULES)
    text = draw.choice(BASES)
    for number, found, name, _ in _assignments(text):
        if (found, name) == (section, key):
            broken = _with_line(text, number, f"{key} = {value}")
            break
    else:
        broken, number = _inserted(text, section, f"{key} = {value}")
    return Mutation("broken rule", broken, number, (f"{section}.{key}", rule), (helps,))


def removed_line(draw: random.Random) -> Mutation | None:
    text = draw.choice(BASES)
    lines = [line for line in text.splitlines() if not line.startswith("tokenizer_path")]
    number = lines.index("[model]") + 1
    says = ("model.tokenizer_path: not given",)
    return Mutation("missing", "\n".join(lines) + "\n", number, says, ("name a tokenizer",))


KINDS: dict[Callable[[random.Random], Mutation | None], int] = {
    misspelled_key: 5,
    wrong_section: 5,
    other_frameworks: 6,
    nonsense: 2,
    misspelled_section: 2,
    wrong_type: 4,
    not_toml: 3,
    out_of_bounds: 2,
    wrong_choice: 3,
    broken_rule: 4,
    removed_line: 1,
}
"""How often each is drawn, out of 37."""


class Verdict(NamedTuple):
    """How good a message is."""

    is_right: bool
    is_misleading: bool
    has_line: bool
    has_traceback: bool


def judge(mutation: Mutation, message: str, path: Path) -> Verdict:
    """Hold `message` against what it should say."""
    has_line = f"{path.name}:{mutation.line}:" in message
    says = all(part in message for part in mutation.says)
    # "lr" is no help in "lr_scheduler"
    helps = not mutation.helps or any(
        re.search(rf"{re.escape(part)}(?!\w)", message) for part in mutation.helps
    )
    guesses = re.findall(r"fix: (did you mean .*|write .*)", message)
    is_misleading = bool(guesses) and not (mutation.helps and helps)
    has_traceback = "Traceback" in message
    is_right = says and helps and not is_misleading and not has_traceback
    return Verdict(is_right, is_misleading, has_line, has_traceback)


def message_of(path: Path) -> str:
    """What a user is told, without a process; "" if nothing."""
    from meshwright.commands.main import run

    try:
        run(["check", str(path), "--ngpu", str(RANKS)])
    except ConfigError as error:
        return str(error)
    return ""


def message_of_process(path: Path) -> str:
    """What `meshwright check` prints, in lines that are not wrapped."""
    command = [sys.executable, "-P", "-m", "meshwright.commands.main", "check", str(path)]
    result = subprocess.run(
        [*command, "--ngpu", str(RANKS)],
        capture_output=True,
        text=True,
        env={**os.environ, COLUMNS: "10000"},
    )
    return result.stdout + result.stderr


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", action="store_true", help="a process for each, timed")
    parser.add_argument("--show", action="store_true", help="print every message")
    given = parser.parse_args()
    verdicts, seconds, wrong = list[Verdict](), list[float](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutated.toml"
        for mutation in mutations(given.count, given.seed):
            path.write_text(mutation.text)
            start = time.perf_counter()
            message = (message_of_process if given.processes else message_of)(path)
            seconds.append(time.perf_counter() - start)
            verdict = judge(mutation, message, path)
            verdicts.append(verdict)
            is_good = verdict == Verdict(True, False, True, False)
            if not is_good:
                wrong[mutation.kind] += 1
            if given.show or not is_good:
                print(
                    f"--- {mutation.kind}: {verdict}\n{mutation.says} {mutation.helps}\n{message}"
                )
    seconds.sort()
    print(
        json.dumps(
            {
                "mutations": len(verdicts),
                "right": sum(v.is_right for v in verdicts),
                "misleading": sum(v.is_misleading for v in verdicts),
                "with_line": sum(v.has_line for v in verdicts),
                "tracebacks": sum(v.has_traceback for v in verdicts),
                "median_s": round(seconds[len(seconds) // 2], 3),
                "max_s": round(seconds[-1], 3),
                "not_good": dict(wrong),
            }
        )
    )


if __name__ == "__main__":
    main()
