"""Measured rates: between points, in files, and in a plan."""

import math
from dataclasses import replace

import pytest

from meshwright.commands.plan.devices import DEVICES, find_device
from meshwright.commands.plan.figures import step_time
from meshwright.commands.plan.ledger import Record
from meshwright.commands.plan.plan import _rates
from meshwright.commands.plan.rates import (
    Measured,
    along,
    assumed,
    between,
    read_rates,
    write_rates,
)
from meshwright.commands.plan.simulate import Simulation
from meshwright.commands.plan.trace import Collective, Operator
from meshwright.config.job_config import JobConfig
from meshwright.system.errors import ConfigError

RATES = Measured(
    "measured on a test",
    {"bfloat16": 1e12},
    link=1e9,
    network=0.0,
    device="a test",
    is_gpu=False,
    ranks=2,
    host_s=1e-6,
    operators={"mm bfloat16": [(3e6, 1e9, 1e-3), (3e7, 1e11, 1e-1)], "add ": [(8.0, 0.0, 1e-5)]},
    collectives={"all_gather": [(1e3, 1e-4), (1e6, 1e-2)]},
)

H100 = "NVIDIA H100 80GB HBM3"


def _operator(name: str, dtype: str, num_bytes: int, flops: int) -> Operator:
    return Operator(name, "forward", "", 1, flops, num_bytes, dtype, is_fsdp=False)


def test_an_operator_takes_the_time_of_those_nearest_in_size() -> None:
    points = RATES.operators["mm bfloat16"]
    assert between(points, 3e6, 1e9) == pytest.approx(1e-3)
    assert between(points, 3e6, 2e9) == pytest.approx(2e-3, rel=1e-3)
    faster = [(1e6, 0.0, 1e-3), (4e6, 0.0, 2e-3)]  # by half per byte, where it is larger
    assert between(faster, 2e6, 0) == pytest.approx((2e-3 * 1e-3) ** 0.5)
    tiny = [(4.0, 0.0, 1e-5)] * 9  # 10 microseconds, but not per 4 bytes
    large = [(1e6, 0.0, 1e-3), (2e6, 0.0, 2e-3), (4e6, 0.0, 4e-3)]
    assert between([*tiny, *large], 1.28e8, 0) == pytest.approx(0.128, rel=0.01)
    # scaled by bytes, the tiny one would be 0.25 s; it counts least, since it is the farthest
    assert between([tiny[0], *large[:2]], 1e5, 0) == pytest.approx(1e-4, rel=0.05)


def test_operators_that_were_not_measured_take_the_time_of_like_ones() -> None:
    known = RATES.operator_seconds(_operator("mm", "bfloat16", 3_000_000, 10**9))
    assert known == pytest.approx(1e-3 + RATES.host_s)
    assert RATES.operator_seconds(_operator("bmm", "bfloat16", 3_000_000, 10**9)) == known
    assert RATES.operator_seconds(_operator("mm", "float16", 3_000_000, 10**9)) == known
    other = RATES.operator_seconds(_operator("silu", "bfloat16", 8, 0))
    assert other == pytest.approx(1e-5 + RATES.host_s)


def test_heads_of_a_width_that_was_not_measured_are_like_others_of_their_type() -> None:
    points = {
        "attention_64 float32": 4e-3,
        "attention_96 float32": 3e-3,
        "attention_64 bfloat16": 1e-3,
        "attention_backward_96 bfloat16": 2e-3,
    }
    operators = {kind: [(1e6, 1e9, seconds)] for kind, seconds in points.items()}
    rates = replace(RATES, operators=operators, host_s=0.0)
    found = rates.operator_seconds(_operator("attention_96", "bfloat16", 1_000_000, 10**9))
    assert found == pytest.approx(1e-3)


def test_collectives_are_straight_between_points_and_in_proportion_beyond() -> None:
    curve = [(10.0, 1.0), (20.0, 3.0)]
    assert [along(curve, x) for x in (5, 10, 15, 20, 40)] == [1, 1, 2, 3, 6]
    assert along([], 5) == 0
    near = Collective("all_reduce", "dp", range(2), 0, 2e6, "", "", 1, is_fsdp=True)
    assert RATES.collective_seconds(near, per_node=8) == pytest.approx(2e-2)
    own = replace(RATES, collectives=RATES.collectives | {"fsdp all_reduce": [(1e6, 1e-3)]})
    assert own.collective_seconds(near, per_node=8) == pytest.approx(2e-3)
    assert own.collective_seconds(replace(near, is_fsdp=False), 8) == pytest.approx(2e-2)


@pytest.mark.parametrize(("is_gpu", "seconds"), [(False, 2e-2 + 2 * (1e-3 + 1e-6)), (True, 2e-2)])
def test_only_gpus_gather_parameters_beside_computation(is_gpu, seconds) -> None:
    products = [_operator("mm", "bfloat16", 3_000_000, 10**9) for _ in range(2)]
    gather = Collective("all_gather", "fsdp", range(2), 0, 2e6, "forward", "", 1, is_fsdp=True)
    step = Simulation(0, Record(), [gather, *products], 1, {})
    rates = replace(RATES, is_gpu=is_gpu)
    assert step_time(step, 1, rates, per_node=8).seconds == pytest.approx(seconds, rel=1e-3)


def test_a_file_gives_back_what_was_measured(tmp_path) -> None:
    path = tmp_path / "rates.json"
    write_rates(RATES, path)
    assert read_rates(path, find_device("cpu"), 2) == RATES


