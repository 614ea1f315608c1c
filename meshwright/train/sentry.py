"""Finds a rank that computes wrongly: data-parallel ranks compute one microbatch, and compare bits.

The weights of replicas are compared as well, because their bits are always equal. What differs is
computed a second time, and only what differs again ends the job. Otherwise it's a note in the log
and in the history.
"""

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.metrics.observers import Observer
from meshwright.metrics.sinks import note_event
from meshwright.parallelisms.meshes import Meshes
from meshwright.system import hardware
from meshwright.system.errors import SickRankError, config_error, in_ranges
from meshwright.system.log import logger
from meshwright.train.canary import Canary
from meshwright.train.resolve import ResolvedJob
from meshwright.train.trainer import Trainer


class Deviation(NamedTuple):
    """How the numbers of a rank differ from its peers' numbers."""

    part: str
    """The first that differs."""
    num_peers: int
    """Ranks that were compared, with this one."""
    has_majority: bool
    """More than half of them agree, and this one is no part of those."""


@dataclass(frozen=True)
class Report:
    """What a rank knows of itself after two comparisons, of which the first didn't agree."""

    rank: int
    peer: int
    """Its place among its data-parallel peers: ranks that share the work of one, as under tensor
    parallelism, have the same place."""
    host: str
    gpu: str
    """Its number on the node, and the driver's for it; "" of a CPU."""
    weights: Deviation | None
    """Of its weights from the weights of replicas, both times."""
    results: Deviation | None
    """Of its results, both times."""
    once: Deviation | None
    """Of either, at least once."""
    is_steady: bool
    """Its results were the same both times."""

    def __str__(self) -> str:
        return f"rank {self.rank} (on {self.host}{self.gpu and f', GPU {self.gpu}'})"


class Comparison(NamedTuple):
    """The numbers of this rank and its data-parallel peers."""

    results: Tensor
    """(peers, N) int64."""
    weights: Tensor
    """(replicas, blocks) int64; of a job without replicas (1, 0)."""
    differs: bool
    """Whether the numbers of any ranks of the job differ."""


def deviation(rows: Sequence[Sequence[int]], own: int, parts: Sequence[str]) -> Deviation | None:
    """Return how row `own` differs from the row that more than half of them are; without such a
    row, from the first other one. None: it doesn't.

    Args:
        parts: names of the columns, in the order in which they are computed.
    """
    found = [tuple(row) for row in rows]
    usual, count = Counter(found).most_common(1)[0]
    has_majority = 2 * count > len(found)
    if not has_majority:
        usual = next(row for row in found if row != found[own])
    pairs = zip(parts, found[own], usual, strict=True)
    first = next((part for part, mine, theirs in pairs if mine != theirs), None)
    return None if first is None else Deviation(first, len(found), has_majority)


class Verdict(NamedTuple):
    """The conclusion of all ranks, the same on each."""

    kind: str
    """As the history has it: "sick", "transient" or "not deterministic"."""
    ranks: Sequence[Report]
    """Of whom it is."""
    part: str
    """Where they differ first."""
    text: str
    """For the log."""


def judge(step: int, reports: Sequence[Report]) -> Verdict:
    """Return the conclusion from the reports of all ranks, some of whose numbers differed once."""
    # weights that differ make every result of a replica differ
    of_weights = [(report, report.weights) for report in reports if report.weights]
    of_results = [(report, report.results) for report in reports if report.results]
    of_once = [(report, report.once) for report in reports if report.once]
    found = of_weights or of_results or of_once
    ranks, (_, first) = [report for report, _ in found], found[0]
    # without a majority, whoever contradicts itself is the wrong one
    is_split = not (of_weights or first.has_majority)
    unsteady = [report for report in ranks if is_split and not report.is_steady]
    is_alone = len({report.peer for report in unsteady}) == 1
    if is_alone:
        ranks = unsteady
    who = "; ".join(map(str, ranks))
    at = f"at {first.part} of step {step}"
    peers = f"{first.num_peers} data-parallel ranks"
    if not (of_weights or of_results):
        others = "its peer" if first.num_peers == 2 and is_alone else f"most of {peers}"
        text = (
            f"{who}: computed something else than {others}, {at}, but not when it was "
            "computed again; training continues"
        )
        return Verdict("transient", ranks, first.part, text)
    if unsteady and not is_alone:
        text = (
            f"the sentry is off from now on: ranks {in_ranges(one.rank for one in unsteady)} got "
            "different results for the same microbatch, so a kernel isn't deterministic"
            '\n  fix: training.attention_kernel = "flash", or training.deterministic = true'
        )
        return Verdict("not deterministic", ranks, first.part, text)
    what = "have other weights than their replicas" if of_weights else "compute wrongly"
    if len(ranks) == 1:
        what = "has other weights than its replicas" if of_weights else "computes wrongly"
    elif not (first.has_majority or is_alone):
        who, what = f"one of these {what}", who
    else:
        what += ", or one of them does, since they share the work of a replica"
    hosts = ", ".join(dict.fromkeys(report.host for report in ranks))
    text = (
        f"{who}: {what}; seen twice {at}, among {peers}\n  fix: start the job again without "
        f"{hosts}: it resumes from the last checkpoint; test the GPU, as by dcgmi diag -r 3"
    )
    return Verdict("sick", ranks, first.part, text)


