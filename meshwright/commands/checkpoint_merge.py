"""`meshwright checkpoint merge`: a weighted mean of the weights of several steps."""

import math
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise

from meshwright.checkpoint import commit
from meshwright.checkpoint.find import Opened, find_entries, no_checkpoint, open_checkpoint
from meshwright.checkpoint.index import SavedTensor, read_saved_tensors
from meshwright.commands.checkpoint import readable
from meshwright.commands.options import input_path, output_folder
from meshwright.config.command_line import Parser
from meshwright.system.errors import check
from meshwright.system.files import Place

KINDS = "mean, linear, 1-sqrt, ema=0.9, or numbers as 0.25,0.75"


def add_options(parser: Parser) -> None:
    """Options of `meshwright checkpoint merge`."""
    parser.add_argument("run", type=input_path, help="a dump folder, or one of checkpoints")
    parser.add_argument("--steps", required=True, help="steps to merge, as 800,900,1000")
    parser.add_argument("--weights", default="mean", help=f"{KINDS} (default: mean)")
    parser.add_argument(
        "--out", required=True, type=output_folder, help="the folder to make a checkpoint in"
    )


@readable()
def run(given: Namespace) -> None:
    """Merge, and print the weight of each step.

    Raises:
        ConfigError: if the steps cannot be merged, or the weights are none; before any tensor is
            read.
    """
    steps = _steps(given.steps)
    shares = shares_of(given.weights, len(steps))
    place = Place("RUN", given.run)
    folders = _folders(place, steps)
    out = given.out.absolute()
    final = commit.step_folder(out, steps[-1])
    check(not final.exists(), "--out", str(given.out), f"{final} is there", "name another folder")
    check(
        not out.is_relative_to(given.run.absolute()),
        "--out",
        str(given.out),
        f"is inside of {given.run}, where a job's checkpoints are looked for",
        "name a folder elsewhere",
    )
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
    are_steps = all(re.fullmatch(r"0|[1-9]\d{0,17}", word) for word in words)
    check(are_steps, "--steps", text, "must be steps with commas between", "write 800,900,1000")
    steps = [int(word) for word in words]
    ascend = all(a < b for a, b in pairwise(steps))
    fix = f"write {','.join(map(str, sorted(set(steps))))}"
    check(ascend, "--steps", text, "must ascend, since their order is the order of the sum", fix)
    check(len(steps) > 1, "--steps", text, "there is nothing to merge", "name two steps or more")
    return steps


def shares_of(text: str, count: int) -> list[float]:
    """Return the weight of each of `count` steps, the oldest first; they sum to one.

    mean: 1/n. linear: i-th of n in proportion to i. 1-sqrt: sqrt(i/n) - sqrt((i-1)/n), by which
    steps at a constant rate count as if it had decayed as 1 - sqrt does (Tian et al. 2025,
    arXiv:2507.17634, where the mean stands for a linear decay). ema=B: of a running mean from the
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
    given = [_number(word) for word in (number if name == "ema" else text).split(",")]
    fix = f"write {KINDS}"
    check(not any(map(math.isnan, given)), "--weights", text, "not understood", fix)
    if name == "ema":
        decay = given[0]
        is_one = len(given) == 1 and 0 < decay < 1
        check(is_one, "--weights", text, "the decay must lie between 0 and 1", "write ema=0.9")
        return [decay ** (count - 1), *((1 - decay) * decay ** (count - i) for i in numbers[1:])]
    fix = f"write {count} numbers"
    check(len(given) == count, "--weights", text, f"{len(given)} for {count} steps", fix)
    total = math.fsum(given)
    fix = "divide them by their sum"
    check(abs(total - 1) < 1e-6, "--weights", text, f"sum to {total:g}, not to 1", fix)
    return given


def _number(word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _folders(place: Place, steps: Sequence[int]) -> list[Place]:
    """Return where the checkpoint of each step is."""
    complete = {
        step: path
        for path in find_entries(place)
        if (step := commit.step_of(path.name)) is not None
    }
    if not complete:
        raise no_checkpoint(place)
    missing = [step for step in steps if step not in complete]
    check(
        not missing,
        "--steps",
        ",".join(map(str, missing)),
        f"not among the checkpoints in {place.path}",
        f"those are {', '.join(map(str, complete))}",
    )
    return [Place(place.key, complete[step]) for step in steps]


def common_tensors(parts: Sequence[Opened]) -> Mapping[str, SavedTensor]:
    """Return the weights that all of `parts` have.

    Raises:
        ConfigError: if they are of different models, types or vocabularies.
    """
    found = [_weights(part.place) for part in parts]
    first, (place, manifest) = found[0], parts[0]
    for there, (other, facts) in zip(found[1:], parts[1:], strict=True):
        for what, ours, theirs in (
            ("model", manifest["model_name"], facts["model_name"]),
            ("size", manifest["model_args"], facts["model_args"]),
            (
                "tokenizer",
                *(m["data_identity"].get("model.tokenizer_path") for m in (manifest, facts)),
            ),
        ):
            rule = f"is of another {what} than {place.path.name}: {theirs} instead of {ours}"
            other.check(ours == theirs, rule, "merge steps of one run")
        differ = [name for name in {**first, **there} if first.get(name) != there.get(name)]
        if differ:
            ours, theirs = (of.get(differ[0], "absent") for of in (first, there))
            rule = f"{differ[0]} is {theirs} there, and {ours} in {place.path.name}"
            raise other.error(rule, "merge steps of one model and type")
    return first


def _weights(place: Place) -> dict[str, SavedTensor]:
    saved = read_saved_tensors(place)
    return {name: tensor for name, tensor in saved.items() if name.startswith("model.")}
