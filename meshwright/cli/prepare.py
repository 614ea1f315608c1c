"""Check a job and tokenise its data in one process, for the launcher.

python -m meshwright.cli.prepare RANKS --job.config_file CONFIG [--section.key value ...]
"""

import sys

from meshwright.cli import check_job, tokenize_data
from meshwright.errors import EXIT_CONFIG, ConfigError


def main() -> None:
    """Exit with 2 and a message if the job cannot run."""
    ranks, *config = sys.argv[1:]
    try:
        check_job.main([ranks, *config])
        tokenize_data.main(["--quiet", *config])
    except ConfigError as error:
        print(f"meshwright: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)


if __name__ == "__main__":
    main()
