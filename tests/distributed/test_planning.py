"""Plans beside torch's allocator, real ranks and hand counts."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from meshwright.commands.plan import simulate
from meshwright.commands.plan.figures import Memory, flops, traffic
from meshwright.commands.plan.ledger import PURPOSES
from meshwright.parallelisms.meshes import build_meshes
from meshwright.parallelisms.shards import local_box
from meshwright.system.modules import has_torch
from meshwright.system.processes import in_processes
from meshwright.train.trainer import Trainer
from tests.helpers.planning import CASES, OF_EXPERTS, Case, operators, planned
from tests.helpers.slow import slow

EVERYDAY = "FSDP 2"
SLOW = (
    "FSDP 2 x TP 2",
    "selective by op",
    "accumulation, reduced once",
    "reshard never",
    "1F1B, a long step",
)
"""The rest: benchmarks/planning.py."""
PEAK_IN_LOSS = ("FSDP 2 x TP 2", "accumulation, reduced once")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def figures(request) -> dict[str, dict[str, object]]:
    """Of the cases that tests need, simulated and allocated, in processes without another process
    group."""
    mine = [item for item in request.session.items if item.path == request.path]
    has_slow = any(item.get_closest_marker("slow") for item in mine)
    names = [EVERYDAY, *(SLOW if has_slow else ())]
    words = [sys.executable, "-m", "tests.helpers.planning", *names]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", [EVERYDAY, *slow(*SLOW)])
def test_a_plan_is_what_torch_allocates(name, figures) -> None:
    found = figures[name]
    assert "error" not in found, found.get("error")
    if "1F1B" in name and has_torch(2, 15):  # it frees activations once they are sent
        assert found["planned"] == pytest.approx(found["allocated"], rel=0.02)
    else:
        assert found["planned"] == found["allocated"]
    if name in PEAK_IN_LOSS:
        assert found["module"] == "loss"
    ledger = found["by_purpose"]
    assert sum(ledger.values()) == found["planned"]
    assert ledger["unattributed"] < 0.01 * found["planned"]


REAL = ("FSDP 2",)


def _on_a_real_rank(case: Case, build: Callable = simulate.eager_trainer) -> dict[str, object]:
    """Of this gloo rank, by the same ledger."""
    plan = case.plan()
    with mock.patch.object(simulate, "eager_trainer", build):
        simulation = simulate.run_step(plan, build_meshes(plan.dims, "cpu"), None)
    totals = Counter()
    for event in simulation.record.events:
        totals[simulation.record.items[event.item].purpose] += event.delta
        assert all(size >= 0 for size in totals.values())
    memory = Memory(simulation.record)
    assert sum(memory.curve()[0].values()) > 0
    peaks = memory.by_place()  # by microbatch: of the first update it is 0
    assert peaks["update (model)  0"] > peaks["update (model)  1"]  # which makes the state
    return {
        "peak": memory.peak.num_bytes,
        "traffic": [vars(row) for row in traffic(simulation, 8)],
        "flops": flops(simulation),
        "operators": operators(simulation),
    }


@pytest.mark.parametrize("name", REAL)
def test_a_plan_is_what_real_ranks_have_and_send(name, figures, on_ranks) -> None:
    planned = figures[name]
    assert "error" not in planned, planned.get("error")
    real = on_ranks(2, _on_a_real_rank, CASES[name])[0]
    assert abs(planned["planned"] / real["peak"] - 1) <= 0.005
    assert planned["traffic"] == real["traffic"]
    assert planned["flops"] == real["flops"]
    of_gloo = {"copy_ float32"}  # makes copies of its own
    assert planned["operators"].keys() == real["operators"].keys()
    for kind in planned["operators"].keys() - of_gloo:
        assert planned["operators"][kind] == real["operators"][kind], kind


_eager_trainer = simulate.eager_trainer


@torch.no_grad()
def _crowded(*given: object) -> Trainer:
    """Whose scores are equal: every token goes to the first experts, which are on rank 0."""
    trainer = _eager_trainer(*given)
    for parameter in trainer.model.parameters():
        local_box(parameter)[0].zero_()
    for stage in trainer.model.stages:
        stage.init_state()
    return trainer


@pytest.mark.slow
def test_the_worst_imbalance_is_what_a_rank_with_all_tokens_has(on_ranks) -> None:
    cases = [Case("dp_shard 2", OF_EXPERTS, imbalance=f) for f in (1.0, 1.5, 2.0)]
    real = on_ranks(2, _on_a_real_rank, cases[0], _crowded)
    even, between, worst = in_processes([(case,) for case in cases], planned, 2)
    peaks = [one["peak"] for one in real]
    assert abs(worst["planned"] / peaks[0] - 1) <= 0.005
    assert peaks[1] < even["planned"] < between["planned"] < worst["planned"]
    assert worst["flops"] == real[0]["flops"]
    assert worst["traffic"] == real[0]["traffic"]
    assert simulate.worst_imbalance(cases[0].plan()) == 2


def test_flops_and_traffic_equal_hand_counts(figures) -> None:
    plan = CASES["FSDP 2"].plan()
    tokens, args = 2 * 128, plan.model_args
    table = args.table
    matrices = sum(p.numel * p.token_share for p in table.parameters.values())
    found = figures["FSDP 2"]
    # the loss computes its gradients in forward, as soon as a chunk's logits are there
    of_output = 4 * table.parameters["output.weight"].numel * tokens
    assert found["flops"]["matrices, forward"] == 2 * matrices * tokens + of_output
    assert found["flops"]["matrices, backward"] == 4 * matrices * tokens - of_output
    pairs = args.n_layers * args.n_heads * 128 * tokens * args.dim // args.n_heads
    assert found["flops"]["attention, forward"] == 4 * pairs
    assert found["flops"]["attention, backward"] == 10 * pairs
    sent = {(row["axis"], row["kind"]): row["sent_bytes"] for row in found["traffic"]}
    bf16, fp32 = 2 * table.num_params, 4 * table.num_params
    again = 2 * sum(p.numel for n, p in table.parameters.items() if n.startswith("layers."))
    last = 2 * sum(p.numel for n, p in table.parameters.items() if n.startswith("layers.3."))
    # all in forward; in backward all but the embedding, whose gradient needs none, and the last
    # layer and the output, whose weights are kept
    assert sent["fsdp", "all_gather"] == (bf16 + again - last) / 2
    assert sent["fsdp", "reduce_scatter"] == fp32 / 2


@pytest.mark.slow
def test_parameters_that_stay_gathered_are_gathered_once_a_step(figures) -> None:
    n_layers, found = CASES["reshard never"].plan().model_args.n_layers, figures["reshard never"]
    calls = {(row["axis"], row["kind"]): row["calls"] for row in found["traffic"]}
    assert calls["fsdp", "all_gather"] == n_layers + 2  # in a step of three microbatches


@pytest.mark.slow
def test_purposes_are_all_used_by_some_job(figures) -> None:
    found = {purpose for one in figures.values() for purpose, n in one["by_purpose"].items() if n}
    assert found >= set(PURPOSES) - {"unattributed"}
