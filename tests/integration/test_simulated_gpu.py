"""Ranks on a GPU that is not there: what a step makes the host wait for, and where tensors are.

The trainer's own functions on fake tensors, see `tests/helpers/simulated_gpu`: no number is right.
"""

import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch

import meshwright
from meshwright.commands.plan.figures import Memory
from meshwright.commands.plan.simulate import plan_job
from meshwright.commands.plan.simulate import simulate as simulate_rank
from meshwright.config.loader import load_config
from tests.helpers.simulated_gpu.cases import CASES
from tests.helpers.simulated_gpu.fake_cuda import innermost
from tests.helpers.simulated_gpu.guard import build_guard
from tests.helpers.simulated_gpu.run import ROOT, simulate
from tests.helpers.slow import slow

WITH_FAULTS = "one GPU, with faults"
OFFLOADED = "FSDP 8, CPU offload"
EVERYDAY = ("FSDP 8",)
EP = tuple(name for name in CASES if "EP" in name)


@pytest.fixture(scope="module")
def figures(tmp_path_factory, request) -> dict[str, Any]:
    """Of every case that tests need, from one process."""
    if torch.version.hip:
        pytest.skip("stands for NVIDIA's GPUs")
    guard = build_guard(tmp_path_factory.mktemp("guard"))
    if guard is None:
        pytest.skip("needs g++")
    mine = [item for item in request.session.items if item.path == request.path]
    has_slow = any(item.get_closest_marker("slow") for item in mine)
    return simulate(guard, list(CASES) if has_slow else EVERYDAY)


def kernel_of(name: str) -> str:
    if "documents" in name or "sinks" in name:
        return "flex"
    if "fp32" in name:  # which neither of the others takes
        return "efficient"
    return "cudnn" if "CP" in name else "flash"  # elsewhere flash attention stands for cuDNN's


@pytest.mark.parametrize(
    "name", ["FSDP 8", *slow(*sorted(CASES.keys() - {"FSDP 8", WITH_FAULTS, OFFLOADED, *EP}))]
)
def test_a_step_never_waits_and_all_is_on_the_device(figures, name: str) -> None:
    found = figures[name]
    assert "error" not in found, found["error"]
    assert found["waits"] == {}
    assert found["blocking_copies"] == {}
    assert found["send_waits"] == {}
    assert found["not_on_device"] == []
    assert list(found["kernels"]) == [kernel_of(name)]
    if not CASES[name].is_saved:
        assert found["on_host"] == {}
        assert found["copies"] == {}


def test_a_place_is_named_by_its_package_wherever_the_checkout_is(monkeypatch) -> None:
    """An environment in the checkout, as README makes it, and a checkout below torch's name."""
    for above in ("/a/meshwright", "/a/torch/größe der welt"):
        libraries = f"{above}/.venv/lib/python3.11/site-packages"
        monkeypatch.setattr(meshwright, "__file__", f"{above}/meshwright/__init__.py")
        monkeypatch.setattr(torch, "__file__", f"{libraries}/torch/__init__.py")
        ours = (f"{above}/meshwright/step.py", 3)
        torchs = [(f"{libraries}/torch/nn/a.py", 1), (f"{libraries}/torch/b.py", 2)]
        assert innermost([ours, *torchs]) == "step.py:3"
        assert innermost([(f"{above}/tests/a.py", 5), *torchs]) == "b.py:2"


@pytest.mark.slow
def test_faults_are_noticed(figures) -> None:
    found = figures[WITH_FAULTS]
    assert "error" not in found, found["error"]
    assert [what.split(" at ")[0] for what in found["waits"]] == [
        "_local_scalar_dense",
        "cuda.synchronize",
    ]
    copies = [what.split(" at ")[0] for what in found["blocking_copies"]]
    assert copies == ["cpu to cuda (1,)", "cuda to cpu (2, 4, 64, 8)"]
    assert "math" in found["kernels"]
    assert any("_to_copy (2, 4, 64, 8)" in what for what in found["on_host"])


@pytest.mark.slow
@pytest.mark.parametrize("name", EP)
def test_expert_parallelism_waits_once_per_layer_and_forward(figures, name: str) -> None:
    """For the numbers of rows to and from other ranks; never in backward or recomputation."""
    found = figures[name]
    assert "error" not in found, found["error"]
    assert found["waits"] == {"exchange_counts": 2}  # of two layers
    assert found["blocking_copies"] == {}
    # rows go and come back, and so do their gradients
    num_sent = 4 + ("full" in name) * 2
    assert found["collectives"]["all_to_all_single"] == 2 * num_sent


