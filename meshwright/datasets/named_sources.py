"""The sources that a config gives. Free of torch and numpy."""

import glob
import json
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from meshwright.config.changes import shown
from meshwright.config.job_config import JobConfig, Model
from meshwright.config.training import Source, Training, Validation, WeightedSource
from meshwright.datasets.conversations import FORMATS, Format
from meshwright.datasets.data_file import DataFile, is_address
from meshwright.datasets.file_kinds import TABLE_FIX, TABLES, check_kind
from meshwright.datasets.files import ROW_FORMATS, SUFFIXES, Range, SourceEntry
from meshwright.datasets.readers import Layout, read
from meshwright.datasets.rows import LocalDocuments, RowReader
from meshwright.datasets.sources import DATASETS, DatasetSpec, find_dataset
from meshwright.datasets.sympy_source import version_note
from meshwright.datasets.tables import Row
from meshwright.datasets.tokenizers.kinds import Tokenizer, find_template, prompt_tokens
from meshwright.system import errors

SPLITS = ("train", "validation")
"""Of a dataset without a path."""


def entries(section: Training | Validation, key: str) -> list[SourceEntry]:
    """Return the sources of `[key]`: those in its list, or the one that it is itself."""
    named, held_out = list(section.datasets), getattr(section, "validation_fraction", 0.0)
    if not named:
        return [SourceEntry(key, section.dataset, _source(section), held_out)]
    parts = []
    for number, part in enumerate(named):
        name, place = part.name or part.dataset, f"{key}.datasets.{number}"
        entry = SourceEntry(place, name, _source(part), held_out)
        if isinstance(part, WeightedSource):
            weight = part.weight or part.tokens or 1
            entry = replace(entry, weight=weight, loss_weight=part.loss_weight)
        parts.append(entry)
    return parts


def with_options(entry: SourceEntry, config: JobConfig) -> SourceEntry:
    """Return a source with the options that the config gives for its dataset and its format."""
    tables, source = config.options.model_dump(mode="json"), entry.source
    written = {name: json.dumps(table, sort_keys=True) for name, table in tables.items() if table}
    of_format = written.get(source.dataset_format, "")
    return replace(entry, options=written.get(source.dataset, ""), format_options=of_format)


def validation_entries(config: JobConfig) -> list[SourceEntry]:
    """Return the sources of the validation, none if there is none: its own, or the parts of the
    training's that are held out."""
    if not config.validation.enable:
        return []
    if not config.training.validation_fraction:
        return entries(config.validation, "validation")
    return [replace(entry, is_held_out=True) for entry in entries(config.training, "training")]


def validation_note(config: JobConfig) -> str:
    """Return a note if validation reads none of the datasets that training reads, or a file that
    training reads as well; or ""."""
    training, held_out = entries(config.training, ""), validation_entries(config)
    if not held_out:
        return ""
    trained, tried = ({entry.source.dataset for entry in some} for some in (training, held_out))
    if tried and not trained & tried:
        names = (", ".join(sorted(some)) for some in (tried, trained))
        return "validation reads {}, and training {}".format(*names)
    if config.training.validation_fraction:
        return ""
    whole = [e for e in training if not (e.source.dataset_where or e.source.max_documents)]
    paths = ([p for e in some for p in local_paths(e)] for some in (whole, held_out))
    ours, theirs = ({*map(os.path.realpath, some)} for some in paths)  # links may lead to one file
    shared = sorted(ours & theirs)
    count = errors.numbered(len(shared), "file")
    return f"training reads {count} of the validation as well: {shared[0]}" if shared else ""


def sympy_note(config: JobConfig) -> str:
    """Return a note if the docs' losses are of another version of sympy's source, and the job reads
    that; or ""."""
    sources = [*entries(config.training, ""), *validation_entries(config)]
    has_it = any(entry.source.dataset == "sympy_source" for entry in sources)
    return version_note() if has_it else ""


def _source(keys: Source) -> Source:
    """Return only the keys that say where text comes from, which the section has validated."""
    return Source.model_construct(**{name: getattr(keys, name) for name in Source.model_fields})


def is_streamed(entry: SourceEntry) -> bool:
    """Return whether its tokens aren't kept."""
    spec, mode = find_dataset(entry.source.dataset), entry.source.dataset_mode
    if spec is None:  # `check_sources` rejects it
        return False
    return spec.is_of_hub if mode == "auto" else mode == "streamed"


def local_paths(entry: SourceEntry) -> list[str]:
    """Return the paths of the files of a source on this machine's disks; none of the hub's."""
    spec = find_dataset(entry.source.dataset)
    if spec is None or spec.is_of_hub or is_address(entry.source.dataset_path):
        return []
    return [file.path for file in spec.find(entry)]


