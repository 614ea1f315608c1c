"""Which ranks each mesh holds, and how many process groups are made for it, without other ranks."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from meshwright.config.loader import load_config
from meshwright.parallelisms import meshes as process_group
from meshwright.parallelisms.meshes import Meshes, build_meshes, start_process_group
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.train.build import build_model
from tests.helpers.job import mesh
from tests.helpers.resolved import resolved
from tests.helpers.tiny import fake_ranks

WHOLE = mesh(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2)


@contextmanager
def meshes_of_rank(rank: int, dims: ParallelDims) -> Iterator[tuple[Meshes, list[list[int]]]]:
    """The meshes, and the ranks of each group that was made beside the default one."""
    made: list[list[int]] = []
    new_group = dist.new_group

    def noted(ranks: list[int], **options: object) -> dist.ProcessGroup:
        made.append(ranks)
        return new_group(ranks, **options)

    with patch.object(dist, "new_group", noted), fake_ranks(dims.num_ranks, rank):
        yield build_meshes(dims, "cpu"), made


@pytest.mark.parametrize(
    ("dims", "num_groups"),
    [
        (WHOLE, 8),  # dp, cp, loss, pp, dp_replicate, fsdp, tp, stage
        (mesh(), 0),
        (mesh(dp_shard=8), 1),  # of this rank alone
        (mesh(dp_replicate=2, dp_shard=4), 3),
        (mesh(dp_shard=2, cp=2, tp=2), 5),
        (mesh(dp_shard=2, pp=2, tp=2), 5),
    ],
)
def test_no_group_is_made_twice_and_each_gets_the_timeout_once(dims, num_groups) -> None:
    with (
        meshes_of_rank(0, dims) as (meshes, made),
        patch.object(process_group, "_set_timeout") as given,
    ):
        process_group.set_timeout(meshes, 5)
        groups = [dist.get_process_group_ranks(call.args[1]) for call in given.call_args_list]
    assert len(made) == len({tuple(ranks) for ranks in made}) == num_groups
    assert sorted(groups) == sorted([*made, list(range(dims.num_ranks))])


def test_a_pipelines_first_call_is_of_all_its_ranks(monkeypatch) -> None:
    """NCCL makes a group's communicator in it."""
    words = ["--job.config_file", "tests/integration/tiny.toml", "--model.args.n_layers", "2"]
    words += ["--parallelism.pipeline_parallel_degree", "2", "--training.global_batch_size", "8"]
    plan = resolved(load_config(words), 2)
    groups = []
    with meshes_of_rank(1, plan.dims) as (meshes, _):
        monkeypatch.setattr(dist, "all_reduce", lambda *_, group: groups.append(group))
        build_model(plan, meshes, torch.device("cpu"))
        assert groups == [meshes.pp.get_group()]


def test_which_ranks_each_mesh_holds() -> None:
    # rank 21 = 0b10101: pp 1, dp_replicate 0, dp_shard 1, cp 0, tp 1
    with meshes_of_rank(21, WHOLE) as (meshes, _):
        for name, ranks in (
            *(("world", range(32)), ("stage", range(16, 32)), ("loss", range(17, 32, 2))),
            *(("dp", [17, 21, 25, 29]), ("cp", [21, 23]), ("tp", [20, 21]), ("pp", [5, 21])),
        ):
            assert dist.get_process_group_ranks(getattr(meshes, name).get_group()) == [*ranks], name
        copies, shards = meshes.fsdp.get_all_groups()
        assert dist.get_process_group_ranks(copies) == [21, 29]
        assert dist.get_process_group_ranks(shards) == [17, 19, 21, 23]
        assert meshes.fsdp.mesh.tolist() == [[17, 19, 21, 23], [25, 27, 29, 31]]
        assert meshes.dp.get_local_rank() == 1
        assert [*meshes.parameters.get_coordinate()] == [1, 0, 2, 1]


