"""Context parallelism of layers with a window: who has which tokens, and what bytes are sent."""

import itertools

import pytest
import torch

from meshwright.commands.plan.devices import estimated, find_device
from meshwright.commands.plan.report import plan_rank
from meshwright.config.loader import load_config
from meshwright.parallelisms.context_parallel import attend
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.parallelisms.sequence_parts import chunks_of
from meshwright.parallelisms.window_context import Halo
from tests.helpers.operators import Operators
from tests.helpers.slow import slow
from tests.helpers.tiny import meshes_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_a_rank_has_the_tokens_that_its_windows_see_once_and_no_others(cp, length) -> None:
    seq_len = 2 * cp * length
    for window in range(1, seq_len):
        halos = [Halo(window, length, rank, cp) for rank in range(cp)]
        for rank, halo in enumerate(halos):
            have, wanted = halo.positions(CPU).tolist(), set()
            for chunk in chunks_of(rank, cp):
                start, end = chunk * length, (chunk + 1) * length
                seen = [place for part in halo.seen(chunk) for place in have[part]]
                assert sorted(seen) == [*range(max(0, start - window + 1), end)]
                wanted |= {*seen}
            assert sorted(have) == sorted(wanted)
            assert len(have) - 2 * length <= 2 * (window - 1)
        for sender, receiver in itertools.product(range(cp), repeat=2):
            assert {chunk for chunk, _ in halos[0].sent(sender, receiver)} <= {
                *chunks_of(sender, cp)
            }


def test_gpt_oss_gets_254_tokens_of_114688() -> None:
    received = [sum(n for _, n in Halo(128, 8192, rank, 8).tails) - 16384 for rank in range(8)]
    assert received == [127, *[254] * 6, 127]


SEQ_LEN, BATCH, HEADS, KV_HEADS, WIDTH = 32, 3, 4, 2, 8


def _bytes_sent(cp: int, window: int) -> list[tuple[int, int]]:
    """Bytes that a rank sends in forward and backward and that it gets, of each collective."""
    mesh = meshes_of(ParallelDims(dp_replicate=1, dp_shard=1, cp=cp), "cpu").cp
    heads = (HEADS, KV_HEADS, KV_HEADS)
    shapes = [(BATCH, n, SEQ_LEN // cp, WIDTH) for n in heads]
    q, k, v = (torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    found = []

    def look(name: str, _types: object, args: tuple, outputs: list[torch.Tensor]) -> None:
        if "c10d" in name and not name.endswith(("wait_tensor", "_wrap_tensor_autograd")):
            assert name == "_c10d_functional.all_to_all_single"
            rows, by, to, _group = args
            assert by[mesh.get_local_rank()] == to[mesh.get_local_rank()] == 0
            assert (sum(to), sum(by)) == (len(rows), len(outputs[0]))
            found.append((rows.nbytes, outputs[0].nbytes))

    with Operators(look):
        attend(q, k, v, scale=1.0, window=window, mesh=mesh).sum().backward()
    return found


@pytest.mark.parametrize("cp", [4, *slow(2, 8)])
def test_ranks_send_what_windows_see_and_its_gradients_back(cp, on_ranks) -> None:
    length = SEQ_LEN // (2 * cp)
    for window in (2, length, length + 1, length + 2, 3 * length, SEQ_LEN - 1):
        every = on_ranks(cp, _bytes_sent, cp, window)
        token = 2 * BATCH * KV_HEADS * WIDTH * 2  # keys and values in bf16
        for rank, ((sent, got), *backward) in enumerate(every):
            assert backward == [(got, sent)]
            tokens = got // token
            if window - 1 <= length:
                assert tokens == (window - 1) * (2 if 0 < rank < cp - 1 else 1)
            assert tokens <= 2 * (window - 1)
        assert sum(one[0][0] for one in every) == sum(one[0][1] for one in every)
    assert not any(on_ranks(cp, _bytes_sent, cp, 1))


@pytest.mark.parametrize(("rank", "tokens"), [(1, 2 * 127), *slow((0, 127), (3, 127))])
def test_a_plan_counts_the_bytes_and_the_pairs_of_windows(rank, tokens) -> None:
    cp, seq_len, window, num_layers, kv_heads, width = 4, 4096, 128, 2, 4, 32
    words = {
        "job.config_file": "train_configs/debug_olmo3.toml",
        "compile.enable": "false",
        "model.args.n_layers": num_layers,  # the third would be a full one
        "model.args.window": window,
        "training.seq_len": seq_len,
        "training.local_batch_size": 2,
        "training.global_batch_size": 2,
        "training.mixed_precision_param": "bfloat16",
        "parallelism.context_parallel_degree": cp,
    }
    config = load_config([f"--{key}={value}" for key, value in words.items()])
    planned = plan_rank(config, cp, rank, estimated(find_device("h100")))
    (sent,) = [one for one in planned.traffic if one.axis == "cp" and one.kind == "all_to_all"]
    of_layer = tokens * 2 * 2 * kv_heads * width * 2  # of two sequences keys and values, in bf16
    assert (sent.calls, sent.sent_bytes) == (2 * num_layers, 2 * num_layers * of_layer)
    # a kernel computes blocks of 128 x 128: the one of the query, and the one before
    pairs = num_layers * 2 * 2 * kv_heads * seq_len // cp * 256
    assert planned.flops["attention, forward"] == pytest.approx(4 * width * pairs, rel=0.01)
