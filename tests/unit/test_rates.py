"""The time of operators, of collectives and of a step at the rates of a device."""

import re
from dataclasses import replace

import pytest

from meshwright.commands.plan.devices import (
    CAST,
    COLLECTIVE_S,
    DEVICES,
    FLOAT8,
    FUSED,
    LAUNCH_S,
    SHARED,
    WAIT_S,
    Rates,
    error_of_time,
    estimated,
    find_device,
    rates_of,
)
from meshwright.commands.plan.figures import entry_seconds, ring_width, step_time
from meshwright.commands.plan.ledger import Record
from meshwright.commands.plan.simulate import Simulation, plan_job
from meshwright.commands.plan.trace import Moment, TraceEntry
from meshwright.config.loader import load_config
from tests.helpers.jobs import ROOT

H100 = find_device("h100")
AT = Moment("forward", "", 1)


def _operator(name: str, dtype: str, num_bytes: int, flops: int) -> TraceEntry:
    return TraceEntry(name, AT, False, num_bytes, flops, dtype)


def _collective(kind: str, ranks: range, sent_bytes: float, *, is_fsdp: bool) -> TraceEntry:
    return TraceEntry(kind, AT, is_fsdp, 0, axis="fsdp", ranks=ranks, sent_bytes=sent_bytes)


@pytest.mark.parametrize(
    ("ranks", "is_message", "width"),
    [
        (range(8), False, 450e9),
        (range(16), False, 400e9),  # eight cards of a node
        (range(0, 64, 8), False, 50e9),  # beside tensor parallelism of 8: one
        (range(6, 12), False, 100e9),  # two ranks in one node, four in the next
        (range(16), True, 50e9),  # a message has one sender
        (range(8), True, 450e9),
    ],
)
def test_a_group_uses_the_network_cards_of_its_ranks_in_a_node(ranks, is_message, width) -> None:
    rates = replace(estimated(H100), link_bytes_per_s=450e9, network_bytes_per_s=50e9)
    assert ring_width(ranks, rates, is_message=is_message) == pytest.approx(width)
    kind = "send" if is_message else "all_gather"
    entry = _collective(kind, ranks, 1e9, is_fsdp=True)
    assert entry_seconds(entry, rates) == pytest.approx(COLLECTIVE_S + 1e9 / width)


def test_a_group_is_no_faster_than_the_links_in_a_node() -> None:
    rates = replace(estimated(H100), link_bytes_per_s=450e9, network_bytes_per_s=100e9)
    assert ring_width(range(16), rates) == 450e9  # eight cards have 800


@pytest.mark.parametrize(("is_fsdp", "waits"), [(True, 0), (False, 1)])
def test_only_fsdp_gathers_beside_computation(is_fsdp, waits) -> None:
    rates = estimated(H100)
    matmuls = [_operator("mm", "bfloat16", 8, 10**12) for _ in range(2)]
    gather = _collective("all_gather", range(2), 1e6, is_fsdp=is_fsdp)
    plan = plan_job(load_config(["debug_model"]), 2, is_gpu=True)
    step = Simulation(Record(), [gather, *matmuls], 1, plan.config.num_microbatches - 1)
    matmul, waited = (entry_seconds(one, rates) for one in (matmuls[0], gather))
    found = step_time(step, plan, rates)
    each = 2 * matmul + waits * waited
    assert found.seconds == pytest.approx(plan.config.num_microbatches * each)


def test_waits_of_the_host_count_in_every_microbatch() -> None:
    rates = estimated(H100)
    matmul = _operator("mm", "bfloat16", 8, 10**12)
    wait = _operator("exchange_counts", "int64", 8, 0)
    plan = plan_job(load_config(["debug_model"]), 2, is_gpu=True)
    found = step_time(Simulation(Record(), [matmul, wait], 1, 3), plan, rates)
    assert found.waits == 4
    each = entry_seconds(matmul, rates) + COLLECTIVE_S + WAIT_S
    assert found.seconds == pytest.approx(4 * each)


def test_compiled_blocks_move_fewer_bytes_between_pointwise_operators() -> None:
    eager, compiled = (estimated(H100, is_compiled=one) for one in (False, True))
    pointwise = _operator("mul", "bfloat16", 10**9, 0)
    in_block = replace(pointwise, at=AT._replace(module="layers.0"))
    matmul = _operator("mm", "bfloat16", 8, 10**12)
    matmul_in_block = replace(in_block, name="mm", flops=1)
    copy = replace(in_block, is_fsdp=True)
    assert entry_seconds(in_block, compiled) == entry_seconds(in_block, eager) / 2
    for other in (pointwise, copy, matmul, matmul_in_block):
        assert entry_seconds(other, compiled) == entry_seconds(other, eager)


