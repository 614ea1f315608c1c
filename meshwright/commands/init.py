"""`meshwright init`: a first TOML of the user's own, for the data and the machine that are here."""

import itertools
import json
import math
import os
import shlex
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshwright.commands.options import output_file, readable, write_output
from meshwright.config.command_line import Parser
from meshwright.config.loader import load_config
from meshwright.config.training import Source
from meshwright.datasets.files import (
    PACKED,
    ROW_FORMATS,
    SUFFIXES,
    Entry,
    Range,
    check_downloaded,
    chunks,
    resolve,
)
from meshwright.datasets.readers import Layout, read
from meshwright.datasets.rows import LocalDocuments, is_on_side
from meshwright.datasets.sources import by_suffix, left_out
from meshwright.datasets.storage import DataFile
from meshwright.datasets.tokenizers.kinds import build_tokenizer
from meshwright.datasets.tokenizers.special_tokens import well_formed
from meshwright.system.errors import (
    ConfigError,
    RecordError,
    check,
    config_error,
    numbered,
    where_it_ends,
)
from meshwright.system.machine import count_cores, count_gpus

PRESET = "debug_model"

SAMPLE_BYTES, TOKENISED_BYTES = 1 << 20, 1 << 17
"""Of the text that is looked at, and of that the part that is tokenised: 0.1 s each."""

LOOKED_AT = 100
"""Rows among which one has to hold text."""

FEW = 20
"""Documents that are too few for a part of them to be held out: files are cut into more."""

PACKED_BY = 3
"""Bytes of text per byte of a compressed file, about."""

EPOCHS, MINUTES = 3, 5
"""The job reads the data so often, unless that takes this machine longer."""

TOKENS_PER_CORE_S = 2000
"""The preset's model trains so fast on a core of a Xeon (README's run)."""

SYMPY_TOKENS = 4_000_000

LEAST_STEPS, LEAST_SAMPLES, ALL_BELOW = 10, 8, 256
"""A job has so many steps at least; sequences that are held out at least; and those below which all
are validated on."""

GPU_BATCH, GPU_SEQ_LEN = 8, 1024

GPU_MODEL = {"dim": 768, "n_layers": 12, "n_heads": 12, "n_kv_heads": 12, "hidden_dim": 2048}
"""On a GPU: 88 M parameters with the preset's tokenizer. `meshwright plan` says 4.7 to 5.5 GiB for
one H100."""


@dataclass(frozen=True)
class Corpus:
    """The data, as far as a look at a part of it tells."""

    source: Source
    num_files: int
    num_documents: int
    num_tokens: int
    held_out: float
    """Part of the documents to validate on; 0: there are too few."""
    num_to_train: int
    """Tokens that are not held out."""
    left_out: list[str]
    """Files beside them, by suffix."""

    def __str__(self) -> str:
        rest = f"; left out: {', '.join(self.left_out)}" if self.left_out else ""
        documents = f"about {numbered(self.num_documents, 'document')}"
        files = numbered(self.num_files, "file")
        return f"{files} of {self.source.dataset}, {documents}, {self.num_tokens:,} tokens{rest}"


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
        help="your texts: a file, a folder or a glob (default: the source code of sympy)",
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
        print(corpus)
    scale = scale_for(SYMPY_TOKENS if corpus is None else corpus.num_to_train)
    lines = _toml(out, corpus, scale)
    text = "".join(f"{line.removesuffix('# ').rstrip()}\n" for line in lines)
    write_output(out, text, "OUT")
    print(f"wrote {out}: {scale}\n")
    name = shlex.quote(str(out))
    print(f"meshwright check {name}\nmeshwright train {name}")


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
    minutes: int
    """About; 0: not known."""

    def __str__(self) -> str:
        steps = f"{self.steps:,} steps of {self.batch * self.seq_len:,} tokens"
        time = f" and {numbered(self.minutes, 'minute')} on {self.machine}" * (self.minutes > 0)
        return f"{steps}, about {self.epochs:.2g} epochs{time}"


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
    minutes = 0 if gpus else max(round(steps * per_step / (TOKENS_PER_CORE_S * cores * 60)), 1)
    machine = numbered(gpus, "GPU") if gpus else numbered(cores, "CPU core")
    epochs = steps * per_step / max(num_tokens, 1)
    return Scale(machine, gpus > 0, batch, seq_len, steps, epochs, minutes)