def entry(name: str, number: int, state: str, *, is_p2p: bool = False) -> dict[str, object]:
    """Of a flight recorder, as torch dumps it."""
    return {
        "profiling_name": name,
        "process_group": ["7", "mesh_tp"],
        "is_p2p": is_p2p,
        "collective_seq_id": 0 if is_p2p else number,
        "p2p_seq_id": number if is_p2p else 0,
        "input_sizes": [[4]],
        "state": state,
        "time_created_ns": number,
    }


def test_of_nccl_the_first_collectives_that_a_gpu_has_not_completed_are_told(monkeypatch) -> None:
    """The host is far ahead: the last that it began say nothing. NCCL has a recorder of its own."""
    done = [entry("nccl:all_gather", number, "completed") for number in (1, 2)]
    begun = [entry("nccl:reduce_scatter", number, "scheduled") for number in range(3, 40)]
    recorded = {
        "_dump_nccl_trace_json": [*begun, *done, entry("nccl:send", 40, "started", is_p2p=True)],
        "_dump_fr_trace_json": [entry("gloo:all_reduce", 41, "completed")],
    }
    for name, entries in recorded.items():
        text = json.dumps({"entries": entries})
        dump = lambda *_, text=text: text.encode()  # noqa: E731
        monkeypatch.setattr(torch._C._distributed_c10d, name, dump, raising=False)
    title, first, *more = process_group.last_collectives().splitlines()
    assert "not completed, 38 in all" in title
    assert first == "  nccl:reduce_scatter [[4]], number 3 of group 7: scheduled"
    assert more[-2:] == [
        "last collectives, newest first:",
        "  gloo:all_reduce [[4]], number 41 of group 7: completed",
    ]
    assert len(more) == process_group.NUM_SHOWN + 1

    none = b'{"nccl_comm_state": {}}'  # of a buffer that is off, or of no collective yet
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", lambda *_: none)
    assert process_group.last_collectives().count("\n") == 1


def test_ranks_that_torchrun_starts_again_do_not_look_for_dead_ones(monkeypatch) -> None:
    """It keeps its store, with the addresses of the first attempt's ranks."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores: list[dist.Store] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, store, **__: stores.append(store))
    given = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port}
    given |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    for attempt in range(2):
        for name, value in (given | {"TORCHELASTIC_RESTART_COUNT": attempt}).items():
            monkeypatch.setenv(name, str(value))
        start_process_group(torch.device("cpu"), 60)
        assert not stores[-1].check(["address of rank 1"])
        stores[-1].set("address of rank 1", "1.2.3.4")


def test_a_rank_that_cannot_connect_ends_the_meeting_and_says_what_may_help(monkeypatch) -> None:
    """gloo waits without a limit for a rank that has told its address and is gone."""
    over = threading.Event()
    monkeypatch.setattr(process_group, "LATE_S", -0.9)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: over.wait(60))
    with pytest.raises(RuntimeError, match=r"timed out: .* connected for 1 s\n  fix: open every "):
        start_process_group(torch.device("cpu"), 1)
    over.set()
    for address, fix in (
        ("10.7.0.1", "open every port "),
        ("127.0.1.1", "set GLOO_SOCKET_IFNAME "),
    ):
        refused = RuntimeError(f"Gloo connectFullMesh failed with [...], remote=[{address}]:1$1")
        monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=refused))
        with pytest.raises(RuntimeError) as caught:
            start_process_group(torch.device("cpu"), 60)
        assert caught.value.__notes__[0].startswith(f"  fix: {fix}")


def test_a_rank_that_does_not_reach_the_others_store_says_so(monkeypatch) -> None:
    """torch would try for longer than its limit, and print a page of C++."""
    monkeypatch.setattr(process_group, "STORE_S", 0.1)
    monkeypatch.setattr(process_group, "TRY_S", 0.1)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(closed.getsockname()[1])}
        for name, value in ({"RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"} | at).items():
            monkeypatch.setenv(name, value)
        words = (
            "does not reach {MASTER_ADDR}:{MASTER_PORT}, where all ranks meet: Connection refused"
        )
        with pytest.raises(RuntimeError, match=f"{words.format(**at)}\n  fix: open every port"):
            start_process_group(torch.device("cpu"), 60)
