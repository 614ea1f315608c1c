"""`meshwright data`: the data of a job, its samples as text, the caches of tokens; and
`meshwright tokenize`, which makes them."""

import sys
from argparse import Namespace

from meshwright.commands.options import add_stage, check_named, of_stage
from meshwright.config.command_line import Parser
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import read
from meshwright.config.rules import broken_rules
from meshwright.config.stages import staged
from meshwright.datasets.tokenizers.kinds import Tokenizer
from meshwright.system.errors import Mistakes, check
from meshwright.system.log import log_to_console, logger
from meshwright.train.facts import look_at_data
from meshwright.train.rules import DATA


def add_options(parser: Parser) -> None:
    views = parser.add_mutually_exclusive_group()
    views.add_argument("--step", type=int, metavar="N", help="print the samples of step N as text")
    views.add_argument(
        "--samples",
        nargs=3,
        metavar=("NAME", "FIRST", "LAST"),
        help="print samples FIRST to LAST of a source, as skipped_steps.jsonl lists them",
    )
    views.add_argument(
        "--documents",
        nargs=2,
        metavar=("NAME", "NUMBER"),
        help="print a document of a source, and the file and row it comes from",
    )
    views.add_argument("--caches", action="store_true", help="list the token caches")
    views.add_argument("--remove", metavar="NAME", help="remove this token cache")
    add_stage(parser)


def run(given: Namespace) -> None:
    """Describe the data of a job; print some of its samples; list or remove caches.

    Raises:
        ConfigError: if the config is wrong, its data can't be read, or there is no such cache.
    """
    whole = read(given).config()
    config = of_stage(whole, given.stage)
    if given.step is not None:
        last, more = config.training.steps, given.stage < len(whole.training.stages)
        fix = f"--stage {given.stage + 1} has later ones" if more else ""
        check(1 <= given.step <= last, "--step", given.step, f"is not from 1 to {last}", fix)
    if given.remove is None and not given.caches:
        _say_first(given)
    # not at the top: numpy takes as long as all before
    from meshwright.commands import data_views as views
    from meshwright.datasets.opening import open_data

    if given.remove is not None:
        views.remove(config, given.remove)
        return
    if given.caches:
        if has_job := bool(config.model.tokenizer_type or config.model.tokenizer_path):
            check_data(config)
        views.print_caches(config, has_job=has_job)
        return
    tokenizer = check_data(config)
    log_to_console()
    sources = open_data("training", config)
    if given.samples is not None:
        found = views.of_source(config, sources, given.stage, *given.samples)
        views.print_samples(found, tokenizer)
    elif given.documents is not None:
        views.print_document(config, sources, tokenizer, *given.documents)
    elif given.step is not None:
        views.print_samples(views.of_step(config, sources, given.step, given.stage), tokenizer)
    else:
        before = of_stage(whole, given.stage - 1).training.steps if given.stage > 1 else 0
        views.print_overview(config, sources, config.training.steps - before)


def check_data(config: JobConfig) -> Tokenizer:
    """Return the tokenizer; raise `ConfigError` for everything that is wrong with the data."""
    facts, mistakes = look_at_data(config), Mistakes()
    mistakes.errors += [*facts.faults, *broken_rules(config, facts, DATA)]
    mistakes.check()
    assert facts.tokenizer is not None
    return facts.tokenizer


def _say_first(given: Namespace) -> None:
    """Print what follows: imports, and many files, take a while. stdout is for the data only."""
    check_named(given.config or given.overrides)
    print(f"reading the data of {given.config or 'a job'} ...", file=sys.stderr, flush=True)


def add_options_tokenize(parser: Parser) -> None:
    parser.add_argument(
        "--workers", type=int, metavar="N", default=0, help="processes (default: one per core)"
    )
    parser.add_argument(
        "--verify", action="store_true", help="check every byte of the cache and repair damage"
    )


def run_tokenize(given: Namespace) -> None:
    """Tokenize the job's data that isn't tokenized yet.

    Raises:
        ConfigError: if the config is wrong or its data can't be read.
    """
    check(given.workers >= 0, "--workers", given.workers, "must be 0 or more")
    log_to_console()
    configs = staged(read(given).config())
    _say_first(given)
    # not at the top: see `run`
    from meshwright.datasets.opening import open_data
    from meshwright.datasets.shards import StreamedSource

    options, sources = {"num_workers": given.workers, "check_all": given.verify}, []
    for config in configs:
        check_data(config)
        sources += open_data("training", config, **options)
        if config is configs[0] or config.training.validation_fraction:  # a part of its own data
            sources += open_data("validation", config, **options)
    for source in sources:
        if isinstance(source, StreamedSource):
            logger.info("%s: streamed, %d shards", source.entry.name, source.num_shards)
            continue
        cache = source.cache
        logger.info(
            "%s: %s tokens of %s documents, %.2f bytes a token, in %s",
            source.entry.name,
            f"{cache.num_tokens:,}",
            f"{cache.num_documents:,}",
            cache.num_bytes / cache.num_tokens,
            cache.folder,
        )
        if cache.loss_line:
            logger.warning("%s: %s", source.entry.name, cache.loss_line)
