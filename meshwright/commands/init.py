"""`meshwright init`: a first TOML of the user's own, for the data and the machine that are here."""

import json
import math
import shlex
from argparse import Namespace
from pathlib import Path

from meshwright.commands.corpus import PRESET, Corpus, Key, look_at
from meshwright.commands.options import output_file, readable, write_output
from meshwright.config.command_line import Parser
from meshwright.config.loader import FOLDER, load_config
from meshwright.system import errors
from meshwright.system.machine import count_cores, count_gpus

EPOCHS, MINUTES, TOKENS_PER_CORE_S = 3, 5, 2000
"""The job reads the data so often, unless that takes a CPU longer; the preset's model trains so
fast on a core of a Xeon (README's run)."""

LEAST_STEPS = 50
"""Of a job; the learning rate rises for 20."""

SYMPY = Corpus([("dataset", "sympy_source", "which torch installs; for trying")], 6_080_000, True)
"""What the preset trains on; it validates on every 20th file."""

GPU_BATCH, GPU_SEQ_LEN = 8, 1024
"""Sequences per GPU and microbatch, and their tokens."""

GPU_MODEL = """
[model.args]  # 88 M parameters
dim = 768
n_layers = 12
n_heads = 12
n_kv_heads = 12
hidden_dim = 2048
"""
"""`meshwright plan` says 4.7 to 5.5 GiB for one H100."""


def add_options(parser: Parser) -> None:
    parser.add_argument(
        "out",
        nargs="?",
        default="my_job.toml",
        type=output_file,
        metavar="OUT",
        help="the TOML to write (default: my_job.toml)",
    )
    parser.add_argument(
        "--from",
        dest="corpus",
        type=readable,
        metavar="PATH",
        help="your text data: a file, a folder or a glob (default: the source code of sympy)",
    )


def run(given: Namespace) -> None:
    """Write the TOML, and say which commands come next.

    Raises:
        ConfigError: if the file is there already or can't be written, or no text is found.
    """
    out, corpus = given.out, SYMPY
    fix = "choose a different file, or remove it"
    errors.check(not out.exists(), "OUT", str(out), "exists already", fix)
    if given.corpus is not None:
        print(f"looking at {given.corpus} ...", flush=True)
        corpus = look_at(given.corpus, out.absolute().parent)
        print(corpus.description)
    text, length = job_for(out, corpus, count_gpus(), count_cores())
    write_output(out, text, "OUT")
    print(f"wrote {out}: {length}\n")
    name = shlex.quote(str(out))
    print(f"meshwright check {name}\nmeshwright train {name}")


def job_for(out: Path, corpus: Corpus, gpus: int, cores: int) -> tuple[str, str]:
    """Return the TOML of a job that reads the corpus, and how long that job is."""
    machine = errors.numbered(gpus, "GPU") if gpus else errors.numbered(cores, "CPU core")
    preset, model, keys = load_config([PRESET]).training, "", corpus.keys
    seq_len, batch = preset.seq_len, preset.global_batch_size
    if gpus:
        # whole microbatches on each, at least four in all
        model, seq_len, batch = GPU_MODEL, GPU_SEQ_LEN, GPU_BATCH * gpus * math.ceil(4 / gpus)
        keys = [
            *keys,
            ("seq_len", seq_len, "tokens"),
            ("local_batch_size", GPU_BATCH, "sequences per GPU and microbatch"),
            ("global_batch_size", batch, "sequences per step"),
            ("mixed_precision_param", "bfloat16", "type of the matmuls"),
        ]
    per_step, num_tokens = batch * seq_len, corpus.num_to_train
    steps = EPOCHS * num_tokens // per_step
    if not gpus:
        steps = min(steps, MINUTES * 60 * TOKENS_PER_CORE_S * cores // per_step)
    steps = max(steps, LEAST_STEPS)
    freq = math.ceil(steps / 3)  # with that after the last step, three times
    validation: list[Key] = [("enable", False, "too little to hold out")]
    if corpus.is_held_out:
        validation = [("freq", freq, "steps; and after the last")]
        if corpus is not SYMPY:
            validation.append(("num_samples", -1, "sequences: all that is held out"))
    epochs = f"about {steps * per_step / num_tokens:.2g} epochs"
    text = f"""\
#:schema {(FOLDER / "schema.json").as_uri()}
# A first job, for {machine}. All keys: meshwright config --help
{_lines(("extends", PRESET, "a preset: meshwright config --presets"))}
[job]
{_lines(("dump_folder", f"outputs/{out.stem}", "checkpoints, logs and metrics"))}{model}
[training]
{_lines(*keys, ("steps", steps, epochs))}
[validation]
{_lines(*validation)}
[checkpoint]
{_lines(("interval", freq, "steps; the last is always saved"))}"""
    return text, f"{steps:,} steps of {per_step:,} tokens, {epochs}, for {machine}"


def _lines(*keys: Key) -> str:
    """Write keys of a table, what they are in a column."""
    lines = [
        (f"{name} = {json.dumps(value, ensure_ascii=False)}", text) for name, value, text in keys
    ]
    return "".join(f"{line:33} # {text}\n" for line, text in lines)
