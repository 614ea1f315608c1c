"""Which device a rank takes, and when it refuses to take one."""

import os
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from meshwright.config.loader import load_config
from meshwright.models.decoder import Decoder
from meshwright.parallelisms.context_parallel import apply_cp
from meshwright.system import hardware
from meshwright.system.errors import ConfigError
from meshwright.system.processes import Launch
from meshwright.train.set_up import _order_attention, init_ranks
from tests.helpers.resolved import resolved


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(n)`: torch can use n."""

    def are(number: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    return are


def test_a_rank_takes_its_gpu_or_the_cpu_if_none_is_expected(gpus) -> None:
    gpus(2)
    assert hardware.pick_device(1, 2) == torch.device("cuda", 1)
    gpus(0)
    assert hardware.pick_device(1, 0) == torch.device("cpu")


def test_a_rank_on_a_gpu_looks_at_the_width_of_heads(gpus, monkeypatch) -> None:
    gpus(1)
    monkeypatch.setattr(hardware, "has_float8", lambda _: True)
    monkeypatch.setattr(hardware, "memory_gib", lambda _: 80.0)
    words = "debug_model --training.mask_documents --model.args.dim=128 --model.args.n_heads=16"
    plan = resolved(load_config([*words.split(), "--model.args.n_kv_heads=16"]), 1)
    with pytest.raises(ConfigError, match="takes no heads of 8, below 16"):
        init_ranks(plan, Launch(num_gpus=1))


def test_gpus_that_are_not_there_are_no_reason_to_train_on_cpus(gpus) -> None:
    for usable, local_rank, expected, message in (
        (0, 0, 8, "^GPUs = 8: torch .* can use none of them\n  fix: "),
        (1, 1, 2, "^LOCAL_RANK = 1: torch can use 1 GPUs\n  fix: .* --gpus-per-node, not per task"),
    ):
        gpus(usable)
        with pytest.raises(ConfigError, match=message):
            hardware.pick_device(local_rank, expected)
    gpus(0)
    with pytest.raises(ConfigError, match="^GPUs = 1: "):
        init_ranks(resolved(load_config(["debug_model"]), 1), Launch(num_gpus=1))


def test_deterministic_algorithms_without_filling_memory(monkeypatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        hardware.make_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


HOPPER, OLD, NEW = (9, 0), 91002, 91501


@pytest.mark.parametrize(
    ("kernel", "capability", "cudnn", "seq_len", "is_deterministic", "first"),
    [
        *[("auto", HOPPER, NEW, 8192, False, "cudnn"), ("auto", HOPPER, NEW, 1000, False, "cudnn")],
        *[("auto", HOPPER, OLD, 8192, False, "cudnn"), ("auto", HOPPER, OLD, 1000, False, "flash")],
        *[("auto", HOPPER, 0, 8192, False, "flash"), ("auto", HOPPER, NEW, 8192, True, "flash")],
        *[("auto", (8, 0), NEW, 8192, False, "flash"), ("auto", (10, 0), NEW, 64, False, "cudnn")],
        *[("cudnn", (8, 0), NEW, 8192, False, "cudnn"), ("cudnn", HOPPER, 0, 8192, False, "flash")],
        *[("flash", HOPPER, NEW, 8192, False, "flash"), ("fa3", HOPPER, NEW, 64, False, "flash")],
    ],
)
def test_the_order_of_kernels_of_attention(
    kernel, capability, cudnn, seq_len, is_deterministic, first
) -> None:
    of_gpu = {"capability": capability, "cudnn": cudnn}
    of_job = {"seq_len": seq_len, "is_deterministic": is_deterministic}
    order = hardware.attention_order(kernel, **of_gpu, **of_job)
    assert order[0] == first
    assert order[-3:] == ["flash", "efficient", "math"]
    assert set(order) <= set(hardware.SDPA_BACKENDS)


@pytest.fixture
def hopper(monkeypatch) -> None:
    """A GPU whose kernels take 16 bits alone, all but the memory-efficient one."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: HOPPER)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: OLD)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **(k | {"device": "cpu"})))
    of_16_bits = lambda params: params.query.dtype != torch.float32  # noqa: E731
    for name in ("cudnn", "flash"):
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{name}_attention", of_16_bits)
    monkeypatch.setattr(
        torch.backends.cuda,
        "can_use_efficient_attention",
        lambda params: params.query.shape[1] == params.key.shape[1],
    )


def choose(kernel: str, dtype: torch.dtype = torch.bfloat16) -> tuple[list[str], str]:
    return hardware.choose_attention(kernel, torch.device("cuda"), 8192, dtype, (8, 2, 64))


def test_the_log_names_the_kernel(hopper) -> None:
    assert choose("auto").line == "attention: cudnn 91002"
    order = ["flash", "efficient", "math"]
    assert choose("flash") == (order, "flash", "attention: flash")
    assert choose("auto", torch.float32).line == "attention: efficient"


@pytest.mark.parametrize(
    ("words", "is_compared", "kernel", "ending"),
    [
        ("", False, "cudnn", "; attention: cudnn 91002"),
        ("", True, "flash", "; attention: flash"),
        ("attention_kernel=cudnn", False, "cudnn", "; attention: cudnn 91002"),
        ("attention_kernel=flash", False, "flash", "; attention: flash"),
        ("seq_len=256", False, "flash", "; attention: flash"),  # chunks of 64: not cuDNN 9.10
        ("mixed_precision_param=float32", False, None, "; attention: efficient"),
        ("mask_documents=true", False, None, " keys and values are gathered"),
    ],
)
def test_context_parallelism_chooses_a_kernel(hopper, words, is_compared, kernel, ending) -> None:
    """Of 2 ranks, whose chunks are a quarter of the sequence."""
    keys = {"seq_len": "512", "mixed_precision_param": "bfloat16"}
    keys |= dict(word.split("=") for word in words.split())
    options = [f"--training.{key}={value}" for key, value in keys.items()]
    config = load_config(["debug_model", "--parallelism.context_parallel_degree=2", *options])
    job = resolved(config, 2)
    with torch.device("meta"):
        model = Decoder(job.model_args, config.training.seq_len)
    mesh = Mock(spec=DeviceMesh, device_type="cuda", **{"size.return_value": 2})
    line = apply_cp(model, mesh, job.config.training, is_compared=is_compared)
    assert line.endswith(ending)
    core = model.layers["0"].attention.core
    assert core.forward.keywords["kernel"] == kernel


def test_context_parallelism_asks_for_the_heads_of_a_rank(hopper) -> None:
    """8 heads, which two ranks of tensor parallelism share."""
    words = ["--training.attention_kernel=flash", "--training.mixed_precision_param=float32"]
    config = load_config(["debug_model", "--parallelism.context_parallel_degree=2", *words])
    job = resolved(config, 2, device_type="cuda", expects_gpus=True)
    heads = job.model_args.table.plain_attention.n_heads
    with torch.device("meta"):
        model = Decoder(job.model_args, config.training.seq_len)
    mesh = Mock(spec=DeviceMesh, device_type="cuda", **{"size.return_value": 2})
    with pytest.raises(ConfigError, match=f"no such kernel for {heads // 2} heads"):
        apply_cp(model, mesh, job.config.training, tp=2, is_compared=False)


@pytest.mark.parametrize(
    "own", ["", "training.mask_documents=true", "parallelism.context_parallel_degree=2"]
)
def test_attention_of_torch_alone_has_an_order(hopper, own) -> None:
    plan = resolved(load_config(["debug_model", *[f"--{own}"] * bool(own)]), 2)
    assert (_order_attention(plan, torch.device("cuda")) == []) == bool(own)
    assert _order_attention(plan, torch.device("cpu")) == []


def test_a_kernel_that_is_not_there_is_refused(hopper) -> None:
    for kernel, dtype in (("cudnn", torch.float32), ("fa3", torch.bfloat16)):
        with pytest.raises(ConfigError, match="training.attention_kernel") as error:
            choose(kernel, dtype)
        assert 'fix: use "auto"' in str(error.value)


def test_the_order_holds_in_recomputation_and_in_compiled_graphs() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x * n for n in (1, 2, 3))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def recomputed(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(attend, x, use_reentrant=False)

    torch._dynamo.reset()
    compiled = torch.compile(recomputed, backend="aot_eager", fullgraph=True)
    tag = torch.compiler.config.cache_key_tag
    for function in (recomputed, compiled):
        x = torch.ones(1, 2, 16, 8, requires_grad=True)
        with hardware.ordered_attention(["math"]), torch.profiler.profile() as profile:
            function(x).sum().backward()
        assert not any("flash" in event.name for event in profile.events())
    torch._dynamo.reset()
    torch.compiler.config.cache_key_tag = tag
    with torch.profiler.profile() as profile:
        recomputed(torch.ones(1, 2, 16, 8, requires_grad=True)).sum().backward()
    assert any("flash" in event.name for event in profile.events())


def test_a_kernel_is_asked_for_the_kind_of_length(hopper, monkeypatch) -> None:
    seen = []
    takes = lambda params: seen.append(params.query.shape[2]) or True  # noqa: E731
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", takes)
    for length in (8192, 8200):
        hardware.choose_attention("flash", torch.device("cuda"), length, torch.bfloat16, (8, 2, 64))
    assert seen == [128, 136]
