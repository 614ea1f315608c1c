"""Checks at the start that all ranks have the same config, code, tokenizer and data."""

import functools
import hashlib
import json
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import meshwright
from meshwright.config.changes import differences, shown, to_json
from meshwright.datasets.token_cache.spec import short_hash, tokenizer_parts
from meshwright.system.errors import ConfigError, in_ranges
from meshwright.train.preflight import Plan

CONFIG = "config"

COMPILE_HINT = ' ("auto" asks each machine for a C++ compiler; false runs on all machines)'

OWN_PATHS = {
    "config_file",
    "dump_folder",
    "token_cache_folder",
    "tokenizer_path",
    "chat_template_path",
    "dataset_path",
    "dataset_format",
}
"""Keys that may differ between machines: only the files they lead to must be the same."""


def check_agreement(plan: Plan) -> None:
    """Compare this rank's job with the others', apart from the data. Collective.

    Raises:
        ConfigError: as `check_same`.
    """
    model = plan.config.model
    of_tokenizer = tokenizer_parts(plan.tokenizer, model.tokenizer_path, model.chat_template_path)
    check_same(
        {
            CONFIG: json.dumps(to_json(plan.config)),
            "code": f"meshwright {meshwright.__version__}, source {_source_hash()}, "
            f"torch {torch.__version__}",
            "model.tokenizer_path": short_hash(of_tokenizer),
            "experimental.custom_import": plan.own_code,
        }
    )


def check_same(facts: Mapping[str, str]) -> None:
    """Raise unless every rank gives the same facts. Collective.

    A digest is gathered first: the facts of 16,384 ranks would be 61 MiB on each of them.

    Args:
        facts: by the key of the config that they belong to, if there is one.

    Raises:
        ConfigError: on every rank, naming the ranks that differ, in which part, and from which.
    """
    digests = [""] * dist.get_world_size()
    text = json.dumps(facts, sort_keys=True)
    dist.all_gather_object(digests, hashlib.sha256(text.encode()).hexdigest())
    if all(digest == digests[0] for digest in digests):
        return
    mine = (socket.gethostname(), dict(facts))
    gathered: list[tuple[str, dict[str, str]]] = [mine] * len(digests)
    dist.all_gather_object(gathered, mine)

    def named(ranks: Sequence[int]) -> str:
        hosts = sorted({gathered[rank][0] for rank in ranks})
        return f"rank {in_ranges(ranks)} (on {', '.join(hosts[:3])}{', ...' * (len(hosts) > 3)})"

    found = list[tuple[str, str]]()
    for name in sorted({name for _, of_rank in gathered for name in of_rank}):
        by_value = defaultdict[str, list[int]](list)
        for rank, (_, of_rank) in enumerate(gathered):
            by_value[of_rank.get(name, "nothing")].append(rank)
        # most ranks, or the first, are what others differ from
        (usual, most), *others = sorted(by_value.items(), key=lambda one: (-len(one[1]), one[1]))
        found += [
            (name, f"{key}: {named(ranks)}: {here}; {named(most)}: {there}")
            for value, ranks in others
            for key, here, there in _differences(name, value, usual)
        ]
    if found:
        text = "\n  ".join(["ranks do not run the same job:", *(line for _, line in found)])
        fix = "give all machines the same code, config, tokenizer and data"
        key = "" if found[0][0] in (CONFIG, "code") else found[0][0]
        raise ConfigError(key, f"{text}\n  fix: {fix}")


def _differences(name: str, value: str, usual: str) -> Iterator[tuple[str, str, str]]:
    """Yield what differs in one fact, and both of its values."""
    if name != CONFIG:
        yield name, value, usual
        return
    for key, old, new in differences(json.loads(usual), json.loads(value)):
        if key.rpartition(".")[2] not in OWN_PATHS:
            yield key, shown(new), shown(old) + COMPILE_HINT * (key == "compile.enable")


@functools.cache
def _source_hash() -> str:
    """Return a hash of every source file of the package."""
    folder, found = Path(meshwright.__file__).parent, hashlib.sha256()
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.cpp")]):
        found.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]
