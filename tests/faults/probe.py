"""Run the case of a fault in whatever package is imported, and print its failures as JSON."""

import json
import sys

from meshwright.commands.prove.cases import build_case
from meshwright.commands.prove.prove import prove
from meshwright.commands.prove.shrink import shrink
from meshwright.config.loader import load_config
from meshwright.train.resolve_model import resolve_model
from tests.faults.catalogue import FAULTS


def main() -> None:
    """Take the fault's name from the command line."""
    (fault,) = (fault for fault in FAULTS if fault.name == sys.argv[1])
    config = load_config(["debug_model", *fault.words])
    _, args = resolve_model(config)
    small = shrink(config, args)
    case = build_case(
        fault.name, small, fault.mesh, num_microbatches=fault.num_microbatches, kind=fault.kind
    )
    (row,) = prove(small, [case])
    print(json.dumps(row.verdict.failures))


if __name__ == "__main__":
    main()