def check_sources(section: Training | Validation, key: str) -> None:
    """Check that datasets are known and have their own names, and that their keys suit them."""
    is_single = "dataset" in section.model_fields_set and section.dataset
    errors.check(
        not (section.datasets and is_single),
        f"{key}.dataset",
        section.dataset,
        f"is given together with [[{key}.datasets]]",
        "leave out one of the two",
    )
    names = set[str]()
    for entry in entries(section, key):
        name = entry.source.dataset
        spec = find_dataset(name)
        if spec is None:
            fix = f'{errors.did_you_mean(name, DATASETS)} (one of the hub is written "owner/name")'
            raise entry.unknown("dataset", "no such dataset", fix)
        check_path(entry, spec)
        if getattr(section, "packing", "cut") != "cut" and is_streamed(entry):
            rule = f"{entry.name} is streamed, so the lengths of its documents are not known"
            fix = f'set {entry.key}.dataset_mode = "cached", or leave packing out'
            raise errors.config_error("training.packing", "best_fit", rule, fix)
        rule = "another dataset has this name"
        errors.check(
            entry.name not in names, f"{entry.key}.name", entry.name, rule, "give it another"
        )
        names.add(entry.name)


def check_files(entry: SourceEntry, max_bad_records: int = 0) -> None:
    """Check that the local files of a source are there, and their first rows, unless some records
    may be bad; `check_path` has the rest."""
    source, spec = entry.source, find_dataset(entry.source.dataset)
    if spec is None or not source.dataset_path:
        return
    if spec.path == "required":
        spec.listed(entry)
    elif not Path(source.dataset_path).exists():
        fix = errors.where_it_ends(source.dataset_path)
        raise entry.error("dataset_path", "no such file or folder", fix)
    files = spec.find(entry) if source.dataset in ROW_FORMATS else []
    check_kind(files, f"{entry.key}.dataset_path")
    if files and not max_bad_records and (fault := head_fault(entry, files)) is not None:
        file = next((file for file in files if str(fault).startswith(file.path)), None)
        what, _, fix = str(fault).partition(errors.FIX)
        raise errors.RecordError(
            fault.key, f"{what}{errors.FIX}{fix or _fix_of(fault, entry, file)}"
        )


CHAT_COLUMNS = {
    "messages": {"messages"},
    "sharegpt": {"conversations"},
    "alpaca": {"instruction", "output"},
}
"""The columns by which rows of conversations are known, by their `dataset_format`."""


def _fix_of(fault: errors.RecordError, entry: SourceEntry, file: DataFile | None) -> str:
    """Return advice on the fault of a first row.

    Args:
        file: that it is in; None if it names none.
    """
    source, path = entry.source, file.path if file else ""
    if fault.key.endswith("dataset_where"):
        return "correct the condition, or leave it out"
    if "not a JSON object" in str(fault):
        return 'write lines like {"text": "..."}'
    kinds = (kind for kind in ROW_FORMATS if path.endswith(SUFFIXES[kind]))
    if (kind := next(kinds, source.dataset)) != source.dataset:
        return f'set {entry.key}.dataset = "{kind}"'
    if path.endswith(TABLES):
        return TABLE_FIX
    if "cannot be read: longer than" in str(fault):
        if kind == "json":
            return f"make lines of it: jq -c '.[]' {shlex.quote(path)} > rows.jsonl"
        return f"set {entry.key}.dataset_separator to the words between its documents"
    if file is not None and ("no column" in str(fault) or source.dataset_format in CHAT_COLUMNS):
        _, _, row = next(read(Range(file), Layout(kind)))
        if isinstance(row, dict) and (fix := _fix_of_columns(row, entry, path)):
            return fix
    return "correct it, or set training.max_bad_records to pass over such records"


def _fix_of_columns(row: Row, entry: SourceEntry, path: str) -> str:
    """Return advice on a first row by its columns; "" if they are those of its format."""
    given = entry.source.dataset_format
    fits = [name for name, columns in CHAT_COLUMNS.items() if columns <= row.keys()]
    if given and given in fits:
        return ""
    if fits or given:
        name = fits[0] if fits else "file.py:function"
        return f'set {entry.key}.dataset_format = "{name}", as docs/fine_tuning.md does'
    lists = [key for key, value in row.items() if isinstance(value, list)]
    if lists and entry.source.dataset == "json":
        return f"make lines of a list: jq -c '.{lists[0]}[]' {shlex.quote(path)} > rows.jsonl"
    return f"set {entry.key}.dataset_column"


MOST_HEADS = 64


