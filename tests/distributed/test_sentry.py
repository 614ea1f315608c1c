"""The sentry: training is the same with it, it names a sick rank, and accuses no healthy one."""

import socket
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.models.loss import Batch
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.train.sentry import Deviation, Report, deviation, judge
from tests.helpers.job import DEEP, SCHEDULES, Job, global_batch, mesh
from tests.helpers.jobs import losses, records, train_on_ranks
from tests.helpers.sick import Flip, alarm, flipping, sentry_of
from tests.helpers.slow import slow_but
from tests.helpers.tiny import MIXED, SEQ_LEN, TIED

BF16 = {"param_dtype": torch.bfloat16}
CASES: dict[str, tuple[ParallelDims, dict[str, object]]] = {
    "replicas": (mesh(dp_replicate=2), {}),
    "shards": (mesh(dp_shard=2), {"is_early": True}),
    "both": (mesh(dp_replicate=2, dp_shard=2), {"ac_mode": "full"}),
    "tp": (mesh(dp_shard=2, tp=2), BF16),
    "cp": (mesh(dp_shard=2, cp=2), {"args": TIED}),
    "pp": (mesh(dp_shard=2, pp=2), {"num_microbatches": 2}),
    "tied_pp": (
        mesh(dp_replicate=2, pp=2),
        {"num_microbatches": 4, "args": TIED},
    ),
    "two_passes": (
        mesh(dp_shard=2, pp=2),
        {"num_microbatches": 4, "args": DEEP} | SCHEDULES["InterleavedZeroBubble"],
    ),
    "experts": (mesh(dp_shard=2), {"args": MIXED, "balance_loss": 0.1, "bias_update_rate": 0.1}),
    "experts_tp": (mesh(dp_shard=2, tp=2), {"args": MIXED, "bias_update_rate": 0.1}),
    "documents": (mesh(dp_shard=2), {"mask_documents": True}),
    "offload": (mesh(dp_shard=2), {"enable_cpu_offload": True, "reduce_dtype": torch.bfloat16}),
    "frozen": (mesh(dp_shard=2), {"frozen": ("tok_embeddings.weight", "norm.weight")}),
    "compiled": (mesh(dp_shard=2), {"compile_backend": "inductor"}),
}


def train(
    dims: ParallelDims, options: dict[str, object], folder: str, *, is_watched: bool
) -> tuple[list[list[float]], dict[str, torch.Tensor], str]:
    """Losses and norms of three steps, everything that they leave behind, and the alarms."""
    job = Job(dims, **options)
    masks = {"mask_documents": True} if "mask_documents" in options else {}
    sentry = sentry_of(job, dims, folder, **masks)
    torch.manual_seed(7)
    figures, alarms = [], ""
    for step in (1, 2, 3):
        documents = None
        if masks:
            documents = (torch.arange(SEQ_LEN) >= 5).int().expand(8, -1).contiguous()
        result = job.take_step(step, job.part(Batch(*global_batch(step), documents)))
        figures.append([result.loss.item(), result.grad_norm.item()])
        figures[-1] += [value.item() for value in result.figures.values()]
        assert all(parameter.grad is None for parameter in job.model.parameters())
        if is_watched:
            alarms += alarm(sentry, step)
            assert all(parameter.grad is None for parameter in job.model.parameters())
    left = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    left |= {f"buffer {name}": tensor.clone() for name, tensor in job.model.named_buffers()}
    for name, parameter in job.model.named_parameters():
        left |= {f"{name} {key}": value for key, value in job.optimizer.state[parameter].items()}
    left["random"] = torch.get_rng_state()
    return figures, left, alarms


@pytest.mark.parametrize(("dims", "options"), slow_but("experts", CASES))
@pytest.mark.ranks("dims")
def test_training_is_bitwise_the_same_with_it(dims, options, tmp_path) -> None:
    figures, left, _ = train(dims, options, str(tmp_path), is_watched=False)
    watched, left_watched, alarms = train(dims, options, str(tmp_path), is_watched=True)
    assert watched == figures
    assert alarms == ""
    assert left.keys() == left_watched.keys()
    for name, value in left.items():
        own = left_watched[name]
        value, own = (one.to_local() if hasattr(one, "to_local") else one for one in (value, own))
        assert torch.equal(value, own), name


