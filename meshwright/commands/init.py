"""`meshwright init`: a first TOML of the user's own, for the data and the machine that are here."""

import json
import math
import os
import shlex
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from meshwright.commands.corpus import PRESET, Corpus, look_at
from meshwright.commands.options import output_file, readable, write_output
from meshwright.config.command_line import Parser
from meshwright.config.loader import FOLDER, load_config
from meshwright.system import errors
from meshwright.system.machine import count_cores, count_gpus

EPOCHS, MINUTES, TOKENS_PER_CORE_S = 3, 5, 2000
"""The job reads the data so often, unless that takes a CPU longer; the preset's model trains so
fast on a core of a Xeon (README's run)."""

SYMPY_TOKENS = 6_400_000

LEAST_STEPS, ALL_BELOW = 10, 256
"""A job has so many steps at least; held-out sequences below which all are validated on."""

GPU_BATCH, GPU_SEQ_LEN = 8, 1024
"""Sequences per GPU and microbatch, and their tokens."""

GPU_MODEL = {"dim": 768, "n_layers": 12, "n_heads": 12, "n_kv_heads": 12, "hidden_dim": 2048}
"""On a GPU: 88 M parameters with the preset's tokenizer. `meshwright plan` says 4.7 to 5.5 GiB for
one H100."""

Keys = dict[str, tuple[object, str]]
"""Values of keys, each with a comment."""


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
    out: Path = given.out
    fix = "choose a different file, or remove it"
    errors.check(not out.exists(), "OUT", str(out), "exists already", fix)
    corpus = None
    if given.corpus is not None:
        print(f"looking at {given.corpus} ...", flush=True)
        corpus = look_at(given.corpus)
        print(corpus.description)
    gpus, cores = count_gpus(), count_cores()
    machine = errors.numbered(gpus, "GPU") if gpus else errors.numbered(cores, "CPU core")
    sections, steps = job_for(out, corpus, gpus, cores)
    write_output(out, _toml(machine, sections), "OUT")
    print(f"wrote {out}: {steps}, for {machine}\n")
    name = shlex.quote(str(out))
    print(f"meshwright check {name}\nmeshwright train {name}")


def job_for(out: Path, corpus: Corpus | None, gpus: int, cores: int) -> tuple[dict[str, Keys], str]:
    """Choose the keys of a job, by section, and say how long it is.

    Args:
        corpus: None: the source code of sympy.
    """
    preset = load_config([PRESET]).training
    seq_len, batch = preset.seq_len, preset.global_batch_size
    sections: dict[str, Keys] = {
        "job": {"dump_folder": (f"outputs/{out.stem}", "checkpoints, logs and metrics")},
        "training": _data(corpus, out.absolute().parent),
    }
    if gpus:
        seq_len, batch = GPU_SEQ_LEN, gpu_batch(gpus)
        sections["model.args"] = {key: (size, "") for key, size in GPU_MODEL.items()}
        sections["training"] |= {
            "seq_len": (seq_len, "tokens"),
            "local_batch_size": (GPU_BATCH, "sequences per GPU and microbatch"),
            "global_batch_size": (batch, "sequences per step"),
            "mixed_precision_param": ("bfloat16", "type of the matmuls"),
        }
    per_step, num_tokens = batch * seq_len, corpus.num_to_train if corpus else SYMPY_TOKENS
    steps = EPOCHS * num_tokens // per_step
    if not gpus:
        steps = min(steps, MINUTES * 60 * TOKENS_PER_CORE_S * cores // per_step)
    steps = max(steps, LEAST_STEPS)
    epochs = f"about {steps * per_step / max(num_tokens, 1):.2g} epochs"
    sections["training"]["steps"] = steps, epochs
    often = math.ceil(steps / 3)  # with that after the last step, three times
    sections["validation"] = {"enable": (False, "too little to hold out")}
    if corpus is None or corpus.held_out:
        held_out = corpus.held_out * corpus.num_tokens if corpus else math.inf
        count = -1 if held_out < ALL_BELOW * (seq_len + 1) else 64
        sections["validation"] = {
            "enable": (True, ""),
            "freq": (often, "steps; and after the last"),
            "num_samples": (count, "sequences; -1: all that is held out"),
        }
    warmup = min(20, max(steps // 5, 1))
    sections["lr_scheduler"] = {"warmup_steps": (warmup, "steps until optimizer.lr is reached")}
    sections["checkpoint"] = {"interval": (often, "steps; the last is always saved")}
    return sections, f"{steps:,} steps of {per_step:,} tokens, {epochs}"


def gpu_batch(gpus: int) -> int:
    """Return the sequences of a step: whole microbatches on each of the GPUs, at least four."""
    return GPU_BATCH * gpus * math.ceil(4 / gpus)


def _data(corpus: Corpus | None, folder: Path) -> Keys:
    """Return the keys that name the data. Its path starts at `folder`."""
    if corpus is None:
        return {"dataset": ("sympy_source", "which torch installs; for trying")}
    source, path = corpus.source, os.path.relpath(corpus.source.dataset_path, folder)
    if path.startswith(".."):
        path = os.path.abspath(source.dataset_path)
    keys: Keys = {
        "dataset": (source.dataset, errors.numbered(corpus.num_files, "file")),
        "dataset_path": (path, "relative to this file"),
        "dataset_separator": (source.dataset_separator, "between two documents"),
        "dataset_column": (source.dataset_column, "has the text"),
        "validation_fraction": (corpus.held_out, "of the documents, by a hash of each"),
    }
    defaults = {"dataset_separator": "", "dataset_column": "text", "validation_fraction": 0.0}
    return {key: pair for key, pair in keys.items() if pair[0] != defaults.get(key)}


def _toml(machine: str, sections: Mapping[str, Keys]) -> str:
    """Return the text of the file, its comments in a column."""
    schema = (FOLDER / "schema.json").as_uri()  # editors complete and check keys by it
    lines = [f"#:schema {schema}"]
    lines.append(f"# A first job, for {machine}. All keys: meshwright config --help")
    preset: Keys = {"extends": (PRESET, "a preset: meshwright config --presets")}
    for name, keys in {"": preset, **sections}.items():
        lines += ["", f"[{name}]"] if name else []
        for key, (value, comment) in keys.items():
            line = f"{key} = {json.dumps(value, ensure_ascii=False)}"
            lines.append(f"{line:33} # {comment}" if comment else line)
    return "".join(f"{line}\n" for line in lines)
