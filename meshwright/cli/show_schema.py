"""`meshwright schema`: the config's JSON Schema."""

import json
from argparse import Namespace

from meshwright.config.schema import json_schema


def run(given: Namespace) -> None:
    """Print it."""
    print(json.dumps(json_schema(), indent=2))