def look_at(path: str) -> Corpus:
    """Find out how the files at a path hold text, and how much.

    Raises:
        ConfigError: if they hold none, or tokens, or conversations.
    """
    kind, path, files = _find_files(path)
    source = Source(dataset=kind, dataset_path=path)
    if kind == "text" and len(files) < FEW:
        source = source.model_copy(update={"dataset_separator": _separator(files)})
    elif kind != "text":
        source = source.model_copy(update={"dataset_column": _column(kind, files[0])})
    entry = Entry("training", kind, source)
    texts, is_all = _sample(entry, files)
    check(bool(texts), "--from", path, "holds no text", "name the files that do")
    size = sum(len(text.encode()) for text in texts)
    whole = size if is_all else sum(_text_bytes(file) for file in files)
    is_per_file = kind == "text" and not source.dataset_separator
    count = len(files) if is_per_file else math.ceil(whole / size * len(texts))
    held_out = 0.2 if count < 1000 else 0.05 if count < 20_000 else 0.01
    aside = [text for text in texts if is_on_side(Entry("", "", source, held_out, True), text)]
    preset = load_config([PRESET])
    tokenizer = build_tokenizer(preset.model.tokenizer_path)
    part = "".join(texts)[:TOKENISED_BYTES]
    num_tokens = round(whole * len(tokenizer.encode(part)) / len(part.encode()))
    sample = preset.training.seq_len + 1
    rule = f"holds {numbered(num_tokens, 'token')}, and a sequence of the preset takes {sample}"
    check(num_tokens >= 2 * sample, "--from", path, rule, "add texts")
    is_one_side = is_all and len(aside) in (0, len(texts))
    if count < FEW or is_one_side or held_out * num_tokens < LEAST_SAMPLES * sample:
        held_out = 0.0
    share = sum(len(text.encode()) for text in aside) / size if is_all and held_out else held_out
    to_train = round(num_tokens * (1 - share))
    others = by_suffix(left_out(path, [file.path for file in files]))
    return Corpus(source, len(files), count, num_tokens, held_out, to_train, others)


def _find_files(path: str) -> tuple[str, str, list[DataFile]]:
    """Return how the files at a path hold text, the path or a glob of them, and those that are not
    empty."""
    if os.path.isdir(path):
        found = {kind: resolve(path, SUFFIXES[kind]) for kind in ROW_FORMATS}
        others = by_suffix(left_out(path, []))
        if not any(found.values()) and others and "." in others[0]:  # as of a folder of .py
            path = os.path.join(path, "**", f"*{others[0].split()[1]}")
            found["text"] = resolve(path, ())
        kind = max(found, key=lambda kind: sum(file.size for file in found[kind]))
        files = found[kind]
    else:
        files = resolve(path, ())
        first = files[0].path if files else path
        kind = next((kind for kind in SUFFIXES if first.endswith(SUFFIXES[kind])), "text")
    check(kind in ROW_FORMATS, "--from", path, "holds tokens", "see docs/data.md for such files")
    fix = "name a file, a folder or a glob of texts, JSON, Parquet or Arrow"
    fix += "; names that begin with . or _ are left out"
    fix = fix if files or os.path.exists(path.split("*")[0]) else where_it_ends(path)
    files = [file for file in files if file.size]
    check(bool(files), "--from", path, "no text is there", fix)
    check_downloaded(files, "--from")
    rule, fix = "is a table, not texts", "write its rows as JSON lines, as docs/data.md#csv does"
    check(not files[0].path.endswith((".csv", ".tsv")), "--from", path, rule, fix)
    return kind, path, files


def _separator(files: list[DataFile]) -> str:
    """Return the words between the documents of a few files; "": each is one."""
    head = b""
    with suppress(OSError):  # of a damaged file, which its reader names
        head = next(chunks(max(files, key=lambda file: file.size)), b"")
    for separator in ("<|endoftext|>", "\n\n", "\n"):
        if head.count(separator.encode()) * len(files) >= FEW:
            return separator
    return ""


def _column(kind: str, file: DataFile) -> str:
    """Return the column with the text: "text", or the longest of the first row that has some."""
    for _, place, row in itertools.islice(read(Range(file), Layout(kind)), LOOKED_AT):
        if isinstance(row, str):
            raise ConfigError("", f"{place}: {row}\n  fix: correct it, or name other files")
        if isinstance(row.get("text"), str):
            return "text"
        texts = {key: value for key, value in row.items() if isinstance(value, str) and value}
        if any(isinstance(value, list) for value in row.values()):
            rule = f"its rows are no texts, but hold {', '.join(row)}"
            fix = "for conversations, begin with the preset fine_tune (docs/fine_tuning.md)"
            raise config_error("--from", file.path, rule, fix)
        if texts and row.get("text", "") is not None:  # null: another row may have it
            return max(texts, key=lambda key: len(texts[key]))
    fix = "name files whose rows hold text"
    raise config_error("--from", file.path, "no column holds text", fix)


def _sample(entry: Entry, files: list[DataFile]) -> tuple[list[str], bool]:
    """Return the first documents, and whether they are all."""
    documents = LocalDocuments(entry, files)
    items = itertools.chain.from_iterable(map(documents.read_part, range(documents.parts)))
    texts, size = list[str](), 0
    for item in items:
        if isinstance(item, RecordError) and entry.name == "text":  # rows may lack theirs
            what, fix = str(item).partition(" (training.")[0], "name other files, or correct it"
            raise ConfigError("", f"{what}\n  fix: {fix} (iconv makes UTF-8 of other text)")
        if isinstance(item, str) and item:
            texts.append(well_formed(item))
            size += len(item)
        if size > SAMPLE_BYTES:
            return texts, False
    return texts, True


def _text_bytes(file: DataFile) -> int:
    is_packed = file.path.endswith((*PACKED, ".parquet"))
    return file.size * (PACKED_BY if is_packed else 1)


def _toml(out: Path, corpus: Corpus | None, scale: Scale) -> Iterator[str]:
    """Yield the lines of the TOML."""
    yield f"# A first job, for {scale.machine}. All keys: meshwright config --help"
    yield _line("extends", PRESET, "a preset; meshwright config --presets lists them")
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
