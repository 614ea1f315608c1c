"""What decides about a job and isn't in its config: this module looks, `resolve` then judges.

Nothing else of a job's checks opens a file. Free of torch.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshwright.checkpoint.conversion.initial_load import check_initial
from meshwright.checkpoint.store import Saved, of_job, select
from meshwright.config.combinations import EXTRAS
from meshwright.config.job_config import JobConfig
from meshwright.config.rules import Facts
from meshwright.config.stages import error_of_stage, staged
from meshwright.datasets.files import SourceEntry
from meshwright.datasets.named_sources import (
    check_files,
    check_template,
    entries,
    is_streamed,
    with_options,
)
from meshwright.datasets.tokenizers.contract import check_contract
from meshwright.datasets.tokenizers.kinds import Tokenizer, build_tokenizer
from meshwright.datasets.tokenizers.special_tokens import tokenizer_keys
from meshwright.models.family import Family
from meshwright.parallelisms.rules.compile_choice import why_no_compiler
from meshwright.system.errors import ConfigError, Mistakes, check
from meshwright.system.machine import why_bf16_is_slow
from meshwright.system.modules import code_of, is_installed
from meshwright.train.losses import own_loss
from meshwright.train.optim.registry import check_schedule
from meshwright.train.resolve_model import (
    check_own_model,
    check_own_parts,
    extend_only_by,
    is_own,
    own_options,
    resolve_model,
)


@dataclass(frozen=True, kw_only=True)
class JobFacts(Facts):
    """The facts that only the trainer knows of."""

    family: Family | None = None
    tokenizer: Tokenizer | None = None
    own_code: str = ""
    """Hash of the module of `experimental.custom_import`, as it runs here; "": there is none."""

    saved: Saved | None = None
    """The checkpoint that the job resumes from."""
    is_inherited: Callable[[str], bool] = lambda key: False
    """Whether a preset gave a key: if it has no effect, the user has nothing to do."""

    faults: tuple[ConfigError, ...] = ()
    """Errors that looking has found."""


def look(config: JobConfig, world_size: int, **known: Any) -> JobFacts:
    """Look at everything but data and checkpoints: the user's own module, the model's dimensions,
    the tokenizer, folders to write to, packages, and this machine.

    Args:
        known: more facts, by name.
    """
    facts, mistakes = JobFacts(world_size=world_size, **known), Mistakes()
    with mistakes.collect():
        check_extensions(config)
        facts = replace(facts, own_code=code_of(config.experimental.custom_import))
    with mistakes.collect():
        family, args = resolve_model(config)
        facts = replace(facts, family=family)
        check_own_model(config, family, args)
        facts = replace(facts, model=args)
    with mistakes.collect():
        facts = replace(facts, tokenizer=_open_tokenizer(config))
    with mistakes.collect():
        check_writable(config)
    asks_cpu = config.training.mixed_precision_param == "auto" and not facts.expects_gpus
    may_compile = config.compile.enable is not False
    return replace(
        facts,
        slow_bf16=why_bf16_is_slow() if asks_cpu else "",
        no_compiler=why_no_compiler(facts.expects_gpus) if may_compile else "",
        missing_packages=missing_packages(),
        faults=tuple(mistakes.errors),
    )


def check_extensions(config: JobConfig) -> None:
    """Take over the tables of the user's module, and try what is in them.

    Raises:
        ConfigError: if an option, or an entry, is wrong.
    """
    extend_only_by(config.experimental.custom_import)
    options = own_options(config)
    check_schedule(config, options)
    own_loss(config, options)
    check_own_parts(config, options)


def missing_packages() -> frozenset[str]:
    """Return the optional packages that aren't installed."""
    return frozenset(name for name in EXTRAS if not is_installed(name))


