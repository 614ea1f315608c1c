"""Ranks that wait for work leave the machine to others."""

from pathlib import Path

import torch.distributed as dist


def _gloo_loops() -> int:
    """Threads that wake up a hundred times a second, once there are several groups."""
    groups = [dist.new_group(backend="gloo") for _ in range(3)]
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    for group in groups:
        dist.barrier(group)
        dist.destroy_process_group(group)
    return names.count("gloo_tcp_loop")


def test_all_groups_of_a_rank_share_one_gloo_thread(on_ranks) -> None:
    assert on_ranks(2, _gloo_loops) == [1, 1]
