"""Parts of planning that need no simulation."""

import json
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from meshwright.commands.plan import plan as command
from meshwright.commands.plan import plan as remedies
from meshwright.commands.plan import trace as scope
from meshwright.commands.plan.as_gpu import as_gpu
from meshwright.commands.plan.devices import (
    GIB,
    Device,
    find_device,
    machine_bytes,
    overheads,
    verdict,
)
from meshwright.commands.plan.figures import bubble
from meshwright.commands.plan.predict import Figures, beside_tensors
from meshwright.commands.plan.rates import assumed
from meshwright.commands.plan.report import _mfu, _parameters, slowest
from meshwright.commands.plan.simulate import plan_job
from meshwright.commands.plan.torch_names import Action, FakeTensorMode
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.metrics.planned import job_identity
from meshwright.models import loss
from meshwright.system.errors import ConfigError
from meshwright.train import main


def _one_forward_one_backward(ranks: int, microbatches: int) -> dict[int, list[Action]]:
    orders = {}
    for rank in range(ranks):
        ahead = min(microbatches, ranks - rank)
        order = [Action("F", rank, i) for i in range(ahead)]
        for i in range(microbatches):
            order.append(Action("B", rank, i))
            if ahead + i < microbatches:
                order.append(Action("F", rank, ahead + i))
        orders[rank] = order
    return orders


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 4), (4, 16), (8, 8)])
def test_the_bubble_of_1f1b_is_the_known_one(ranks, microbatches) -> None:
    """(p - 1) / (m + p - 1): Narayanan et al. 2021, arXiv:2104.04473, of the whole step."""
    found = bubble(_one_forward_one_backward(ranks, microbatches), 1.0, 2.0)
    assert found == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


def test_no_pipeline_has_no_bubble() -> None:
    assert bubble({}, 1.0, 2.0) == 0


def test_weights_of_a_split_backward_fill_the_bubble() -> None:
    whole = {0: [Action("F", 0, 0), Action("B", 0, 0)], 1: [Action("F", 1, 0), Action("B", 1, 0)]}
    split = {
        rank: [Action("F", rank, 0), Action("I", rank, 0), Action("W", rank, 0)] for rank in (0, 1)
    }
    assert bubble(split, 1.0, 2.0) < bubble(whole, 1.0, 2.0)


def test_devices_are_found_by_name_or_by_gib() -> None:
    assert find_device("h100").memory_gib == pytest.approx(79.2)
    assert find_device("24").memory_gib == 24
    assert not find_device("cpu").is_gpu
    with pytest.raises(ConfigError, match="no such device"):
        find_device("h1000")


def test_ranks_on_cpus_share_this_machine(monkeypatch) -> None:
    alone, shared = find_device("cpu"), find_device("cpu", 4)
    assert shared.memory_gib == pytest.approx(alone.memory_gib / 4, abs=0.01)
    assert find_device("h100", 4) == find_device("h100")
    seen = []

    def refuse(*asked: object) -> None:
        seen.append(asked)
        raise ConfigError("", "no such device")

    monkeypatch.setattr(command, "find_device", refuse)
    options = {"rank": 0, "all_stages": False, "html": None, "tries_remedies": False, "workers": 1}
    with pytest.raises(ConfigError):
        command.plan(JobConfig(), 4, "cpu", None, as_json=False, **options)
    with pytest.raises(ConfigError):
        command.search(JobConfig(), 4, "cpu", None, 1, as_json=False)
    assert seen == 2 * [("cpu", 4)]


def test_memory_is_at_most_the_limit_of_every_control_group_above(tmp_path) -> None:
    whole = machine_bytes(tmp_path)
    assert whole == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (tmp_path / "proc/self").mkdir(parents=True)
    group = tmp_path / "proc/self/cgroup"
    group.write_text("0::/batch/job_5\n")
    job = tmp_path / "sys/fs/cgroup/batch/job_5"
    job.mkdir(parents=True)
    (job / "memory.max").write_text("max\n")
    (job.parent / "memory.max").write_text("1073741824\n")
    assert machine_bytes(tmp_path) == GIB
    group.write_text("5:cpu,memory:/old\n")  # version 1, seen from inside of a container
    (tmp_path / "sys/fs/cgroup/memory").mkdir()
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("2147483648\n")
    assert machine_bytes(tmp_path) == 2 * GIB