@pytest.mark.parametrize(
    ("device", "ranks", "text", "what"),
    [
        ("cpu", 4, "", "measured with 2 ranks at once, and the job has 4"),
        ("h100", 2, "", "was measured on a test"),
        ("cpu", 2, "{}", "no file of rates .source: Field required."),
        ("cpu", 2, "[[", "no file of rates .Invalid JSON"),
    ],
)
def test_rates_of_others_are_refused(tmp_path, device, ranks, text, what) -> None:
    path = tmp_path / "rates.json"
    write_rates(RATES, path)
    path.write_text(text or path.read_text())
    with pytest.raises(ConfigError, match=what):
        read_rates(path, find_device(device), ranks)


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"peak": {"bfloat16": 0.0}}, "peak.bfloat16"),
        ({"link": -1.0}, "link"),
        ({"host_s": math.nan}, "host_s"),
        ({"ranks": 0}, "ranks"),
        ({"operators": {}}, "operators"),
        ({"operators": {"mm bfloat16": []}}, "operators.mm bfloat16"),
        ({"operators": {"mm bfloat16": [(-1.0, 1.0, 1.0)]}}, "operators.mm bfloat16.0.0"),
        ({"operators": {"mm bfloat16": [(1.0, 1.0, 0.0)]}}, "operators.mm bfloat16.0.2"),
        ({"collectives": {"all_gather": [(0.0, 1.0)]}}, "collectives.all_gather.0.0"),
    ],
)
def test_figures_that_no_device_has_are_refused(tmp_path, part, place) -> None:
    path = tmp_path / "rates.json"
    write_rates(replace(RATES, **part), path)
    with pytest.raises(ConfigError, match=f"no file of rates .{place}: [^\n]*.\n  fix: write one"):
        read_rates(path, find_device("cpu"), 2)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GH200 480GB", ""),
        ("NVIDIA H100 PCIe", ""),
    ],
)
def test_rates_of_a_gpu_are_for_jobs_on_that_one(tmp_path, name, device) -> None:
    path = tmp_path / "rates.json"
    write_rates(replace(RATES, source=f"measured on {name}", device=name, is_gpu=True), path)
    read_rates(path, find_device("80"), 2)
    for other in DEVICES:
        if other == device:
            read_rates(path, find_device(other), 2)
            continue
        with pytest.raises(ConfigError, match=f"was measured on {name}"):
            read_rates(path, find_device(other), 2)


def test_rates_of_one_gpu_know_no_collectives(tmp_path) -> None:
    path = tmp_path / "rates.json"
    write_rates(replace(RATES, device=H100, is_gpu=True, ranks=1, collectives={}), path)
    assert read_rates(path, find_device("h100"), 1).collectives == {}
    with pytest.raises(ConfigError, match="no times of collectives, and the job has 8 ranks"):
        read_rates(path, find_device("h100"), 8)


def test_more_ranks_than_a_node_need_a_known_network(tmp_path) -> None:
    path = tmp_path / "rates.json"
    write_rates(replace(RATES, device=H100, is_gpu=True), path)
    config = JobConfig()
    assert _rates(config, find_device("80"), path, 8)[0].network == 0
    assert _rates(config, find_device("h100"), path, 16)[0].network == 25e9
    with pytest.raises(ConfigError, match="--device = .* its network is not known"):
        _rates(config, find_device("80"), path, 16)


def _gather(ranks: range, kind: str = "all_gather") -> Collective:
    return Collective(kind, "fsdp", ranks, 0, 1e9, "", "", 1, is_fsdp=True)


@pytest.mark.parametrize(
    ("ranks", "kind", "width"),
    [
        (range(8), "all_gather", 450e9),
        (range(16), "all_gather", 400e9),  # eight cards of a node
        (range(0, 64, 8), "all_gather", 50e9),  # beside tensor parallelism of 8: one
        (range(0, 64, 2), "all_gather", 200e9),
        (range(6, 12), "all_gather", 100e9),  # two ranks in one node, four in the next
        (range(16), "send", 50e9),  # a message has one sender
        (range(8), "send", 450e9),
    ],
)
def test_a_group_uses_the_network_cards_of_its_ranks_in_a_node(ranks, kind, width) -> None:
    bound, _ = assumed(find_device("h100"))
    found = bound.collective_seconds(_gather(ranks, kind), per_node=8)
    assert found == pytest.approx(1e9 / width)


def test_compiled_blocks_move_fewer_bytes_between_pointwise_operators() -> None:
    eager, compiled = (assumed(find_device("h100"), is_compiled=one)[1] for one in (False, True))
    pointwise = _operator("mul", "bfloat16", 10**9, 0)
    in_block, matmul = replace(pointwise, module="layers.0"), _operator("mm", "bfloat16", 8, 10**12)
    copy = replace(in_block, is_fsdp=True)
    assert compiled.operator_seconds(in_block) == eager.operator_seconds(in_block) / 2
    for other in (pointwise, copy, matmul):
        assert compiled.operator_seconds(other) == eager.operator_seconds(other)


def test_an_estimate_is_slower_than_the_bound_and_cpus_have_none() -> None:
    for device in DEVICES.values():
        bound, estimate = assumed(device)
        for name in ("mm", "attention"):
            work = _operator(name, "bfloat16", 10**6, 10**12)
            assert estimate.operator_seconds(work) > bound.operator_seconds(work)
        assert estimate.network < bound.network
    assert assumed(find_device("cpu")) is None


@pytest.mark.parametrize(
    ("word", "peak"), [("h100", 67e12), ("a100", 19.5e12), ("mi300x", 163.4e12), ("b200", 75e12)]
)
def test_float32_has_a_peak_of_its_own(word, peak) -> None:
    assert find_device(word).peak("float32") == peak < find_device(word).peak("bfloat16") / 7
