"""`meshwright init`: a first TOML of the user's own, for the data and the machine that are here."""

import json
import math
import os
import shlex
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.commands.corpus import PRESET, Corpus, look_at
from meshwright.commands.options import output_file, readable, write_output
from meshwright.config.command_line import Parser
from meshwright.config.loader import FOLDER, load_config
from meshwright.system.errors import check, numbered
from meshwright.system.machine import count_cores, count_gpus

EPOCHS, MINUTES, TOKENS_PER_CORE_S = 3, 5, 2000
"""The job reads the data so often, unless that takes this machine longer; the preset's model trains
so fast on a core of a Xeon (README's run)."""

SYMPY_TOKENS = 6_400_000

LEAST_STEPS, ALL_BELOW = 10, 256
"""A job has so many steps at least; held-out sequences below which all are validated on."""

GPU_BATCH, GPU_SEQ_LEN = 8, 1024

GPU_MODEL = {"dim": 768, "n_layers": 12, "n_heads": 12, "n_kv_heads": 12, "hidden_dim": 2048}
"""On a GPU: 88 M parameters with the preset's tokenizer. `meshwright plan` says 4.7 to 5.5 GiB for
one H100."""


@dataclass(frozen=True)
class Scale:
    """The size of a job that suits its data and this machine."""

    machine: str
    is_gpu: bool
    batch: int
    """Sequences per step."""
    seq_len: int
    steps: int
    epochs: float


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
        ConfigError: if the file is there already or cannot be written, or no text is found.
    """
    out: Path = given.out
    check(not out.exists(), "OUT", str(out), "exists already", "name another file, or remove it")
    corpus = None
    if given.corpus is not None:
        print(f"looking at {given.corpus} ...", flush=True)
        corpus = look_at(given.corpus)
        print(corpus.description)
    scale = scale_for(SYMPY_TOKENS if corpus is None else corpus.num_to_train)
    lines = _toml(out, corpus, scale)
    text = "".join(f"{line.removesuffix('# ').rstrip()}\n" for line in lines)
    write_output(out, text, "OUT")
    steps = f"{scale.steps:,} steps of {scale.batch * scale.seq_len:,} tokens"
    print(f"wrote {out}: {steps}, about {scale.epochs:.2g} epochs, for {scale.machine}\n")
    name = shlex.quote(str(out))
    print(f"meshwright check {name}\nmeshwright train {name}")


def scale_for(num_tokens: int) -> Scale:
    """Choose steps and batch for so many tokens on this machine."""
    gpus, cores, preset = count_gpus(), count_cores(), load_config([PRESET]).training
    batch, seq_len = preset.global_batch_size, preset.seq_len
    if gpus:
        batch, seq_len = GPU_BATCH * gpus * math.ceil(4 / gpus), GPU_SEQ_LEN
    per_step = batch * seq_len
    steps = EPOCHS * num_tokens // per_step
    if not gpus:
        steps = min(steps, MINUTES * 60 * TOKENS_PER_CORE_S * cores // per_step)
    steps = max(steps, LEAST_STEPS)
    machine = numbered(gpus, "GPU") if gpus else numbered(cores, "CPU core")
    epochs = steps * per_step / max(num_tokens, 1)
    return Scale(machine, gpus > 0, batch, seq_len, steps, epochs)


def _toml(out: Path, corpus: Corpus | None, scale: Scale) -> Iterator[str]:
    """Yield the lines of the TOML."""
    yield f"#:schema {(FOLDER / 'schema.json').as_uri()}"  # editors complete and check keys by it
    yield f"# A first job, for {scale.machine}. All keys: meshwright config --help"
    yield _line("extends", PRESET, "a preset: meshwright config --presets")
    yield "\n[job]"
    yield _line("dump_folder", f"outputs/{out.stem}", "checkpoints, logs and figures")
    if scale.is_gpu:
        yield "\n[model.args]"
        yield from (_line(key, size, "") for key, size in GPU_MODEL.items())
    yield "\n[training]"
    yield from _data(corpus, out.absolute().parent)
    if scale.is_gpu:
        yield _line("seq_len", scale.seq_len, "tokens")
        yield _line("local_batch_size", GPU_BATCH, "sequences per GPU and microbatch")
        yield _line("global_batch_size", scale.batch, "sequences per step")
        yield _line("mixed_precision_param", "bfloat16", "type of the matmuls")
    yield _line("steps", scale.steps, f"about {scale.epochs:.2g} epochs")
    yield "\n[validation]"
    has_validation = corpus is None or corpus.held_out > 0
    often = math.ceil(scale.steps / 3)  # with that after the last step, three times
    yield _line("enable", has_validation, "" if has_validation else "too little to hold out")
    if has_validation:
        yield _line("freq", often, "steps; and after the last")
        held_out = corpus.held_out * corpus.num_tokens if corpus else math.inf
        is_small = held_out < ALL_BELOW * (scale.seq_len + 1)
        yield _line("num_samples", -1 if is_small else 64, "sequences; -1: all that is held out")
    yield "\n[lr_scheduler]"
    warmup = min(20, max(scale.steps // 5, 1))
    yield _line("warmup_steps", warmup, "steps until optimizer.lr is reached")
    yield "\n[checkpoint]"
    yield _line("interval", often, "steps; the last is always saved")


def _data(corpus: Corpus | None, folder: Path) -> Iterator[str]:
    """Yield the lines that name the data. Its path starts at `folder`."""
    if corpus is None:
        yield _line("dataset", "sympy_source", "which torch installs; for trying")
        return
    source, path = corpus.source, os.path.relpath(corpus.source.dataset_path, folder)
    if path.startswith(".."):
        path = os.path.abspath(source.dataset_path)
    yield _line("dataset", source.dataset, numbered(corpus.num_files, "file"))
    yield _line("dataset_path", path, "relative to this file")
    if source.dataset_separator:
        yield _line("dataset_separator", source.dataset_separator, "between two documents")
    if source.dataset_column != "text":
        yield _line("dataset_column", source.dataset_column, "has the text")
    if corpus.held_out:
        yield _line("validation_fraction", corpus.held_out, "of the documents, by a hash of each")


def _line(key: str, value: object, comment: str) -> str:
    return f"{key} = {json.dumps(value, ensure_ascii=False)}".ljust(33) + f" # {comment}"