def test_on_cpus_malloc_and_asynchronous_saves_count() -> None:
    """Llama of 140 M on two ranks, as it was measured: 1.58 GiB of tensors."""
    device, peak = find_device("cpu", 2), int(1.58 * GIB)
    parts = {
        name: (overheads(device, peak, peak, 1, **options))
        for name, options in {
            "gloo": {"sends_by_gloo": True},
            "async": {"staged": GIB},
        }.items()
    }
    high = {name: peak / GIB + sum(x.high for x in found) / GIB for name, found in parts.items()}
    assert 4.50 < high["gloo"] < 1.2 * 4.50
    assert parts["async"][-1].low == parts["async"][-1].high == GIB


def test_a_plan_counts_the_copy_of_an_asynchronous_save() -> None:
    words = ["--job.config_file=train_configs/debug_model.toml", "--checkpoint.async_mode=thread"]
    figures = Figures({"": float(GIB)}, 1.0, 0.0)

    def staged(*more: str) -> list[str]:
        config = load_config([*words, *more])
        plan = plan_job(config, 2, is_gpu=False)
        return [
            x.what for x in beside_tensors(figures, plan, find_device("cpu")) if x.low == x.high
        ]

    assert staged("--checkpoint.enable=true") == ["copy of an asynchronous save"]
    assert staged("--checkpoint.enable=false") == []


def test_a_remedy_has_the_verdict_of_its_worst_rank_and_its_own_groups(monkeypatch) -> None:
    """A pipeline of two ranks: the last needs more, and has a communicator more than the job."""
    peaks = {0: 5.0 * GIB, 1: 9.0 * GIB}

    def simulated(tasks: list[tuple], *_: object) -> Iterator[tuple[int, Figures]]:
        for index, (config, _, rank, _) in enumerate(tasks):
            is_piped = config.parallelism.pipeline_parallel_degree > 1
            size, groups = (peaks[rank], 2) if is_piped else (20.0 * GIB, 1)
            yield index, Figures({"": size}, 1.0, 0.0, rank, groups)

    monkeypatch.setattr(remedies, "in_processes", simulated)
    config = load_config(["--job.config_file=train_configs/debug_model.toml"])
    job = plan_job(config, 2, is_gpu=True)
    shown = SimpleNamespace(peak=SimpleNamespace(num_bytes=20 * GIB), rank=0)
    high = sum(x.high for x in overheads(Device("", 1.0), 9 * GIB, 9 * GIB, 2)) / GIB
    for room, word in ((high, "fits"), (high - 0.01, "tight"), (0.0, "does not fit")):
        (found,) = remedies.find(job, 2, shown, Device("", 9 + room + 1e-6), 1)
        assert "pipeline_parallel_degree = 2" in found.change
        assert (found.peak_bytes, found.verdict) == (9 * GIB, word)


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("/home/x/optim/mw/meshwright/step.py", ""),
        ("/x/_fully_shard/venv/lib/python3.11/site-packages/torch/nn/functional.py", ""),
        (f"{scope.TORCH}/optim/adamw.py", scope.UPDATE),
        (f"{scope.OURS}/train/optim/optimizers.py", scope.UPDATE),
        (f"{scope.OURS}/models/loss.py", scope.LOSS),
        (f"{scope.TORCH}/distributed/fsdp/_fully_shard/_fsdp_param.py", "fsdp"),
    ],
)
def test_frames_are_told_apart_by_the_packages_own_folders(file, kind) -> None:
    assert scope._kind_of(file, "f")[0] == kind


def test_parameters_have_a_unit_of_their_size() -> None:
    counts = (5_770_000, 8_030_261_248, 70_553_706_496, 405_853_388_800)
    assert [_parameters(one) for one in counts] == ["5.77 M", "8.03 B", "70.6 B", "406 B"]


def test_the_verdict_depends_on_what_is_modelled_only_between_two_limits() -> None:
    device = Device("", 10.0)
    modelled = overheads(device, 0, 0, num_groups=1)
    low, high = (sum(getattr(part, end) for part in modelled) for end in ("low", "high"))
    assert verdict(device, int(10 * GIB - high), modelled) == "fits"
    assert verdict(device, int(10 * GIB - high) + 2, modelled) == "tight"
    assert verdict(device, int(10 * GIB - low) + 2, modelled) == "does not fit"


