"""Parts of planning that need no simulation."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.commands.main import run
from meshwright.commands.plan import command
from meshwright.commands.plan import predict as predicting
from meshwright.commands.plan import trace as scope
from meshwright.commands.plan.devices import GIB, Device, estimated, find_device, non_tensor_memory
from meshwright.commands.plan.figures import Memory, Peak, StepTime, bubble
from meshwright.commands.plan.ledger import AT_START, HOST, PURPOSES, Event, Item, Record
from meshwright.commands.plan.predict import Figures, Need
from meshwright.commands.plan.report import _parameters, mfu, plan_rank, slowest, to_json, to_text
from meshwright.commands.plan.simulate import (
    _block_mask,
    as_gpu,
    deal,
    plan_job,
    worst_imbalance,
)
from meshwright.commands.plan.torch_names import FakeTensorMode, flex_attention_operator
from meshwright.commands.plan.trace import Moment
from meshwright.config.loader import load_config
from meshwright.models import loss
from meshwright.parallelisms.context_parallel import attend_in_chunks, gradients_in_chunks
from meshwright.parallelisms.window_context import Halo
from meshwright.system.errors import ConfigError
from meshwright.system.processes import Launch, Requests
from meshwright.train import main
from meshwright.train.resolve import ResolvedJob
from tests.helpers.needs import skip_without_mesh_of_experts

DEBUG = "--job.config_file=train_configs/debug_model.toml"


@pytest.mark.parametrize(
    ("schedule", "backward", "part"),
    [
        ("1F1B", 2 / 3, 3 / (8 + 3)),
        ("1F1B", 3 / 4, 3 / (8 + 3)),
        ("Interleaved1F1B", 2 / 3, 3 / (2 * 8 + 3)),
        ("ZBVZeroBubble", 2 / 3, 1 / (2 * 8 + 1)),  # a third of it: forward, or half of backward
        ("ZBVZeroBubble", 3 / 4, 3 * 3 / 8 / (2 * 8 + 3 * 3 / 8)),
    ],
)
def test_a_pipeline_waits_as_its_schedule_does(schedule, backward, part) -> None:
    """Of 4 ranks and 8 microbatches, as a replay of torch's schedules had it."""
    words = [
        *(DEBUG, "--model.args.n_layers=8", "--compile.enable=false"),
        *("--parallelism.pipeline_parallel_degree=4", "--training.global_batch_size=64"),
        "--training.local_batch_size=8",
        f"--parallelism.pipeline_parallel_schedule={schedule}",
    ]
    plan = plan_job(load_config(words), 4, is_gpu=True)
    assert plan.config.num_microbatches == 8
    assert bubble(plan, backward) == pytest.approx(part)
    assert bubble(plan_job(load_config([DEBUG]), 4, is_gpu=True), backward) == 0


@pytest.mark.parametrize(
    ("backward", "mtp_depth", "wait"),
    [(2 / 3, 1, 1), (2 / 3, 2, 10 / 3), (3 / 4, 2, 27 / 8)],
)
def test_a_pipeline_waits_for_a_last_stage_that_computes_all_at_once(
    backward, mtp_depth, wait
) -> None:
    """Of 4 ranks and 8 microbatches, as a replay of torch's schedule had it; it is more than
    Interleaved1F1B's 3."""
    words = [
        *(DEBUG, "--model.args.n_layers=8", "--compile.enable=false"),
        f"--model.args.mtp_depth={mtp_depth}",
        *("--parallelism.pipeline_parallel_degree=4", "--training.global_batch_size=64"),
        "--training.local_batch_size=8",
        "--parallelism.pipeline_parallel_schedule=InterleavedZeroBubble",
    ]
    plan = plan_job(load_config(words), 4, is_gpu=True)
    assert bubble(plan, backward) == pytest.approx(wait / (2 * 8 + wait))
    alone = [word for word in words if "degree" not in word]
    assert bubble(plan_job(load_config(alone), 1, is_gpu=True), backward) == 0


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
    with pytest.raises(ConfigError):
        run(["plan", "debug_model", "--device=cpu", "--world-size=4"])
    assert seen == [("cpu", 4)]


