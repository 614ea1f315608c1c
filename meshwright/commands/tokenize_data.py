"""`meshwright tokenize`: make the token caches of a job ahead of it."""

from argparse import Namespace

from meshwright.config.command_line import Parser
from meshwright.config.loader import load_given
from meshwright.datasets.opening import StreamedSource, open_training_data, open_validation_data
from meshwright.system.errors import check
from meshwright.system.log import log_to_console, logger
from meshwright.train.preflight import check_data


def add_options(parser: Parser) -> None:
    """Options of `meshwright tokenize`."""
    parser.add_argument(
        "--workers", type=int, metavar="N", default=0, help="processes (default: one per core)"
    )
    parser.add_argument("--verify", action="store_true", help="read every byte, repair damage")
    parser.add_argument("--quiet", action="store_true", help="print nothing for existing caches")


def run(given: Namespace) -> None:
    """Tokenise the job's data that is not tokenised yet.

    Raises:
        ConfigError: if the config is wrong or its data cannot be read.
    """
    check(given.workers >= 0, "--workers", given.workers, "must be 0 or more")
    log_to_console()
    config = load_given(given)
    check_data(config)
    options = {"num_workers": given.workers, "check_all": given.verify}
    sources = open_training_data(config, **options) + open_validation_data(config, **options)
    for source in sources if not given.quiet else ():
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