@pytest.mark.parametrize("has_plan", [False, True])
def test_out_of_memory_says_what_is_planned_and_what_would_fit(
    monkeypatch, tmp_path, has_plan
) -> None:
    def run_out(*_: object, **__: object) -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory")

    said, codes = [], []
    monkeypatch.setattr(main, "run", run_out)
    monkeypatch.setattr(main, "log_to_console", lambda **_: None)
    monkeypatch.setattr(
        main.logger, "exception", lambda text: said.extend(sys.exception().__notes__)
    )
    monkeypatch.setattr(main.os, "_exit", codes.append)
    words = ["--job.config_file", "train_configs/debug_model.toml"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words, "--job.dump_folder", f"{tmp_path}/a b"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    plan = {
        "world_size": 2,
        "rank": 1,
        "verdict": "tight",
        "device": {"name": "GPU of 10 GiB"},
        "ranks": [
            {
                "rank": 1,
                "peak": {
                    "num_bytes": 11 * GIB,
                    "by_purpose": {"parameters": 4 * GIB, "activations": 7 * GIB, "temporary": 0},
                    "phase": "backward",
                    "module": "layers.3",
                },
            }
        ],
        "remedies": [
            {"change": "a.b = 1", "peak_bytes": 5 * GIB, "verdict": "fits"},
            {"change": "c.d = 2", "peak_bytes": 10 * GIB, "verdict": "tight"},
        ],
    }
    config = load_config([*words, f"--job.dump_folder={tmp_path}/a b"])
    plan["job"] = job_identity(config)
    if has_plan:
        (tmp_path / "a b").mkdir()
        (tmp_path / "a b" / "plan.json").write_text(json.dumps(plan))
    main.main()
    assert codes == [1]
    command = f"--job.dump_folder '{tmp_path}/a b' --world-size 2 --device cpu"
    assert command in said[0]
    parts = ("4.00 GiB parameters", "11.00 GiB of tensors", "layers.3", "a.b = 1  # 5.00 GiB")
    assert all((part in said[0]) == has_plan for part in parts)
    assert "c.d" not in said[0]
    assert "temporary" not in said[0]


def test_a_plan_for_gpus_takes_their_blocks_in_the_loss() -> None:
    matrix = torch.empty(1, 1 << 20, device="meta")
    in_cpu = torch.empty(1, 1 << 20)
    assert loss._block_size(in_cpu) == loss.BLOCKS["cpu"] >> 20
    with as_gpu():
        assert loss._block_size(matrix) == loss._block_size(in_cpu) == 64


def test_a_plan_for_gpus_keeps_of_a_norm_its_input_and_a_number_per_row() -> None:
    """On CPUs torch computes it by several operators, and keeps what they need."""

    def kept() -> set[tuple[torch.Size, torch.dtype]]:
        found = set()

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            found.add((tensor.shape, tensor.dtype))
            return tensor

        inputs = [
            torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
            for shape in ((2, 8, 16), (16,))
        ]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = functional.rms_norm(inputs[0], (16,), inputs[1], 1e-5)
        gradients = torch.autograd.grad(y, inputs, torch.empty_like(y))
        assert [gradient.shape for gradient in gradients] == [x.shape for x in inputs]
        return found

    with FakeTensorMode():
        with as_gpu():
            on_gpu = kept()
        assert on_gpu == {
            *(((2, 8, 16), torch.bfloat16), ((16,), torch.bfloat16)),
            ((2, 8, 1), torch.float32),
        }
        assert ((2, 8, 16), torch.float32) in kept()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mfu_is_at_most_one_and_against_the_same_peak_for_all_rates(dtype) -> None:
    words = [f"--training.mixed_precision_param={dtype}"]
    config = load_config(["--job.config_file=train_configs/debug_model.toml", *words])
    plan, device = plan_job(config, 2, is_gpu=True), find_device("h100")
    bound, estimate = assumed(device)
    assert _mfu(plan, device, bound, 1e-9) == 1
    assert _mfu(plan, device, bound, 2.0) == _mfu(plan, device, estimate, 1.0) / 2 < 1


def test_times_are_those_of_the_slowest_rank() -> None:
    def of(*seconds: float) -> SimpleNamespace:
        steps = [SimpleNamespace(step=SimpleNamespace(seconds=s)) for s in seconds]
        return SimpleNamespace(timings=steps)

    assert slowest([of(1.0, 0.9), slow := of(2.0, 0.5), of()]) == slow.timings
    assert slowest([of()]) == []