@pytest.mark.parametrize(
    ("tensors", "passing", "activations", "resident"),
    [
        (1.633, 1.625, 0.015, 3.867),  # of 131,072 tokens
        (0.100, 0.087, 0.015, 0.605),  # of 2,048
        (0.345, 0.108, 0.243, 0.867),  # and sequences eight times as long, two as many
        (1.143, 0.216, 0.970, 1.996),  # four times as many
    ],
)
def test_on_cpus_malloc_counts(tensors, passing, activations, resident) -> None:
    """GiB of Llamas on two ranks, as they were measured with gloo."""
    plan, sizes = plan_job(load_config([DEBUG]), 2, is_gpu=False), (passing, activations)
    most = dict(zip(("temporary", "activations"), (x * GIB for x in sizes), strict=True))
    most["parameters"] = GIB  # which malloc does not keep: they stay
    python, malloc = non_tensor_memory(plan, find_device("cpu"), int(tensors * GIB), 1, most)[:2]
    assert tensors + (python.low + malloc.high) / GIB > resident
    assert tensors + (python.low + malloc.high) / GIB < 1.25 * resident


@pytest.mark.parametrize(("ep", "n_active", "worst"), [(8, 4, 2), (8, 1, 8), (2, 1, 2), (1, 1, 1)])
def test_the_worst_imbalance_is_bounded_by_ranks_and_by_experts(ep, n_active, worst) -> None:
    mixture = SimpleNamespace(n_experts=8, n_active=n_active)
    args = SimpleNamespace(table=SimpleNamespace(mixtures={0: mixture, 1: mixture}))
    assert worst_imbalance(SimpleNamespace(dims=SimpleNamespace(ep=ep), model_args=args)) == worst


def test_a_plan_counts_the_copy_of_an_asynchronous_save() -> None:
    words = ["--job.config_file=train_configs/debug_model.toml", "--checkpoint.async_mode=thread"]

    def staged(*more: str) -> list[str]:
        plan = plan_job(load_config([*words, *more]), 2, is_gpu=False)
        parts = non_tensor_memory(plan, find_device("cpu"), GIB, 0, {"temporary": GIB})
        return [part.what for part in parts if part.low == part.high]

    assert staged("--checkpoint.enable=true") == ["copy of an asynchronous save"]
    assert staged("--checkpoint.enable=false") == []
    offloaded = "--training.enable_cpu_offload=true"  # weights that are not on the device
    assert "copy of an asynchronous save" not in staged("--checkpoint.enable=true", offloaded)


def test_a_remedy_has_the_verdict_of_its_neediest_rank_and_its_own_groups(monkeypatch) -> None:
    """A pipeline of two ranks: the last needs more memory, and less time, and has a communicator
    more than the job."""

    def predicted(plan: ResolvedJob, rank: int, *_: object) -> Figures:
        is_piped = plan.dims.pp > 1
        size, groups = ((5.0, 9.0)[rank] * GIB, 2) if is_piped else (20.0 * GIB, 1)
        return Figures({"": size}, 2.0 - rank, groups)

    def at_once(tasks: list[tuple], function: Callable, *_: object) -> list[Need]:
        return [function(*task) for task in tasks]

    monkeypatch.setattr(predicting, "predict", predicted)
    monkeypatch.setattr(predicting, "in_processes", at_once)
    job = plan_job(load_config([DEBUG]), 2, is_gpu=True)
    modelled = non_tensor_memory(job, Device("", 1.0), 9 * GIB, 2, {})
    low, high = (sum(getattr(part, end) for part in modelled) / GIB for end in ("low", "high"))
    for room, word in ((high, "fits"), (high - 0.01, "tight"), (low - 0.01, "does not fit")):
        device = estimated(Device("", 9 + room + 1e-6))
        ((change, need),) = predicting.find_remedies(job.config, 20 * GIB, 2, device, 1)
        assert "pipeline_parallel_degree = 2" in change
        assert (need.peak_bytes, need.seconds, need.verdict) == (9 * GIB, 2.0, word)


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("/home/x/optim/mw/meshwright/step.py", ""),
        ("/x/_fully_shard/venv/lib/python3.11/site-packages/torch/nn/functional.py", ""),
        (f"{scope.TORCH}/optim/adamw.py", scope.UPDATE),
        (f"{scope.TORCH}/distributed/fsdp/_fully_shard/_fsdp_param.py", "fsdp"),
    ],
)
def test_frames_are_told_apart_by_the_packages_own_folders(file, kind) -> None:
    """Those of our own files: tests/unit/test_house.py."""
    assert scope._kind_of(file, "f")[0] == kind