def head_fault(entry: SourceEntry, files: Sequence[DataFile]) -> errors.RecordError | None:
    """Read the first row of some of `files`, evenly spread, and return the first error."""
    if not any(file.size for file in files):
        return entry.record_error("dataset_path", f"{files[0].path}: is empty")
    heads = files[:: -(-len(files) // MOST_HEADS)]
    documents = LocalDocuments(entry, heads)
    for number in range(len(heads)):
        item = next(documents.read(number, len(heads)), None)
        if isinstance(item, errors.RecordError):
            return item
    return None


class SourceRule(NamedTuple):
    """A row of a table: what no source may have. In its text, {name} is the dataset, and {table}
    the table of the config."""

    key: str
    """That is at fault."""
    broken: Callable[[Source, DatasetSpec], object]
    says: str
    fix: str = "leave it out"


SOURCE_RULES = (
    SourceRule(
        "dataset_path",
        lambda source, spec: spec.path == "required" and not source.dataset_path,
        "{name} needs it",
        "name a file, a folder or a glob",
    ),
    SourceRule(
        "dataset_path",
        lambda source, spec: spec.path == "none" and source.dataset_path,
        "{name} reads no path",
    ),
    SourceRule(
        "dataset_path",
        lambda source, spec: spec.is_of_hub and glob.has_magic(source.dataset_path),
        "a copy of a Hub dataset cannot be read from a folder with *, ? or [ in its path",
        "rename the folder",
    ),
    SourceRule(
        "dataset_mode",
        lambda source, spec: spec.has_tokens and source.dataset_mode == "streamed",
        "tokens are read where they lie",
    ),
    SourceRule(
        "dataset_subset",
        lambda source, spec: source.dataset_subset and not spec.is_of_hub,
        "{name} has no subsets",
    ),
    SourceRule(
        "dataset_revision",
        lambda source, spec: source.dataset_revision and not spec.is_of_hub,
        "{name} has no revisions",
    ),
    SourceRule(
        "dataset_revision",
        lambda source, spec: source.dataset_revision and source.dataset_path,
        "a local copy has no revisions",
    ),
    SourceRule(
        "dataset_split",
        lambda source, spec: spec.path == "none" and source.dataset_split not in SPLITS,
        "{name} has only train and validation",
        'set {table}.dataset_split = "train"',
    ),
    SourceRule(
        "dataset_split",
        lambda source, spec: spec.path == "required" and source.dataset_split != "train",
        "{name} has only train",
        'set {table}.dataset_split = "train"',
    ),
    SourceRule(
        "dataset_where",
        lambda source, spec: source.dataset_where and not spec.has_rows,
        "{name} has no rows",
    ),
    SourceRule(
        "dataset_separator",
        lambda source, spec: source.dataset_separator and source.dataset != "text",
        '{name} is not "text"',
    ),
    SourceRule(
        "max_documents",
        lambda source, spec: source.max_documents and spec.has_tokens,
        "{name} holds tokens, which are read where they lie",
        "leave it out, or bound training.steps",
    ),
)
"""What the keys of a source must keep to; the first that is broken is reported."""


def check_path(entry: SourceEntry, spec: DatasetSpec) -> None:
    """Check that path, subset, split and filters suit the dataset."""
    source = entry.source
    for rule in SOURCE_RULES:
        if rule.broken(source, spec):
            names = {"name": f"dataset {source.dataset!r}", "table": entry.key}
            raise entry.error(rule.key, rule.says.format(**names), rule.fix.format(**names))
    errors.check(
        not entry.held_out or spec.has_rows or source.dataset == "sympy_source",
        "training.validation_fraction",
        entry.held_out,
        f"dataset {source.dataset!r} has no rows that could be held out",
        "name a dataset in [validation] instead",
    )
    if spec.has_rows or source.dataset_format:
        RowReader(entry)


def no_end(tokenizer: Tokenizer, model: Model) -> str:
    """Return a note if the tokenizer has no EOS, and the config doesn't ask for that; or ""."""
    if tokenizer.eos_id is not None or model.eos_token is not None:
        return ""
    return "the tokenizer has no EOS, the token that ends a document; see model.eos_token"


def tokenizer_notes(tokenizer: Tokenizer, config: JobConfig) -> list[str]:
    """Return sentences on the limits of a tokenizer."""
    notes = [no_end(tokenizer, config.model)]
    if tokenizer.loses_text:
        notes.append(
            "the tokenizer lacks tokens for some characters: `meshwright tokenize` counts those of "
            "your data that vanish or become unknown"
        )
    if config.validation.enable and tokenizer.token_bytes is None:
        notes.append(
            "the tokenizer doesn't tell how many bytes a token stands for, so validations have "
            "loss and perplexity, but no bits per byte"
        )
    return notes


def check_mixture(sources: Sequence[WeightedSource]) -> None:
    """Each part of a mixture has a weight, or each has a budget."""
    for number, source in enumerate(sources):
        key, has_tokens = f"training.datasets.{number}", source.tokens is not None
        if (source.weight is not None) == has_tokens:
            what = "has both weight and tokens" if has_tokens else "has neither weight nor tokens"
            raise errors.ConfigError(key, f"{key}: {what}\n  fix: give one of the two")
        if has_tokens != (sources[0].tokens is not None):
            fix = "give all the same of the two"
            raise errors.ConfigError(key, f"{key}: weights and tokens are mixed\n  fix: {fix}")


def check_template(training: Training, model: Model) -> None:
    """Check that there is a chat template, if a format of the data makes conversations."""
    formats = (FORMATS.get(one.source.dataset_format) for one in entries(training, "training"))
    if any(isinstance(one, Format) for one in formats):
        find_template(model.tokenizer_path, model.chat_template_path)


def check_budgets(training: Training) -> None:
    """The job takes no more tokens than its sources are to give."""
    budget = sum(source.tokens or 0 for source in training.datasets)
    per_step = training.global_batch_size * training.seq_len
    errors.check(
        budget == 0 or training.steps * per_step <= budget,
        "training.steps",
        training.steps,
        f"takes {training.steps * per_step:,} tokens, but training.datasets give {budget:,}",
        f"set it to {budget // per_step}, or raise their tokens",
    )


def check_sample_prompts(validation: Validation, tokenizer: Tokenizer, seq_len: int) -> None:
    """Each prompt is another, has a token, and fits a sequence with the tokens that follow it."""
    for number, prompt in enumerate(validation.sample_prompts):
        key, length = f"validation.sample_prompts.{number}", len(prompt_tokens(tokenizer, prompt))
        is_new = prompt not in validation.sample_prompts[:number]
        errors.check(
            is_new, key, prompt, "is there already, and gives the same text", "write it once"
        )
        errors.check(
            length > 0, key, prompt, "is no token, and the tokenizer has no BOS", "write a text"
        )
        errors.check(
            length + validation.sample_tokens <= seq_len,
            key,
            prompt,
            f"its {length} tokens and validation.sample_tokens = {validation.sample_tokens} are "
            f"more than training.seq_len = {seq_len}",
            "shorten it, or lower validation.sample_tokens",
        )


def check_validation(config: JobConfig) -> None:
    """Check that the validation has one source of documents, its own or the training's; and that
    it is known how much that is, if all of it is to be read."""
    validation, fraction = config.validation, config.training.validation_fraction
    own = {"dataset", "dataset_path"} & validation.model_fields_set if validation.dataset else None
    errors.check(
        not (fraction and validation.enable and (own or validation.datasets)),
        "training.validation_fraction",
        fraction,
        "is given together with a dataset of [validation]",
        "leave out one of the two (training.validation_fraction = 0 if a TOML that is extended "
        "gives it)",
    )
    if validation.enable and not fraction:
        check_sources(validation, "validation")
    streamed = [entry.name for entry in validation_entries(config) if is_streamed(entry)]
    count = validation.num_samples
    errors.check(
        count > 0 or (count == -1 and not streamed),
        "validation.num_samples",
        count,
        f"{streamed[0]} is streamed: it has no known end" if streamed else "must be positive or -1",
        "set a number of sequences",
    )


def idle_source_options(config: JobConfig) -> Iterator[str]:
    """Say which keys differ from their default and have no effect, and why."""
    training, held_out = entries(config.training, "training"), validation_entries(config)
    idle, have_rows = list[tuple[str, BaseModel, str, str]](), False
    sources = [*training, *held_out]
    for entry in sources:
        spec = find_dataset(entry.source.dataset)
        assert spec is not None  # check_sources has looked
        keys, why = ["dataset_column", "dataset_format"], "has no rows"
        if spec.has_tokens:
            why = "holds tokens"
        elif spec.path != "none":
            have_rows, why = True, "is read by dataset_format"
            keys = keys[:1] if entry.source.dataset_format else []
        idle += [(entry.key, entry.source, key, f"{entry.name} {why}") for key in keys]
    if not have_rows:
        idle.append(("model", config.model, "chat_template_path", "no source has conversations"))
    if not any(map(is_streamed, training)):
        why, keys = "no source is streamed", ["shuffle_window", "stream_shards"]
        idle += [("training", config.training, key, why) for key in keys]
    if not any(is_address(entry.source.dataset_path) for entry in sources):
        idle.append(("training", config.training, "block_cache_gib", "no source has an address"))
    if all(map(is_streamed, sources)):
        why = "every source is streamed"
        idle.append(("training", config.training, "token_cache_folder", why))
    for table, section, key, why in idle:
        value = getattr(section, key)
        if value != type(section).model_fields[key].default:
            yield f"{table}.{key} = {shown(value)} has no effect: {why}"
