"""`meshwright tokenize`: make the token caches of a job ahead of it."""

import argparse
from collections.abc import Sequence

from meshwright.config.loader import config_errors, load_config
from meshwright.datasets.opening import StreamedSource, open_training_data, open_validation_data
from meshwright.errors import check
from meshwright.log import log_to_console, logger
from meshwright.preflight import check_data


def main(arguments: Sequence[str]) -> None:
    """Tokenise what the job reads and is not tokenised yet.

    Raises:
        ConfigError: if the config is wrong or its data cannot be read.
    """
    parser = argparse.ArgumentParser("meshwright tokenize", allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: one a core")
    parser.add_argument("--verify", action="store_true", help="read every byte, mend what is wrong")
    parser.add_argument("--quiet", action="store_true", help="say nothing of what is there")
    given, overrides = parser.parse_known_args(arguments)
    check(given.workers >= 0, "--workers", given.workers, "must be 0 or more")
    log_to_console()
    config, provenance = load_config(overrides)
    with config_errors(provenance):
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
