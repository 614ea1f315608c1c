"""`meshwright checkpoint diff`: the differences between two checkpoints."""

import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshwright.checkpoint.find import open_checkpoint
from meshwright.checkpoint.index import read_saved_tensors
from meshwright.checkpoint.manifest import Manifest
from meshwright.commands.checkpoint import readable
from meshwright.commands.options import CHECKPOINT, input_path
from meshwright.config.changes import ABSENT, differences
from meshwright.config.command_line import Parser
from meshwright.system.files import Place
from meshwright.system.log import align

if TYPE_CHECKING:
    from meshwright.checkpoint.reader import TensorDifference

APART = ("files", "crc32", "config")
"""Keys of the manifest that say how it is stored, on other meshes in other files; and one that is
compared by itself."""

COLUMNS = ("TENSOR", "DIFFER", "OF", "LARGEST", "RELATIVE", "AT", "A", "B")


def add_options(parser: Parser) -> None:
    """Options of `meshwright checkpoint diff`."""
    parser.add_argument("a", type=input_path, help=CHECKPOINT)
    parser.add_argument("b", type=input_path, help="the same")
    parser.add_argument("--tensors", action="store_true", help="compare tensors alone")


@readable()
def run(given: Namespace) -> None:
    """Print the differences of two checkpoints; exit with 1 if there are any.

    Raises:
        ConfigError: if there is no checkpoint, or it is damaged.
    """
    a, b = Place("A", given.a), Place("B", given.b)
    with open_checkpoint(a, print) as of_a, open_checkpoint(b, print) as of_b:
        print(f"A: {of_a.place.path}\nB: {of_b.place.path}")
        are_equal = given.tensors or _diff_manifests(of_a.manifest, of_b.manifest)
        are_equal &= _diff_tensors(of_a.place, of_b.place)
    if not are_equal:
        sys.exit(1)


def _diff_manifests(a: Manifest, b: Manifest) -> bool:
    configs = [manifest["config"] for manifest in (a, b)]
    others = [{k: v for k, v in m.items() if k not in APART} for m in (a, b)]
    are_equal = _diff_tables("manifest", *others)
    return _diff_tables("config", *configs) and are_equal


def _diff_tables(what: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    rows = [(f"  {d.key}", _value(d.old), _value(d.new)) for d in differences(a, b)]
    print(f"\n{what}, keys that differ: {len(rows)}")
    if rows:
        print(align([("  KEY", "A", "B"), *rows]))
    return not rows


def _value(value: object) -> str:
    return "(absent)" if value is ABSENT else repr(value)


def _diff_tensors(a: Place, b: Place) -> bool:
    # not at the top: torch takes a second
    from meshwright.checkpoint.reader import CheckpointWeights, compare_tensors

    there = read_saved_tensors(a), read_saved_tensors(b)
    comparable = {n: t for n, t in there[0].items() if there[1].get(n) == t}
    unlike = sorted(n for n in there[0].keys() & there[1].keys() if n not in comparable)
    missing = [sorted(there[i].keys() - there[1 - i].keys()) for i in (0, 1)]
    of_a, of_b = (CheckpointWeights(place, saved_name=str) for place in (a, b))
    found = compare_tensors(of_a, of_b, comparable)
    rows = [_row(difference) for difference in found if difference is not None]
    equal = len(comparable) - len(rows)
    print(f"\ntensors: {equal} of {len(there[0].keys() | there[1].keys())} are equal to the bit")
    for name in unlike:
        print(f"  {name}: {there[0][name]} in A, {there[1][name]} in B")
    for names, which in zip(missing, "AB", strict=True):
        for name in names:
            # every rank has its own: on another mesh there are others
            note = " (of a rank that the other mesh does not have)" if _is_of_rank(name) else ""
            print(f"  {name}: in {which} alone{note}")
    if rows:
        print(align([COLUMNS, *rows]))
    lost = [name for names in missing for name in names if not _is_of_rank(name)]
    return not (rows or unlike or lost)


def _is_of_rank(name: str) -> bool:
    return name.startswith("rng.")


def _row(d: "TensorDifference") -> tuple[object, ...]:
    at = ",".join(map(str, d.index)) or "-"
    return (
        *(d.name, d.count, d.numel, f"{d.largest:.3g}", f"{d.relative:.3g}"),
        *(at, f"{d.a:.9g}", f"{d.b:.9g}"),
    )
