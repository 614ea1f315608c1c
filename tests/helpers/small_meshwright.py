"""`meshwright` for the tests of pages: each command as it is printed, with less to compute.

Jobs end after a step or two on at most two ranks, a model that is planned has two layers, and the
checkpoints that a command names are the two of such jobs.
"""

import sys
from collections.abc import Sequence

from meshwright.commands.main import main

FIRST, LAST = "1", "2"
"""Steps of the checkpoints of a job that trains for one step, and then for two."""

BACK = {"--checkpoint.load_step", "--checkpoint.rewind_to"}

FEWER = {
    "--training.steps": LAST,
    "--checkpoint.load_step": FIRST,
    "--checkpoint.rewind_to": FIRST,
    "--steps": f"{FIRST},{LAST}",
    "--ngpu": "2",
}


def small(words: Sequence[str]) -> list[str]:
    """Return the words of the smaller command."""
    name, *rest = words
    for option in FEWER.keys() & rest if name != "check" else ():
        rest[rest.index(option) + 1] = FEWER[option]
    if name == "train" and "--training.steps" not in rest:
        rest.append(f"--training.steps={LAST if BACK & {*rest} else FIRST}")
    if name == "train":
        rest.append("--validation.num_samples=2")
    if name == "plan":
        rest.append("--model.args.n_layers=2")
    return [name, *rest]


if __name__ == "__main__":
    sys.argv[1:] = small(sys.argv[1:])
    main()
