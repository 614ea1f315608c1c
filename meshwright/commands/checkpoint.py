"""`meshwright checkpoint ls`, `show`, `verify` and `diff`; only the last one imports torch."""

import json
import math
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from meshwright.checkpoint import integrity
from meshwright.checkpoint.index import INDEX, SavedTensor, read_saved_tensors
from meshwright.checkpoint.integrity import being_read
from meshwright.checkpoint.listing import NAME
from meshwright.checkpoint.manifest import MANIFEST, DamagedError, Manifest, read_manifest
from meshwright.checkpoint.store import (
    find_candidates,
    list_checkpoints,
    no_checkpoint,
    open_checkpoint,
)
from meshwright.commands.options import CHECKPOINT, input_path
from meshwright.config.changes import ABSENT, differences, shown
from meshwright.config.command_line import Parser
from meshwright.config.saved import saved_config
from meshwright.parallelisms.rules.degrees import AXES, mesh_text
from meshwright.system.errors import ConfigError
from meshwright.system.files import NamedPath
from meshwright.system.log import align

COLUMNS = ("NAME", "SAVED", "SIZE", "TOKENS", "LOSS", "MESH", "STATE")

ROLES = ("model", "average", "optimizer", "rng")
"""First parts of tensors' names."""

APART = ("files", "crc32", "config")
"""Keys of the manifest that say how it is stored, on other meshes in other files; and one that is
compared by itself."""

OUTPUTS = ("job.config_file", "job.dump_folder", "checkpoint.folder", "training.token_cache_folder")
"""Keys of a config that say where it is read and where a job writes: two jobs may be the same."""

DIFFERENCE_COLUMNS = ("TENSOR", "DIFFER", "OF", "LARGEST", "AT", "A", "B")


def add_options_ls(parser: Parser) -> None:
    parser.add_argument(
        "folder", type=input_path, help="a dump folder, or its folder of checkpoints"
    )


def run_ls(given: Namespace) -> None:
    """Print a line per checkpoint."""
    rows, place = [], NamedPath("FOLDER", given.folder)
    paths = list_checkpoints(place)
    if not paths:
        raise no_checkpoint(place)
    for path in paths:
        with suppress(FileNotFoundError):  # a job that runs deletes its old ones
            rows.append(_row(path))
    complete = [number for number, row in enumerate(rows) if row[-1] == "complete"]
    if complete:
        *facts, state = rows[complete[-1]]
        rows[complete[-1]] = (*facts, f"{state}, newest")
    print(align([COLUMNS, *rows]))


def _row(path: Path) -> tuple[str, ...]:
    """Return the line of a step's folder, of which no more is read than the manifest.

    Raises:
        FileNotFoundError: if a job deletes it meanwhile.
    """
    # a link may lead nowhere
    size = _size(sum(file.stat().st_size for file in path.iterdir() if file.exists()))
    name, manifest = NAME.fullmatch(path.name), None
    state = "set aside" if name and name["aside"] else "complete"
    if name and name["state"]:
        state = "unfinished" if name["state"] == "unfinished" else "being deleted"
    else:
        try:
            manifest = read_manifest(path)
            integrity.inspect(path)
        except DamagedError as error:
            state = f"damaged: {error.what}"
        except ConfigError:
            state = "of a later version of meshwright"
    if manifest is None:
        return path.name, _date(path), size, "-", "-", "-", state
    mesh = mesh_text(manifest["mesh"]) or "no mesh"
    tokens = f"{manifest['tokens_seen']:,}"
    return path.name, _date(path / MANIFEST), size, tokens, _loss(manifest), mesh, state


def _size(num_bytes: int) -> str:
    return str(tqdm.format_sizeof(num_bytes, "B"))


