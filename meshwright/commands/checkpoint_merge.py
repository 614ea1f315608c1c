"""`meshwright checkpoint merge`: a weighted mean of the weights of several steps."""

import math
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

from meshwright.checkpoint import listing
from meshwright.checkpoint.index import SavedTensor, read_saved_tensors
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.store import Saved, list_checkpoints, no_checkpoint, open_checkpoint
from meshwright.commands.options import input_path, output_folder
from meshwright.config.command_line import Parser
from meshwright.system.errors import check, config_error
from meshwright.system.files import NamedPath

KINDS = "mean, linear, 1-sqrt, ema=0.9, or numbers as 0.25,0.75"


def add_options(parser: Parser) -> None:
    parser.add_argument("run", type=input_path, help="a dump folder, or its folder of checkpoints")
    parser.add_argument("--steps", required=True, help="steps to merge, for example 800,900,1000")
    parser.add_argument("--weights", default="mean", help=f"{KINDS} (default: mean)")
    parser.add_argument(
        "--out", required=True, type=output_folder, help="the folder for the merged checkpoint"
    )


def run(given: Namespace) -> None:
    """Merge, and print the weight of each step.

    Raises:
        ConfigError: if the steps can't be merged, or the weights are none; before any tensor is
            read.
    """
    steps = _steps(given.steps)
    shares = shares_of(given.weights, len(steps))
    place = NamedPath("RUN", given.run)
    folders = _folders(place, steps)
    out = given.out.absolute()
    final = listing.step_folder(out, steps[-1])
    target = NamedPath("--out", given.out)
    target.check(not final.exists(), f"{final} is there", "choose a different folder")
    rule = f"is inside of {given.run}, where a job's checkpoints are looked for"
    target.check(not out.is_relative_to(given.run.absolute()), rule, "name a folder elsewhere")
    print(f"merging {len(steps)} checkpoints of {given.run} ...", flush=True)
    with ExitStack() as held:
        parts = [held.enter_context(open_checkpoint(folder, print)) for folder in folders]
        tensors = common_tensors(parts)
        # not at the top: torch takes a second
        from meshwright.checkpoint.merge import merge

        made = merge(parts, shares, tensors, out)
    for step, share in zip(steps, shares, strict=True):
        print(f"step {step}: {share:.6g}")
    print(f"{len(tensors)} tensors: {made}")


def _steps(text: str) -> list[int]:
    words = text.split(",")
    steps = [int(word) for word in words if re.fullmatch(r"0|[1-9]\d{0,17}", word)]
    # their order is the order of the sum
    is_good = len(steps) == len(words) > 1 and all(a < b for a, b in pairwise(steps))
    rule = "must be two steps or more, in ascending order, with commas between"
    check(is_good, "--steps", text, rule, "write 800,900,1000")
    return steps


def shares_of(text: str, count: int) -> list[float]:
    """Return the weight of each of `count` steps, the oldest first; they sum to one.

    mean: 1/n. linear: i-th of n in proportion to i. 1-sqrt: sqrt(i/n) - sqrt((i-1)/n), by which
    steps at a constant rate count as if it had decayed as 1 - sqrt does (Tian et al. 2025,
    arXiv:2507.17634, where the mean stands for a linear decay). ema=B: of an EMA from the
    oldest on, B^(n-1) for that and (1-B) B^(n-i) for the others.

    Raises:
        ConfigError: if `text` means none.
    """
    numbers = range(1, count + 1)
    if text == "mean":
        return [1 / count] * count
    if text == "linear":
        return [i / sum(numbers) for i in numbers]
    if text == "1-sqrt":
        return [math.sqrt(i / count) - math.sqrt((i - 1) / count) for i in numbers]
    name, _, number = text.partition("=")
    try:
        given = [float(word) for word in (number if name == "ema" else text).split(",")]
    except ValueError:
        raise config_error("--weights", text, "not understood", f"write {KINDS}") from None
    if name == "ema":
        decay, *others = given
        rule = "one decay between 0 and 1 is needed"
        check(not others and 0 < decay < 1, "--weights", text, rule, "write ema=0.9")
        return [decay ** (count - 1), *((1 - decay) * decay ** (count - i) for i in numbers[1:])]
    rule = f"{len(given)} numbers for {count} steps, which sum to {sum(given):g}, not to 1"
    is_good = len(given) == count and abs(math.fsum(given) - 1) < 1e-6
    check(is_good, "--weights", text, rule, "write a number for each, and divide them by their sum")
    return given


def _folders(place: NamedPath, steps: Sequence[int]) -> list[NamedPath]:
    """Return where the checkpoint of each step is."""
    found = {listing.step_of(path.name): path for path in list_checkpoints(place)}
    found.pop(None, None)
    if not found:
        raise no_checkpoint(place)
    missing = ",".join(str(step) for step in steps if step not in found)
    rule = f"not among the checkpoints in {place.path}"
    check(not missing, "--steps", missing, rule, f"those are {', '.join(map(str, found))}")
    return [NamedPath(place.key, found[step]) for step in steps]


def common_tensors(parts: Sequence[Saved]) -> Mapping[str, SavedTensor]:
    """Return the weights that all of `parts` have.

    Raises:
        ConfigError: if they are of different models, types or vocabularies.
    """
    first, *others = parts
    facts, tensors = _facts(first.manifest), _weights(first.place)
    for place, manifest in others:
        for what, theirs in _facts(manifest).items():
            ours, name = facts[what], first.place.path.name
            rule = f"is of a different {what} than {name}: {theirs} instead of {ours}"
            place.check(theirs == ours, rule, "merge steps of one run")
        there = _weights(place)
        differ = [name for name in {**tensors, **there} if tensors.get(name) != there.get(name)]
        if differ:
            ours, theirs = (of.get(differ[0], "absent") for of in (tensors, there))
            rule = f"{differ[0]} is {theirs} there, and {ours} in {first.place.path.name}"
            raise place.error(rule, "merge steps of one model and type")
    return tensors


def _facts(manifest: Manifest) -> dict[str, Any]:
    return {
        "model": manifest["model_name"],
        "size": manifest["model_args"],
        "tokenizer": manifest["data_identity"].get("model.tokenizer_path"),
    }


def _weights(place: NamedPath) -> dict[str, SavedTensor]:
    saved = read_saved_tensors(place)
    return {name: tensor for name, tensor in saved.items() if name.startswith("model.")}