class Sentry(Observer):
    """Compares the ranks every `sentry.interval` steps, behind the update. The host then waits for
    the device. Collective.

    Raises:
        ConfigError: on every rank, if ranks have different devices or kernels.
    """

    def __init__(self, resolved: ResolvedJob, meshes: Meshes, trainer: Trainer) -> None:
        config = resolved.config
        self._interval, self._folder = config.sentry.interval, Path(config.job.dump_folder)
        self._canary = Canary(trainer.model, meshes, config.training)
        self._dp, self._num_replicas = meshes.dp, resolved.dims.dp_replicate
        # without replicas there are no weights to compare
        self._blocks = self._canary.blocks if self._num_replicas > 1 else []
        self._phases = trainer.phases
        self._device = torch.device(meshes.world.device_type)
        here = f"{hardware.device_name(self._device)} {hardware.kernels(self._device)}"
        every = [here] * dist.get_world_size()
        dist.all_gather_object(every, here)
        other = next((rank for rank, facts in enumerate(every) if facts != every[0]), None)
        if other is not None:
            rule = f"rank {other} computes on {every[other]}, and rank 0 on {every[0]}: they round "
            rule += "differently, so their bits can't be compared"
            raise config_error("sentry.interval", self._interval, rule, "leave [sentry] out")

    def after_step(self, step: int, samples_read: tuple[int, ...]) -> None:
        """Compare, if the step is one for it.

        Raises:
            SickRankError: on every rank, if one computes wrongly twice.
        """
        if self._interval == 0 or step % self._interval:
            return
        self._phases.mark("forward_backward")
        first = self._compare(step)
        if first.differs:
            self._conclude(step, self._reports(first, self._compare(step)))
        self._phases.mark(None)

    def _compare(self, step: int) -> Comparison:
        """Compute the microbatch, and gather the numbers of all peers."""
        numbers = self._canary.sums(step)
        num_results, num_peers, replicas = len(numbers), self._dp.size(), self._num_replicas
        if self._blocks:
            numbers = torch.cat([numbers, self._canary.weight_sums()])
        every = [torch.empty_like(numbers) for _ in range(num_peers)]
        dist.all_gather(every, numbers, group=self._dp.get_group())
        results, weights = torch.stack(every).tensor_split([num_results], 1)
        # the ranks of dp are by replica, then by shard
        shards = num_peers // replicas
        weights = weights[self._dp.get_local_rank() % shards :: shards]
        differs = (results != results[0]).any() | (weights != weights[0]).any()
        votes = differs.int()
        dist.all_reduce(votes, dist.ReduceOp.MAX)
        return Comparison(results, weights, bool(votes.item()))

    def _reports(self, *both: Comparison) -> list[Report]:
        """Return what each rank has seen of itself."""
        own, shards = self._dp.get_local_rank(), self._dp.size() // self._num_replicas
        results = [deviation(each.results.tolist(), own, self._canary.names) for each in both]
        weights = [deviation(each.weights.tolist(), own // shards, self._blocks) for each in both]
        gpu = ""
        if self._device.type == "cuda":
            gpu = f"{torch.cuda.current_device()}, {hardware.device_id(self._device)}"
        here = Report(
            dist.get_rank(),
            own,
            socket.gethostname(),
            gpu,
            weights[1] if all(weights) else None,
            results[1] if all(results) else None,
            next(filter(None, weights + results), None),
            torch.equal(both[0].results[own], both[1].results[own]),
        )
        every = [here] * dist.get_world_size()
        dist.all_gather_object(every, here)
        return every

    def _conclude(self, step: int, reports: Sequence[Report]) -> None:
        verdict = judge(step, reports)
        if dist.get_rank() == 0:
            ranks: list[dict[str, Any]] = [
                {"rank": report.rank, "host": report.host, "gpu": report.gpu}
                for report in verdict.ranks
            ]
            facts = {"verdict": verdict.kind, "ranks": ranks, "part": verdict.part}
            note_event(self._folder, step, "sentry", facts)
            if verdict.kind != "sick":
                logger.warning("%s", verdict.text)
        if verdict.kind == "sick":
            raise SickRankError(verdict.text)
        if verdict.kind == "not deterministic":
            self._interval = 0