def look_at_files(config: JobConfig, facts: JobFacts) -> JobFacts:
    """Look at the first rows of the data too, and at the checkpoint to resume from, or the weights
    to start from. The ranks of a job leave it to the first, once they can talk."""
    mistakes, checkpoint, saved = Mistakes(), config.checkpoint, None
    with mistakes.collect():
        _look_at_sources(config)
    with mistakes.collect():
        folder = Path(config.job.dump_folder) / checkpoint.folder
        place, candidates = of_job(folder, checkpoint)
        if candidates:
            saved = select(place, candidates)
        elif facts.model is not None and facts.family is not None:
            is_tie_given = config.model.gives_tie
            check_initial(checkpoint, facts.model, facts.family, is_tie_given=is_tie_given)
    return replace(facts, saved=saved, faults=(*facts.faults, *mistakes.errors))


def look_at_data(config: JobConfig) -> JobFacts:
    """Look at the tokenizer and the first rows of the data, for a command that trains nothing."""
    facts, mistakes = JobFacts(), Mistakes()
    with mistakes.collect():
        extend_only_by(config.experimental.custom_import)
        facts = replace(facts, tokenizer=_open_tokenizer(config))
    with mistakes.collect():
        _look_at_sources(config)
    return replace(facts, faults=tuple(mistakes.errors))


def _open_tokenizer(config: JobConfig) -> Tokenizer:
    """Return the tokenizer; raise `ConfigError` if it, or a chat template, can't be read."""
    model = config.model
    keys = tokenizer_keys(config.model_dump(mode="json", include={"model", "options"}))
    tokenizer = build_tokenizer(model.tokenizer_path, keys)
    if keys.name:
        check_contract(tokenizer, keys.name)
    if not hasattr(tokenizer, "encode_conversation"):
        _each_stage(config, lambda one: check_template(one.training, model))
    return tokenizer


def _look_at_sources(config: JobConfig) -> None:
    """Look at the sources of each stage; at the user's own once if stages share them."""
    tried = list[tuple[object, ...]]()
    _each_stage(config, lambda one: _look_at_stage(one, tried))


def _look_at_stage(config: JobConfig, tried: list[tuple[object, ...]]) -> None:
    training, validation = config.training, config.validation
    sources = [*entries(training, "training")]
    if validation.enable and not training.validation_fraction:
        sources += entries(validation, "validation")
    for entry in sources:
        check_files(with_options(entry, config), training.max_bad_records)
        reads = not training.max_bad_records
        alike = replace(with_options(entry, config), key="", weight=1, loss_weight=1)
        what = alike, is_streamed(entry), reads
        if what not in tried:
            tried.append(what)
            _try_own_source(entry, config, reads=reads)


def _try_own_source(entry: SourceEntry, config: JobConfig, *, reads: bool) -> None:
    if is_own("DATASETS", entry.source.dataset):
        # not at the top: it imports what opens data, which other checks don't wait for
        from meshwright.datasets.opening import recipe_of

        recipe_of(entry, config).try_own(streamed=is_streamed(entry), reads=reads)


def _each_stage(config: JobConfig, look_at: Callable[[JobConfig], None]) -> None:
    for number, one in enumerate(staged(config)):
        try:
            look_at(one)
        except ConfigError as error:
            raise error_of_stage(error, config, number) from None


def check_writable(config: JobConfig) -> None:
    """Check that the folders that a job writes to are there, or can be made; leave no trace."""
    dump_folder, checkpoint = Path(config.job.dump_folder), config.checkpoint
    _check_folder("job.dump_folder", config.job.dump_folder, dump_folder)
    if checkpoint.saves:  # its own link may lead to a different file system
        _check_folder("checkpoint.folder", checkpoint.folder, dump_folder / checkpoint.folder)


def _check_folder(key: str, value: str, folder: Path) -> None:
    existing = folder.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    what = "not a" if os.path.exists(existing) else "a link to no"
    is_writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    is_first = os.environ.get("RANK", "0") == "0"  # others would make a folder each, on one server
    if is_writable and is_first and existing != folder.absolute():
        try:  # permissions don't tell: /proc takes no folder, nor does a quota that is used up
            TemporaryDirectory(dir=existing).cleanup()
        except OSError:
            is_writable = False
    check(
        is_writable,
        key,
        value,
        f"{existing} is {what} folder that can be written to",
        "choose a different folder",
    )
