"""`meshwright tokenize`: make the token caches of a job ahead of it."""

import argparse
from collections.abc import Sequence

from meshwright.config.loader import config_errors, load_config
from meshwright.datasets.opening import CachedSource, entries, is_streamed, open_source
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
    options, overrides = parser.parse_known_args(arguments)
    check(options.workers >= 0, "--workers", options.workers, "must be 0 or more")
    log_to_console()
    config, provenance = load_config(overrides)
    with config_errors(provenance):
        check_data(config)
        wanted = entries(config.training, "training")
        if config.validation.enable:
            wanted += entries(config.validation, "validation")
        for entry in wanted:
            if is_streamed(entry):
                if not options.quiet:
                    logger.info("%s: streamed, nothing to do", entry.name)
                continue
            source = open_source(
                entry,
                config.model,
                config.training,
                num_workers=options.workers,
                check_all=options.verify,
            )
            if isinstance(source, CachedSource) and not options.quiet:
                cache = source.cache
                logger.info(
                    "%s: %s tokens of %s documents, %.2f bytes a token, in %s",
                    entry.name,
                    f"{cache.num_tokens:,}",
                    f"{cache.num_documents:,}",
                    cache.num_bytes / cache.num_tokens,
                    cache.folder,
                )