@pytest.mark.slow
def test_offloaded_parameters_are_waited_for_where_they_are_needed(figures) -> None:
    """FSDP2 waits for each gradient; we for the norm, the factor of clipping, a bad step's vote."""
    found = figures[OFFLOADED]
    assert "error" not in found, found["error"]
    assert all(what.startswith("event.synchronize at distributed/fsdp") for what in found["waits"])
    assert sum(found["blocking_copies"].values()) == 3
    assert all(" () at " in what for what in found["blocking_copies"])  # of single numbers
    assert list(found["kernels"]) == ["flash"]


def test_first_values_wait_for_the_device_once(figures) -> None:
    """For their table of quantiles; not per block of elements."""
    for name, found in figures.items():
        assert sum(found["init_waits"].values()) == (name != OFFLOADED), name


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.is_saved])
def test_a_save_in_the_background_delays_only_the_update(figures, name: str) -> None:
    """Copies have a stream of their own, after the work so far; updates wait for it."""
    found = figures[name]
    (stream,) = found["copies"]
    assert stream != "default"
    log = [tuple(entry) for entry in found["stream_log"]]
    assert log[0] == ("waits for default", stream)
    updates = [entry for entry in log if entry[0] == "updates"]
    assert updates
    for update in updates:
        assert (f"waits for {stream}", update[1]) in log[: log.index(update)]


@pytest.mark.slow
def test_by_op_neither_attention_nor_reduce_scatters_are_computed_again(figures) -> None:
    def collectives(mode: str) -> int:
        return figures[f"FSDP 4 x TP 2{mode}"]["collectives"]["reduce_scatter_tensor"]

    assert collectives(", selective by op") == collectives("") < collectives(", full recomputation")
    for what in ("", ", documents"):
        by_op, kept = figures[f"FSDP 8{what}, selective by op"], figures[f"FSDP 8{what}"]
        assert by_op["kernels"] == kept["kernels"]
        assert by_op["peak_bytes"] < kept["peak_bytes"]


@pytest.mark.slow
def test_no_rank_makes_a_matrix_of_the_sequence_by_itself(figures) -> None:
    """Of scores in fp32, for its microbatch and all heads: 2048 x 2048 of one GPU, a fourth under
    context parallelism."""
    args = (2, 8, 2048)  # microbatch, heads of the debug model, positions
    scores = 4 * args[0] * args[1] * args[2] ** 2
    for name, ranks in (("one GPU, fp32", 1), ("CP 4", 4), ("CP 4, fp32", 4)):
        assert figures[name]["peak_bytes"] < 1.5 * scores / ranks


@pytest.mark.slow
def test_blocks_are_compiled_for_an_h100_once() -> None:
    """To machine code; of other jobs the same command tells."""
    pytest.importorskip("triton")
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    command = [sys.executable, "-m", "tests.helpers.simulated_gpu.compiled", "one GPU"]
    said = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    graphs, kernels, anew = map(int, said.splitlines()[-1].strip("| ").split(" | ")[1:])
    assert (graphs, anew) == (4, 0)  # a block's, forward and backward, and two of the loss
    assert kernels > 10


def test_a_plan_for_gpus_has_the_peak_of_the_simulated_gpu(figures) -> None:
    case = CASES["FSDP 8"]
    job = plan_job(load_config(case.words), case.world_size, is_gpu=True)
    planned = Memory(simulate_rank(job, case.rank, is_gpu=True).record).peak
    assert planned.num_bytes == pytest.approx(figures["FSDP 8"]["peak_bytes"], rel=0.005)


@pytest.mark.slow
def test_a_proof_on_gpus_mixes_no_devices(tmp_path) -> None:
    guard = build_guard(tmp_path)
    if guard is None:
        pytest.skip("needs g++")
    line = [sys.executable, "-m", "tests.helpers.simulated_gpu.proof", str(guard), str(tmp_path)]
    line += ["debug_model", "--checkpoint.average.decay=0.5"]
    said = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert said.stdout.splitlines()[-1] == "cuda:0"
