"""`meshwright init`: a first TOML of the user's own, for the data and the machine that are here."""

import json
import math
import os
import re
import shlex
from argparse import Namespace
from pathlib import Path

from meshwright.commands.corpus import PRESET, Corpus, look_at
from meshwright.commands.options import output_file, readable, write_output
from meshwright.config.command_line import Parser
from meshwright.config.loader import FOLDER, load_config
from meshwright.config.training import Source
from meshwright.system import errors
from meshwright.system.machine import count_cores, count_gpus

EPOCHS, MINUTES, TOKENS_PER_CORE_S = 3, 5, 2000
"""The job reads the data so often, unless that takes a CPU longer; the preset's model trains so
fast on a core of a Xeon (README's run)."""

LEAST_STEPS = 50
"""Of a job; the learning rate rises for 20."""

SYMPY = Corpus(
    Source(dataset="sympy_source"), 0, num_tokens=6_400_000, held_out=0.05, num_to_train=6_080_000
)
"""What the preset trains on, and validates on."""

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
        corpus = look_at(given.corpus)
        print(corpus.description)
    text, length = job_for(out, corpus, count_gpus(), count_cores())
    write_output(out, text, "OUT")
    print(f"wrote {out}: {length}\n")
    name = shlex.quote(str(out))
    print(f"meshwright check {name}\nmeshwright train {name}")


def job_for(out: Path, corpus: Corpus, gpus: int, cores: int) -> tuple[str, str]:
    """Return the TOML of a job that reads the corpus, and how long that job is."""
    machine = errors.numbered(gpus, "GPU") if gpus else errors.numbered(cores, "CPU core")
    training, model, data = load_config([PRESET]).training, "", _data(corpus, out)
    seq_len, batch = training.seq_len, training.global_batch_size
    if gpus:
        # whole microbatches on each, at least four in all
        model, seq_len, batch = GPU_MODEL, GPU_SEQ_LEN, GPU_BATCH * gpus * math.ceil(4 / gpus)
        data += f"""
seq_len = {seq_len}  # tokens
local_batch_size = {GPU_BATCH}  # sequences per GPU and microbatch
global_batch_size = {batch}  # sequences per step
mixed_precision_param = "bfloat16"  # type of the matmuls"""
    per_step, num_tokens = batch * seq_len, corpus.num_to_train
    steps = EPOCHS * num_tokens // per_step
    if not gpus:
        steps = min(steps, MINUTES * 60 * TOKENS_PER_CORE_S * cores // per_step)
    steps = max(steps, LEAST_STEPS)
    freq = math.ceil(steps / 3)  # with that after the last step, three times
    validation = f"freq = {freq}  # steps; and after the last"
    if not corpus.held_out:
        validation = "enable = false  # too little to hold out"
    elif corpus is not SYMPY:
        validation += "\nnum_samples = -1  # sequences: all that is held out"
    epochs = f"about {steps * per_step / num_tokens:.2g} epochs"
    text = f"""\
#:schema {(FOLDER / "schema.json").as_uri()}
# A first job, for {machine}. All keys: meshwright config --help
extends = "{PRESET}"  # a preset: meshwright config --presets

[job]
dump_folder = {_quoted(f"outputs/{out.stem}")}  # checkpoints, logs and metrics
{model}
[training]
{data}
steps = {steps}  # {epochs}

[validation]
{validation}

[checkpoint]
interval = {freq}  # steps; the last is always saved
"""
    # the comments of keys in a column
    text = re.sub(r"(?m)^(\w.*)  # ", lambda match: f"{match[1]:33} # ", text)
    return text, f"{steps:,} steps of {per_step:,} tokens, {epochs}, for {machine}"


def _data(corpus: Corpus, out: Path) -> str:
    """Return the lines that name the data."""
    source = corpus.source
    if corpus is SYMPY:
        return 'dataset = "sympy_source"  # which torch installs; for trying'
    path = os.path.relpath(source.dataset_path, out.absolute().parent)
    if path.startswith(".."):
        path = os.path.abspath(source.dataset_path)
    lines = [
        f"dataset = {_quoted(source.dataset)}  # {errors.numbered(corpus.num_files, 'file')}",
        f"dataset_path = {_quoted(path)}  # relative to this file",
    ]
    if source.dataset_separator:
        separator = _quoted(source.dataset_separator)
        lines.append(f"dataset_separator = {separator}  # between two documents")
    if source.dataset_column != "text":
        lines.append(f"dataset_column = {_quoted(source.dataset_column)}  # has the text")
    if corpus.held_out:
        part = f"validation_fraction = {corpus.held_out}"
        lines.append(f"{part}  # of the documents, by a hash of each")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