FLIPS = [
    # a lower bit may be rounded away before the output of the block
    Flip("layers.1.feed_forward.w1", "forward", 20, 0.6),
    Flip("layers.0.attention.wv", "input", 12, 0.3),
    Flip("layers.2.feed_forward.w2", "weight", 10, 0.9),
]


@pytest.mark.parametrize(
    "dims", [mesh(dp_shard=3), pytest.param(mesh(3, pp=2), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.ranks("dims")
def test_a_rank_that_computes_wrongly_is_named(dims: ParallelDims, tmp_path: Path) -> None:
    job = Job(dims, num_sequences=6 * dims.pp, num_microbatches=2 if dims.pp > 1 else 1)
    job.take_step(1, job.part(Batch(*global_batch(1, 6 * dims.pp))))
    sentry = sentry_of(job, dims, str(tmp_path))
    for flip in FLIPS:
        of_stage = any(name == flip.module for name, _ in job.model.named_modules())
        sick = torch.tensor(int(of_stage and job.meshes.dp.get_local_rank() == 1))
        ranks = [torch.zeros_like(sick) for _ in range(dims.num_ranks)]
        dist.all_gather(ranks, sick)
        named = ranks.index(1)
        with flipping(job, flip) if sick else nullcontext():
            text = alarm(sentry, 2)
        assert text.startswith(f"rank {named} (on {socket.gethostname()}): computes wrongly"), text
        way = "forward" if flip.product == "forward" else "backward"
        assert f"seen twice at {way} of " in text, text
        assert alarm(sentry, 3) == ""
    has_it = any(name == FLIPS[0].module for name, _ in job.model.named_modules())
    is_sick = has_it and job.meshes.dp.get_local_rank() == 1
    with flipping(job, FLIPS[0], is_once=True) if is_sick else nullcontext():
        assert alarm(sentry, 4) == ""
    if dist.get_rank() == 0:
        verdicts = [row["verdict"] for row in records(tmp_path, "history")]
        assert verdicts == ["sick"] * len(FLIPS) + ["transient"]


def report(rank: int, peer: int | None = None, **seen: object) -> Report:
    peer = rank if peer is None else peer
    values = {"weights": None, "results": None, "once": None, "is_steady": True} | seen
    return Report(rank, peer, f"node{rank // 2}", "", **values)


def test_the_majority_decides_whose_numbers_are_wrong() -> None:
    parts = ["forward", "backward"]
    rows = [[1, 2], [1, 3], [1, 2]]
    assert [deviation(rows, own, parts) for own in range(3)] == [
        None,
        Deviation("backward", 3, has_majority=True),
        None,
    ]
    # of two, nobody knows which, nor of two and two
    assert deviation([[0, 2], [1, 2]], 0, parts) == Deviation("forward", 2, has_majority=False)
    rows = [[0, 2], [1, 2], [0, 2], [1, 2]]
    assert [deviation(rows, own, parts) for own in range(4)] == [Deviation("forward", 4, False)] * 4
    assert deviation([[], []], 0, []) is None


def test_the_verdict_accuses_no_more_than_it_knows() -> None:
    most, half = Deviation("forward of layers.1", 4, True), Deviation("backward of norm", 2, False)
    sick = judge(9, [report(0), report(1), report(2, results=most, once=most), report(3)])
    assert (sick.kind, [one.rank for one in sick.ranks]) == ("sick", [2])
    assert "rank 2 (on node1): computes wrongly; seen twice at forward of layers.1 of" in sick.text
    # a group that shares the work of a replica
    both = judge(9, [report(rank, results=most, once=most) for rank in (2, 3)] + [report(4)])
    assert [one.rank for one in both.ranks] == [2, 3]
    assert "or one of them does" in both.text
    # of two, both are named
    two = judge(9, [report(rank, results=half, once=half) for rank in (0, 1)])
    assert "one of these compute" in two.text
    assert [one.rank for one in two.ranks] == [0, 1]
    # once is no accusation
    once = judge(9, [report(0), report(1, once=most)])
    assert (once.kind, [one.rank for one in once.ranks]) == ("transient", [1])
    # weights explain every result of their replica
    weights = judge(9, [report(0, results=most, once=most), report(1, weights=most, once=most)])
    assert [one.rank for one in weights.ranks] == [1]
    assert "has other weights than its replicas" in weights.text
    # two ranks that don't repeat their own results aren't both broken
    unsteady = [report(rank, results=half, once=half, is_steady=False) for rank in (0, 1)]
    assert judge(9, unsteady).kind == "not deterministic"
    # who contradicts itself is the wrong one of two, and of two groups
    wrong = {"results": half, "once": half}
    one = judge(9, [report(0, **wrong), report(1, **wrong, is_steady=False)])
    assert (one.kind, [report.rank for report in one.ranks]) == ("sick", [1])
    assert "rank 1 (on node0): computes wrongly" in one.text
    groups = [report(rank, rank // 2, **wrong, is_steady=rank < 2) for rank in range(4)]
    group = judge(9, groups)
    assert (group.kind, [report.rank for report in group.ranks]) == ("sick", [2, 3])
    once = judge(9, [report(0, once=half), report(1, once=half, is_steady=False)])
    assert (once.kind, [report.rank for report in once.ranks]) == ("transient", [1])


SICK = """
import os
import torch
from meshwright.models.layers import FeedForward
healthy, calls = FeedForward.forward, []
def sick(self, x):
    out, wrong = healthy(self, x), torch.zeros_like(x)
    calls.append(1)
    # 2 layers, 1 microbatch in each of two steps, then the sentry's
    is_wrong = {"twice": len(calls) > 2 * 2, "once": len(calls) == 2 * 2 + 1}
    wrong.view(-1)[777] = 1e-3 * is_wrong[os.environ["SICK"]]
    return out + wrong
if os.environ.get("RANK") == "1":
    FeedForward.forward = sick
"""


@pytest.mark.slow
def test_a_job_ends_with_its_own_code_if_a_rank_is_sick_twice(tmp_path: Path) -> None:
    """And a rank that lies once goes on, with a note."""
    module = tmp_path / "sick.py"
    module.write_text(SICK)
    words = ["--training.steps", 4, "--training.global_batch_size", 6]
    own = ["--experimental.custom_import", module, "--sentry.interval", 2]
    train_on_ranks(tmp_path / "plain", *words, ranks=3)
    train_on_ranks(tmp_path / "watched", *words, "--sentry.interval", 1, ranks=3)
    # with fingerprints of weights and optimizer states
    assert records(tmp_path / "watched", "steps") == records(tmp_path / "plain", "steps")
    assert losses(tmp_path / "watched") == losses(tmp_path / "plain")
    train_on_ranks(tmp_path / "once", *words, *own, ranks=3, SICK="once")
    assert losses(tmp_path / "once") == losses(tmp_path / "plain")
    (note,) = [row for row in records(tmp_path / "once", "history") if row["event"] == "sentry"]
    assert (note["verdict"], note["step"]) == ("transient", 2)
    assert note["ranks"] == [{"rank": 1, "host": socket.gethostname(), "gpu": ""}]
    ended = train_on_ranks(tmp_path / "twice", *words, *own, ranks=3, code=7, SICK="twice")
    assert "rank 1 (on " in ended.stdout + ended.stderr
    *_, note, end = records(tmp_path / "twice", "history")
    assert (note["event"], note["verdict"], note["part"]) == (
        "sentry",
        "sick",
        "forward of layers.0",
    )
    assert end["reason"].startswith("failed: rank 1 (on ")
    assert [one["rank"] for one in note["ranks"]] == [1]
