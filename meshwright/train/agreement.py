"""Makes sure that ranks train the same job: they compare their facts, and take the choices of the
first for all that the config leaves open.
"""

import hashlib
import json
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

import torch
import torch.distributed as dist

import meshwright
from meshwright.checkpoint.on_ranks import AllRanks
from meshwright.config.changes import differences, shown, to_json
from meshwright.datasets.identity import short_hash, tokenizer_parts
from meshwright.parallelisms.delta_kernel import version, why_chunks
from meshwright.system.errors import ConfigError, in_ranges
from meshwright.system.modules import source_hash
from meshwright.train.resolve import ResolvedJob, with_choices
from meshwright.train.resume import library_versions

CONFIG = "config"

OWN_PATHS = {
    "config_file",
    "dump_folder",
    "token_cache_folder",
    "tokenizer_path",
    "chat_template_path",
    "dataset_path",
    "dataset_format",
}
"""Keys that may differ between nodes: only the files they lead to must be the same."""


def take_choices(job: ResolvedJob, ranks: AllRanks) -> ResolvedJob:
    """Return the job with the first rank's choices for -1 and "auto". Collective.

    Raises:
        ConfigError: on every rank, if one of them can't train with these choices.
    """
    stages = job.training_stages
    choices = ranks.on_first(lambda: [stage.filled_in for stage in stages])
    jobs = list[ResolvedJob]()
    ranks.on_every(lambda: jobs.append(with_choices(job, choices)))
    return jobs[0]


def check_agreement(job: ResolvedJob) -> None:
    """Compare this rank's facts, apart from the data, with the others', by `check_same`."""
    model = job.config.model
    of_tokenizer = tokenizer_parts(job.tokenizer, model.tokenizer_path, model.chat_template_path)
    libraries = ", ".join(f"{name} {number}" for name, number in library_versions().items())
    why = why_chunks(job.model_args.table, job.facts.device_type, job.config)
    if why is not None:  # the kernel and PyTorch's chunks don't round alike
        # without the text of an import's error: it may have a process's number, or a node's path
        chunks = f"linear attention in chunks: {why.partition(':')[0]}"
        libraries += f", {chunks if why else version()}"
    check_same(
        {
            CONFIG: json.dumps(to_json(job.written)),
            # of a folder: a node may have a different config.json or other tensors there
            "model.flavor": json.dumps([job.family.name, asdict(job.model_args)]),
            "code": f"meshwright {meshwright.__version__}, source {source_hash()}, "
            f"torch {torch.__version__}, {libraries}",
            "model.tokenizer_path": short_hash(of_tokenizer),
            "experimental.custom_import": job.own_code,
        }
    )


class RankFacts(NamedTuple):
    """The facts of one rank."""

    host: str
    facts: Mapping[str, str]
    """By name."""


def check_same(facts: Mapping[str, str]) -> None:
    """Raise unless every rank has the same facts. Collective.

    A digest is gathered first: the facts of 16,384 ranks would be 61 MiB on each of them.

    Raises:
        ConfigError: on every rank, naming the ranks that differ, in which fact, and from which.
    """
    digests = [""] * dist.get_world_size()
    text = json.dumps(facts, sort_keys=True)
    dist.all_gather_object(digests, hashlib.sha256(text.encode()).hexdigest())
    if all(digest == digests[0] for digest in digests):
        return
    here = RankFacts(socket.gethostname(), dict(facts))
    by_rank = [here] * len(digests)
    dist.all_gather_object(by_rank, here)
    names = sorted({name for of_rank in by_rank for name in of_rank.facts})
    lines = {name: list(_disagreements(name, by_rank)) for name in names}
    if any(lines.values()):
        first = next(name for name in names if lines[name])
        every = (line for name in names for line in lines[name])
        text = "\n  ".join(["ranks do not run the same job:", *every])
        fix = "give all nodes the same code, config, tokenizer and data"
        key = "" if first in (CONFIG, "code") else first
        raise ConfigError(key, f"{text}\n  fix: {fix}")


def _disagreements(name: str, by_rank: Sequence[RankFacts]) -> Iterator[str]:
    """Yield a line for each difference of a fact between some ranks and most ranks."""
    ranks_by_value = defaultdict[str, list[int]](list)
    for rank, of_rank in enumerate(by_rank):
        ranks_by_value[of_rank.facts.get(name, "nothing")].append(rank)
    # of several groups of equal size, the one with the first rank counts as most ranks
    ordered = sorted(ranks_by_value.items(), key=lambda item: (-len(item[1]), item[1]))
    (majority_value, majority_ranks), *minorities = ordered
    majority = _describe(majority_ranks, by_rank)
    for value, ranks in minorities:
        minority = _describe(ranks, by_rank)
        for key, own, usual in _differences(name, value, majority_value):
            yield f"{key}: {minority}: {own}; {majority}: {usual}"


def _describe(ranks: Sequence[int], by_rank: Sequence[RankFacts]) -> str:
    hosts = sorted({by_rank[rank].host for rank in ranks})
    more = ", ..." if len(hosts) > 3 else ""
    return f"rank {in_ranges(ranks)} (on {', '.join(hosts[:3])}{more})"


def _differences(name: str, value: str, usual: str) -> Iterator[tuple[str, str, str]]:
    """Yield the differences in one fact, as a key and both values."""
    if name != CONFIG:
        yield name, value, usual
        return
    for key, old, new in differences(json.loads(usual), json.loads(value)):
        if key.rpartition(".")[2] not in OWN_PATHS:
            yield key, shown(new), shown(old)