def test_rates_of_attention_experts_and_float8_are_their_own() -> None:
    work = _operator("mm", "bfloat16", 8, 10**12)
    rates, flash = estimated(H100), estimated(H100, kernel="flash")
    parts = rates.parts

    def seconds(rates=rates, **changes: object) -> float:
        return 989 * entry_seconds(replace(work, **changes), rates)

    assert seconds() == pytest.approx(1 / parts.matmul)
    assert seconds(name="grouped_matmul") == pytest.approx(1 / parts.grouped)
    for name, way in (("attention", 0), ("attention_backward", 1)):
        assert seconds(name=name, head_width=128) == pytest.approx(1 / parts.wide[way])
        assert seconds(name=name, head_width=64) == pytest.approx(1 / parts.narrow[way])
        masked = seconds(name=name, head_width=128, pairs=0.5)
        assert masked == pytest.approx(0.5 / parts.wide[way])
        assert seconds(flash, name=name, head_width=128) == pytest.approx(1 / parts.flash[way])
    assert seconds(name="flex_attention", head_width=128) == pytest.approx(1 / parts.flash[0])
    for recipe, part in FLOAT8.items():
        own = estimated(H100, recipe=recipe)
        assert seconds(own, is_float8=True) == pytest.approx(1 / 2 / part)
    added = entry_seconds(replace(work, is_float8=True, read_bytes=10**9), rates)
    added -= entry_seconds(replace(work, is_float8=True), rates)
    assert added == pytest.approx(CAST * 1e9 / (parts.memory * 3.35e12))


def test_no_operator_is_faster_than_its_launch() -> None:
    assert entry_seconds(_operator("add", "bfloat16", 8, 0), estimated(H100)) == LAUNCH_S


def test_ranks_beside_each_other_are_slower_on_measured_devices_only() -> None:
    for name, part in (("h100", SHARED), ("a100", 1.0)):
        alone, shared = (estimated(find_device(name), is_shared=one) for one in (False, True))
        assert shared.flops_per_s == pytest.approx(part * alone.flops_per_s)
        assert shared.fp32_flops_per_s == pytest.approx(part * alone.fp32_flops_per_s)
        assert shared.bytes_per_s == pytest.approx(part * alone.bytes_per_s)


def test_the_rates_of_a_job_are_of_its_kernel_and_its_ranks() -> None:

    def of_job(*words: str, ranks: int = 2, imbalance: float = 1.0) -> Rates:
        job = plan_job(load_config(["debug_model", *words]), ranks, is_gpu=True)
        return rates_of(job, H100, imbalance)

    flash = "--training.deterministic=true", "--training.attention_kernel=flash"
    for words, kernel in (([], ""), *(([word], "flash") for word in flash)):
        rates = of_job(*words)
        assert rates.kernel == kernel
        assert rates.flops_per_s == estimated(H100, is_shared=True).flops_per_s
    assert of_job(ranks=1).flops_per_s == estimated(H100).flops_per_s
    assert of_job(imbalance=1.5).imbalance == 1.5
    for word, part in (("true", FUSED), ("false", 1.0)):
        assert of_job(f"--compile.enable={word}").fused == part
    for recipe in FLOAT8:
        words = ["--float8.enable=true", "--training.mixed_precision_param=bfloat16"]
        assert of_job(*words, f"--float8.recipe_name={recipe}").recipe == recipe


def test_an_estimate_is_slower_than_the_data_sheet_and_cpus_have_none() -> None:
    for device in DEVICES.values():
        rates = estimated(device)
        for name, flops, pairs in (("mm", 10**12, 1.0), ("attention", 2 * 10**12, 0.5)):
            work = replace(_operator(name, "bfloat16", 10**6, flops), pairs=pairs)
            assert entry_seconds(work, rates) > 1e12 / device.flops_per_s
        assert rates.network_bytes_per_s < device.network_bytes_per_s
        assert rates.link_bytes_per_s < device.link_bytes_per_s
    assert [estimated(find_device(name)).flops_per_s for name in ("cpu", "80")] == [0, 0]
    known = [name for name, device in DEVICES.items() if error_of_time(device) is not None]
    assert known == ["h100", "h200"]  # of published runs, and of measured ones


def test_the_error_on_an_h200_is_that_of_the_measured_jobs() -> None:
    page = (ROOT / "benchmarks/results/gpu.md").read_text()
    planned = re.findall(r"^\| .*? \| ([\d,]+) \| .* \| ([\d,]+) \| [\d.]+ to", page, re.MULTILINE)
    speeds = [[int(speed.replace(",", "")) for speed in row] for row in planned]
    errors = [abs(of_plan / real - 1) for real, of_plan in speeds]
    assert len(errors) == 3
    error = error_of_time(find_device("h200"))
    assert error is not None
    assert max(errors) < error < max(errors) + 0.05