def test_bytes_of_a_step_are_told_by_purpose_module_and_place() -> None:
    """Tensors in host memory have no events, and no row."""
    forward, last, after = (
        Moment(*place, 1)
        for place in (("forward", "layers.0"), ("backward", "layers.1"), ("backward", "layers.0"))
    )
    items = [
        Item("parameters", "", AT_START),
        Item(HOST, "", AT_START),
        Item("activations", "mm", forward),
        Item("temporary", "mul", last),
    ]
    deltas = [(0, 4, AT_START), (2, 6, forward), (3, 5, last), (3, -5, after), (2, -6, after)]
    memory = Memory(Record(items, [Event(*delta) for delta in deltas]))
    found = {"parameters": 4, "activations": 6, "temporary": 5}
    assert memory.peak == Peak(
        15, dict.fromkeys(PURPOSES, 0) | found, {"layers.*": 6}, "layers.1", "mul", "backward", 1
    )
    assert memory.most() == dict.fromkeys(PURPOSES, 0) | found
    assert [sum(moment.values()) for moment in memory.curve()] == [10, 15, 15, 10]
    assert set(memory.by_place().values()) == {4, 10, 15}


def test_out_of_memory_names_the_command_that_plans_the_job(monkeypatch, tmp_path) -> None:
    def run_out(*_: object, **__: object) -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory")

    said, codes = [], []
    monkeypatch.setattr(main, "run", run_out)
    monkeypatch.setattr(
        main.logger, "exception", lambda text: said.extend(sys.exception().__notes__)
    )
    monkeypatch.setattr(main.os, "_exit", codes.append)
    words = ["--job.config_file", "train_configs/debug_model.toml"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words, "--job.dump_folder", f"{tmp_path}/a b"])
    launcher = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    main.main(Launch(), Requests())
    assert codes == [1]
    command = f"--job.dump_folder '{tmp_path}/a b' --world-size 2 --device cpu"
    assert command in said[0]


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

        shapes = ((2, 8, 16), (16,))
        inputs = [torch.empty(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
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


def test_figures_of_a_report() -> None:
    device, mfus = find_device("h100"), []
    for dtype in ("bfloat16", "float32"):
        config = load_config([DEBUG, f"--training.mixed_precision_param={dtype}"])
        mfus.append(mfu(plan_job(config, 2, is_gpu=True), device, 2.0) * device.peak(dtype))
    assert mfus[0] == pytest.approx(mfus[1])  # against the peak of the type
    counts = (5_770_000, 8_030_261_248, 70_553_706_496, 405_853_388_800)
    assert [_parameters(one) for one in counts] == ["5.77 M", "8.03 B", "70.6 B", "406 B"]
    ranks = [SimpleNamespace(time=StepTime(seconds, 0.0, 0.0)) for seconds in (1.0, 2.0)]
    unknown = SimpleNamespace(time=None)
    assert slowest([*ranks, unknown]) is ranks[1].time
    assert slowest([unknown]) is None


def test_a_plan_of_experts_deals_their_rows_out_evenly() -> None:
    skip_without_mesh_of_experts()
    words = ["--job.config_file=train_configs/debug_qwen3_moe.toml", "--compile.enable=false"]
    words += ["--parallelism.tensor_parallel_degree=2", "--parallelism.expert_parallel_degree=4"]
    words += ["--training.mixed_precision_param=float32", "--model.args.n_layers=2"]
    config = load_config([*words, "--training.local_batch_size=2", "--training.seq_len=128"])
    h100 = find_device("h100")
    plan = plan_job(config, 8, is_gpu=True)
    rank, crowded = (plan_rank(config, 8, 0, estimated(h100, imbalance=f)) for f in (1, 2))
    by_axis = {sent.axis: sent for sent in rank.traffic if sent.kind == "all_to_all"}
    args, count = plan.model_args, plan.config.num_microbatches
    rows = 2 * 128 // 2 * 4  # of a tp rank's half of the sequences, for 4 experts each
    fp32, calls = 4, 4 * args.n_layers * count  # there and back, forward and backward
    assert by_axis.keys() == {"ep"}
    assert (by_axis["ep"].calls, by_axis["ep"].sent_bytes) == (
        calls,
        calls * rows * args.dim * fp32 * 3 / 4,  # a quarter stays on the rank
    )
    assert {"fsdp", "efsdp", "tp"} <= {sent.axis for sent in rank.traffic}
    assert "unknown" not in {sent.axis for sent in rank.traffic}
    assert "world" in {
        sent.axis for sent in rank.traffic
    }  # without a pipeline a stage is all ranks
    text = to_text(plan, [rank], h100)
    assert rank.time.waits == args.n_layers * count
    assert f"split sizes {rank.time.waits} times" in text
    assert f"{_parameters(args.table.num_active_params)} of them active for a token" in text
    assert "experts of a rank get 1 times the mean" in text
    assert "experts of a rank get 2 times the mean" in to_text(plan, [crowded], h100)
    assert crowded.peak.num_bytes > rank.peak.num_bytes
    assert crowded.time.seconds > rank.time.seconds
    rows_of_step = args.n_layers * count * rows
    of_experts = 2 * 3 * args.dim * args.expert_dim * rows_of_step  # of three matrices, forward
    more = crowded.flops["matrices, forward"] - rank.flops["matrices, forward"]
    assert more == of_experts
    shown = to_json(plan, [rank], h100, [])
    assert shown["active_parameters"] < shown["parameters"] == args.table.num_params


def test_rows_that_do_not_divide_are_all_sent() -> None:
    assert deal(torch.empty(2, 4, dtype=torch.int64), 10) == [[3, 3, 2, 2]] * 2
    assert deal(torch.empty(2, 4, dtype=torch.int64), 10, 1.5) == [[3, 3, 2, 2], [5, 5, 3, 3]]


def test_operators_that_neither_read_nor_write_take_no_time() -> None:
    trace = scope.Trace(Mock(all=[]), scope.Scope())

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **kwargs or {})
            trace.see(func, args, kwargs or {}, output)
            return output

    x = torch.ones(4, 6)
    with Seen():
        torch.empty(4, 6)
        torch.empty_like(x)
        torch.empty_strided((4, 6), (6, 1))
        torch.empty_permuted((4, 6), (1, 0))
        x.new_empty(4)
        x.new_empty_strided((4, 6), (6, 1))
        torch.ops.aten._unsafe_view(x, (24,))
        x.mul(2)
    assert [entry.name for entry in trace.entries] == ["mul"]


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_pairs_of_attention_are_those_that_its_kernels_compute(cp: int) -> None:
    """Counted call by call in the kernels that ranks of context parallelism run on CPUs: a rank's
    early and late chunk of queries see half of all pairs, of which only calls on the diagonal skip
    a part."""
    batch, heads, kv_heads, width, chunk = 1, 4, 2, 16, 32
    seq_len = 2 * cp * chunk
    k, v = torch.randn(2, batch, kv_heads, seq_len, width)
    for rank in range(cp):
        q = torch.randn(batch, heads, seq_len // cp, width)
        seen, chunks = Computed(), (rank, 2 * cp - 1 - rank)
        with seen:
            output, sums = attend_in_chunks(q, k, v, chunks, 1.0, "cpu")
            gradients_in_chunks(q, q, k, v, output, sums, chunks, 1.0, "cpu")
        # two products forward, and five backward, with a multiply-add as two
        half_of_the_pairs = batch * heads * (seq_len // cp) * seq_len / 2
        assert seen.flops == 14 * width * half_of_the_pairs
        assert seen.calls == 2 * (4 if rank else 3)


@pytest.mark.parametrize(("rank", "cp", "blocks"), [(0, 1, 2 * 32 - 1), (1, 4, 2 * 8)])
def test_pairs_of_windows_are_those_of_the_blocks_that_queries_see(rank, cp, blocks) -> None:
    """Of 128 queries and keys: their own, and the one before, which the first queries of a sequence
    don't have."""
    seq_len, width, halo = 4096, 16, Halo(129, 4096 // (2 * cp), rank, cp)
    keys = halo.positions(torch.device("cpu"))
    positions = keys[: seq_len // cp]
    with FakeTensorMode(allow_non_fake_inputs=True), Computed() as seen:
        q, k, v = (torch.empty(1, 1, len(x), width) for x in (positions, keys, keys))
        documents = torch.zeros(1, seq_len, dtype=torch.int32)
        mask = _block_mask(documents, positions, 129, keys)
        flex_attention_operator(q, k, v, block_mask=mask, scale=1.0, enable_gqa=False)
    assert seen.flops == pytest.approx(4 * width * 128**2 * blocks, rel=0.02)


class Computed(TorchDispatchMode):
    """FLOPs that the plan takes kernels of attention to compute."""

    flops, calls = 0.0, 0
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if "attention" in func.__name__:
            self.calls += 1
            self.flops += scope._flops(func, args, kwargs, output) * scope._pairs(
                func, args, kwargs
            )
        return output