def _date(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%dT%H:%M:%S")


def _loss(manifest: Manifest) -> str:
    nothing = "-" if "merged" in manifest else "not-finite"
    return nothing if manifest["loss"] is None else f"{manifest['loss']:.4f}"


def add_options_show(parser: Parser) -> None:
    parser.add_argument("checkpoint", type=input_path, help=CHECKPOINT)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument(
        "--config",
        dest="as_toml",
        action="store_true",
        help="print the TOML of the run that saved it",
    )


def run_show(given: Namespace) -> None:
    """Print the facts of one checkpoint, or the config of the job that saved it."""
    place = NamedPath("CHECKPOINT", given.checkpoint)
    if given.as_toml:
        with open_checkpoint(place, lambda line: print(line, file=sys.stderr)) as (_, manifest):
            print(saved_config(manifest["config"]))
        return
    with open_checkpoint(place, print, names=[INDEX]) as (found, manifest):
        tensors = read_saved_tensors(found)
        try:
            print(align([*_facts(found.path, manifest, tensors)]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # of tables in it the keys aren't checked, and text may be none that can be printed
            raise found.error(f"{MANIFEST} is forged or damaged: {error!r}") from None
    if given.tensors:
        rows = [
            (name, tensor.size, tensor.dtype, tensor.num_bytes)
            for name, tensor in sorted(tensors.items())
        ]
        print("\n" + align([("TENSOR", "SHAPE", "TYPE", "BYTES"), *rows]))


def _facts(
    path: Path, manifest: Manifest, tensors: dict[str, SavedTensor]
) -> Iterator[tuple[str, object]]:
    is_aside = (match := NAME.fullmatch(path.name)) and match["aside"]
    state = "set aside" if is_aside else "complete"
    yield "checkpoint", path
    yield "state", f"{state} (content: meshwright checkpoint verify)"
    yield "saved", _date(path / MANIFEST)
    yield "step", manifest["step"]
    yield "tokens seen", f"{manifest['tokens_seen']:,}"
    yield "loss", _loss(manifest)
    parameters = sum(t.numel for name, t in tensors.items() if name.startswith("model."))
    yield "model", f"{manifest['model_name']}, {parameters:,} parameters"
    yield from (("  " + key, value) for key, value in manifest["model_args"].items())
    if manifest["frozen"]:
        yield "frozen", f"{len(manifest['frozen'])} parameters, {manifest['frozen'][0]}, ..."
    num_ranks = math.prod(manifest["mesh"].get(axis, 1) for axis in AXES)  # not of experts' mesh
    yield "mesh", f"{mesh_text(manifest['mesh']) or 'no mesh'} ({num_ranks} ranks)"
    yield from manifest["versions"].items()
    yield "tokenizer", manifest["tokenizer_path"] or "unknown"
    yield from _data(manifest)
    for role in ROLES:
        of_role = [t for name, t in tensors.items() if name.startswith(f"{role}.")]
        size = _size(sum(t.num_bytes for t in of_role))
        types = ", ".join(sorted({t.dtype for t in of_role}))
        yield f"{role} tensors", f"{len(of_role)}, {size}, {types}" if of_role else "none"
    for name, record in manifest["files"].items():
        yield name, f"{record['bytes']:,} bytes, crc32 {record['crc32']}"


def _data(manifest: Manifest) -> Iterator[tuple[str, object]]:
    """Yield where in the data it stands: samples taken of each source, and epochs where known."""
    data, content = manifest["data"], manifest["data_content"]
    yield "samples", f"{data.get('sample', 0):,}"
    for name, count in zip(content, data.get("counts", ()), strict=False):
        shards = data.get("places", {}).get(name, {}).values()
        epochs = {place["epoch"] for place in shards}
        ends = f"{min(epochs)} to {max(epochs)}" if len(epochs) > 1 else f"{max(epochs, default=0)}"
        streamed = f", {len(shards)} shards, in epoch {ends}" if shards else ""
        yield f"  {name}", f"{count:,}{streamed}"


def add_options_verify(parser: Parser) -> None:
    parser.add_argument(
        "folder", type=input_path, help="a step's folder, or a dump folder for all its checkpoints"
    )


def run_verify(given: Namespace) -> None:
    """Compare every byte with its checksum; exit with 1 if something is damaged."""
    place = NamedPath("CHECKPOINT_OR_FOLDER", given.folder)
    candidates = find_candidates(place)  # no resume looks at checkpoints set aside
    if not candidates:
        raise no_checkpoint(place)
    is_good = True
    for path in reversed(candidates):
        wrong = _damage(path)
        if not path.exists():  # a job that runs deletes its old ones
            print(f"{path.name}: deleted meanwhile")
            continue
        for what in wrong:
            print(f"{path.name}: damaged: {what}", flush=True)
        if not wrong:
            print(f"{path.name}: good", flush=True)
        is_good &= not wrong
    if not is_good:
        sys.exit(1)


def _damage(checkpoint: Path) -> list[str]:
    """Return every fault of a checkpoint."""
    try:
        with being_read(checkpoint):
            manifest = integrity.inspect(checkpoint)
            return integrity.verify(checkpoint, manifest, sorted(manifest["files"]))
    except DamagedError as error:
        return [error.what]


def add_options_diff(parser: Parser) -> None:
    parser.add_argument("a", type=input_path, help=CHECKPOINT)
    parser.add_argument("b", type=input_path, help=CHECKPOINT)
    parser.add_argument("--tensors", action="store_true", help="compare only the tensors")


def run_diff(given: Namespace) -> None:
    """Print the differences of two checkpoints; exit with 1 if there are any but in `OUTPUTS`.

    Raises:
        ConfigError: if there is no checkpoint, or it is damaged.
    """
    a, b = NamedPath("A", given.a), NamedPath("B", given.b)
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
    found = [*differences(a, b)]
    print(f"\n{what}, keys that differ: {len(found)}")
    if found:
        rows = [(f"  {d.key}", *_pair(d.old, d.new)) for d in found]
        print(align([("  KEY", "A", "B"), *rows]))
    ignored = [d.key for d in found if what == "config" and d.key in OUTPUTS]
    if ignored:
        print(f"not counted, since a job trains alike wherever it writes: {', '.join(ignored)}")
    return len(ignored) == len(found)


def _pair(old: object, new: object) -> tuple[str, str]:
    """Return two values as they are shown; whole where they would look equal."""
    pair = shown(old), shown(new)
    return pair if pair[0] != pair[1] else (_whole(old), _whole(new))


def _whole(value: object) -> str:
    return "absent" if value is ABSENT else json.dumps(value)


def _diff_tensors(a: NamedPath, b: NamedPath) -> bool:
    # not at the top: torch takes a second
    from meshwright.checkpoint.reader import CheckpointWeights, compare

    of_a, of_b = (CheckpointWeights(place, saved_name=str) for place in (a, b))
    names = sorted({**of_a.saved, **of_b.saved})
    both = [(name, of_a.saved.get(name), of_b.saved.get(name)) for name in names]
    comparable = [name for name, there, here in both if there == here]
    rows = [
        (d.name, d.count, d.numel, f"{d.largest:.3g}", _at(d.index), f"{d.a:.9g}", f"{d.b:.9g}")
        for name in comparable
        if (d := compare(name, of_a.read(name), of_b.read(name)))
    ]
    equal = len(comparable) - len(rows)
    print(f"\ntensors: {equal} of {len(names)} are equal to the bit")
    unlike = [(name, there, here) for name, there, here in both if there != here]
    for name, there, here in unlike:
        # every rank has its own: on a different mesh there are others
        note = " (of a rank that the other mesh does not have)" if name.startswith("rng.") else ""
        print(f"  {name}: {there or 'absent'} in A, {here or 'absent'} in B{note}")
    if rows:
        print(align([DIFFERENCE_COLUMNS, *rows]))
    of_ranks = [name for name, *both in unlike if name.startswith("rng.") and None in both]
    return not rows and len(of_ranks) == len(unlike)


def _at(index: tuple[int, ...]) -> str:
    return ",".join(map(str, index)) or "-"
