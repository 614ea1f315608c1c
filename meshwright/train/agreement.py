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
from meshwright.datasets.encoding import short_hash, tokenizer_parts
from meshwright.datasets.opening import OpenSource
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


def check_agreement(plan: Plan, sources: Sequence[OpenSource]) -> None:
    """Compare this rank's job with the others'. Collective.

    Raises:
        ConfigError: on every rank, naming the ranks that differ, in which part, and from which.
    """
    model = plan.config.model
    of_tokenizer = tokenizer_parts(plan.tokenizer, model.tokenizer_path, model.chat_template_path)
    check_same(
        {
            CONFIG: json.dumps(to_json(plan.config)),
            "code": f"meshwright {meshwright.__version__}, source {_source_hash()}, "
            f"torch {torch.__version__}",
            "model.tokenizer_path": short_hash(of_tokenizer),
            **{f"{source.entry.key}.dataset": source.content for source in sources},
            "experimental.custom_import": plan.own_code,
        }
    )


def check_same(facts: Mapping[str, str]) -> None:
    """Raise unless every rank gives the same facts. Collective.

    A digest is gathered first: the facts of 16,384 ranks would be 61 MiB on each of them.

    Args:
        facts: by the key of the config that they belong to, if there is one.

    Raises:
        ConfigError: as `check_agreement`.
    """
    digests = [""] * dist.get_world_size()
    text = json.dumps(facts, sort_keys=True)
    dist.all_gather_object(digests, hashlib.sha256(text.encode()).hexdigest())
    if all(digest == digests[0] for digest in digests):
        return
    mine = (socket.gethostname(), dict(facts))
    gathered: list[tuple[str, dict[str, str]]] = [mine] * len(digests)
    dist.all_gather_object(gathered, mine)
    hosts = [host for host, _ in gathered]
    lines, first = list[str](), ""
    for name in sorted({name for _, of_rank in gathered for name in of_rank}):
        ranks = defaultdict[str, list[int]](list)
        for rank, (_, of_rank) in enumerate(gathered):
            ranks[of_rank.get(name, "nothing")].append(rank)
        groups = sorted(ranks.items(), key=lambda group: (-len(group[1]), group[1]))
        found = list(_differences(name, groups, hosts))
        if found and not first:
            first = name
        lines += found
    if lines:
        text = "\n  ".join(["ranks do not run the same job:", *lines])
        fix = "give all machines the same code, config, tokenizer and data"
        raise ConfigError("" if first in (CONFIG, "code") else first, f"{text}\n  fix: {fix}")


def _differences(
    name: str, groups: Sequence[tuple[str, list[int]]], hosts: Sequence[str]
) -> Iterator[str]:
    """Yield lines on one fact: how other groups differ from that of most ranks, or of the first."""
    (usual, usual_ranks), *others = groups
    to_whom = _named(usual_ranks, hosts)
    for value, ranks in others:
        who = _named(ranks, hosts)
        if name != CONFIG:
            yield f"{name}: {who}: {value}; {to_whom}: {usual}"
            continue
        for key, old, new in differences(json.loads(usual), json.loads(value)):
            if key.rpartition(".")[2] not in OWN_PATHS:
                hint = COMPILE_HINT if key == "compile.enable" else ""
                yield f"{key}: {who}: {shown(new)}; {to_whom}: {shown(old)}{hint}"


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    there = sorted({hosts[rank] for rank in ranks})
    more = f" and {len(there) - 3} more" if len(there) > 3 else ""
    return f"rank {in_ranges(ranks)} (on {', '.join(there[:3])}{more})"


@functools.cache
def _source_hash() -> str:
    """Return a hash of every source file of the package."""
    folder, found = Path(meshwright.__file__).parent, hashlib.sha256()
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.cpp")]):
        found.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]
