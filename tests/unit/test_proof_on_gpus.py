"""`meshwright prove --gpu`: what it runs on a machine of so many GPUs, and on which devices."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.commands.prove import job, on_gpus, properties, prove, ranks, reference
from meshwright.commands.prove.bounds import BF16, BOUNDS, TF32
from meshwright.commands.prove.cases import Case, can_run, default_cases
from meshwright.commands.prove.on_gpus import fit, gpu_cases, why_not_on
from meshwright.commands.prove.prove import Row
from meshwright.commands.prove.shrink import GLOBAL_BATCH, ON_GPUS, shrink
from meshwright.commands.prove.verdict import Verdict
from meshwright.config.changes import changed
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.system import hardware
from meshwright.system.errors import ConfigError
from meshwright.train.resolve_model import resolve_model
from tests.helpers.cli import command

run_proof = command("prove")


def small_of(*words: str) -> tuple[JobConfig, JobConfig, list[Case]]:
    config = load_config([*words])
    args = resolve_model(config)[1]
    small = shrink(config, args, ON_GPUS)
    return config, small, default_cases(config, small, args)


def cases_on(gpus: int, *words: str, **options: bool) -> list[Case]:
    config, small, found = small_of(*words)
    return gpu_cases(config, small, found, gpus, **options)


@pytest.fixture
def no_process(monkeypatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(ranks, "fork_server", start)


@pytest.mark.parametrize(
    ("visible", "words", "message"),
    [
        ("", [], r"^--gpu: needs a GPU, and this machine has none .*\n  fix: leave out --gpu: "),
        ("0,1", [], r"^GPUs = 2: torch .* can use none of them\n  fix: "),
        ("0", ["--coordinates"], r"^--gpu = true: is given together with --coordinates"),
    ],
)
def test_without_a_gpu_it_ends_before_any_process(
    no_process, monkeypatch, visible, words, message
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match=message):
        run_proof(["debug_model", "--gpu", *words])


NAMES_3D = {
    1: {"as configured", "as it trains", "bf16", "compiled", "checkpointed, full"},
    2: {"as configured: tp 2", "as it trains: tp 2", "pp only: pp 2", "dp_shard only: dp_shard 2"},
    4: {"as configured: pp 2 x tp 2", "HSDP: dp_replicate 2 x dp_shard 2"},
    8: {"as configured: pp 2 x dp_shard 2 x tp 2", "as it trains: pp 2 x dp_shard 2 x tp 2"},
}


@pytest.mark.parametrize("gpus", NAMES_3D)
def test_cases_fit_the_gpus_and_keep_the_batch(gpus) -> None:
    cases = cases_on(gpus, "debug_model_3d")
    assert NAMES_3D[gpus] <= {case.name for case in cases}
    for case in cases:
        assert can_run(case), case.name
        assert why_not_on(case, gpus) == ""
        assert case.world_size <= gpus
        dp = case.mesh.get("dp_shard", 1) * case.mesh.get("dp_replicate", 1)
        assert GLOBAL_BATCH % (dp * case.config.training.local_batch_size) == 0
    sizes = {case.config.training.local_batch_size * case.world_size for case in cases}
    assert GLOBAL_BATCH in sizes
    assert min(sizes) < GLOBAL_BATCH  # several microbatches
    if gpus == 8:
        found = small_of("debug_model_3d")[2]
        assert [case for case in cases if "as it trains" not in case.name] == found


@pytest.mark.parametrize(
    ("mesh", "most", "wanted"),
    [
        ({"dp_shard": 8}, 3, {"dp_shard": 2}),
        ({"dp_shard": 4, "tp": 2}, 4, {"dp_shard": 2, "tp": 2}),
        ({"dp_replicate": 2, "dp_shard": 2}, 2, {"dp_shard": 2}),
        ({"pp": 2, "tp": 2}, 2, {"tp": 2}),
        ({"pp": 3}, 2, {}),
    ],
)
@pytest.mark.parametrize("kind", ["fp32", "bf16 sums"])
def test_a_mesh_is_halved_until_it_fits(mesh, most, wanted, kind) -> None:
    from meshwright.commands.prove.cases import build_case

    small = small_of("debug_model")[1]
    count = 0 if "pp" in mesh else 1
    case = build_case("case", small, mesh, num_microbatches=count, kind=kind)
    got = fit(case, most)
    assert got.mesh == wanted
    assert can_run(got)
    local = got.config.training.local_batch_size
    dp = wanted.get("dp_shard", 1)
    if kind == "bf16 sums" or "pp" in wanted:
        assert local == 1  # the reference takes one sequence at a time
    elif "pp" not in mesh:
        assert local * dp == GLOBAL_BATCH  # still one microbatch
    if "pp" not in wanted:
        assert got.config.parallelism.pipeline_parallel_schedule == "1F1B"


def test_what_a_machine_is_too_small_for_is_said() -> None:
    case = small_of("debug_model_3d")[2][0]
    assert why_not_on(case, 2) == "needs 8 GPUs, and this machine has 2"
    capped = [case for case in cases_on(1, "debug_gemma2") if case.name.endswith("selective")]
    assert "eager flex attention" in why_not_on(capped[0], 1)


@pytest.mark.parametrize(
    ("words", "allows_tf32", "kind"),
    [
        ([], False, "bf16"),
        ([], True, "bf16"),
        (["--training.mixed_precision_param=float32"], False, "fp32"),
        (["--training.mixed_precision_param=float32"], True, "tf32"),
    ],
)
def test_one_case_has_the_kernels_and_types_of_the_job(words, allows_tf32, kind) -> None:
    own = ["--training.attention_kernel=flash", '--training.fp32_modules=["output"]']
    own += ["--parallelism.tensor_parallel_degree=2", "--compile.enable=true"]
    cases = cases_on(8, *words, *own, allows_tf32=allows_tf32)
    (found,) = [case for case in cases if case.name.startswith("as it trains")]
    training = found.config.training
    assert (found.kind, found.bounds) == (kind, kind)
    assert not training.deterministic
    assert training.attention_kernel == "flash"
    assert found.config.compile.enable is True
    is_bf16 = kind == "bf16"
    assert training.mixed_precision_param == ("bfloat16" if is_bf16 else "float32")
    assert training.fp32_modules == (["output"] if is_bf16 else [])
    others = [case for case in cases if case is not found]
    assert all(case.config.training.deterministic for case in others)
    assert all(case.config.training.attention_kernel == "auto" for case in others)
    assert not any(case.config.float8.emulate for case in cases)


def test_the_case_of_a_float8_job_multiplies_in_float8_as_its_reference_does() -> None:
    words = ("debug_model", "--float8.enable=true", "--training.mixed_precision_param=bfloat16")
    (found,) = [case for case in cases_on(1, *words) if case.name == "as it trains"]
    assert found.config.float8.enable
    assert (found.kind, found.bounds) == ("bf16", "float8")


@pytest.mark.parametrize(
    "preset", ["llama3_8b", "debug_qwen3", "debug_deepseek_v3", "debug_qwen3_next"]
)
def test_heads_are_as_wide_as_the_users_on_gpus(preset) -> None:
    config = load_config([preset])
    args = resolve_model(config)[1]
    small = resolve_model(shrink(config, args, ON_GPUS))[1]
    for name, value in vars(args).items():
        if name.endswith("head_dim") and value is not None:
            assert getattr(small, name) == value
    if args.head_dim is None and not hasattr(args, "v_head_dim"):
        assert small.head_dim == args.dim // args.n_heads
    assert small.dim == 16 * small.n_heads


def test_heads_that_follow_the_width_do_so_on_gpus() -> None:
    config = load_config(["debug_olmoe"])
    small = resolve_model(shrink(config, resolve_model(config)[1], ON_GPUS))[1]
    assert small.head_dim == small.dim // small.n_heads == 16


def test_products_in_float8_have_sizes_that_gpus_take() -> None:
    words = ("debug_model", "--float8.enable=true", "--training.mixed_precision_param=bfloat16")
    for case in cases_on(8, *words, "--parallelism.tensor_parallel_degree=4"):
        assert why_not_on(case, 8) == "", case.name  # a rule asks for multiples of 16
    on_cpus = shrink(load_config([*words]), resolve_model(load_config([*words]))[1])
    uneven = changed(on_cpus, {"float8": {"emulate": False}})
    assert "multiple of 16" in why_not_on(Case("uneven", uneven, 1, "bf16"), 1)


def test_ranks_meet_by_nccl_each_on_its_gpu(monkeypatch) -> None:
    started = list[tuple[int, str]]()

    class Pool:
        def __init__(self, world_size: int, *_: object, backend: str = "gloo", **__: object):
            self.world_size = world_size
            started.append((world_size, backend))

        def run(self, *_: object) -> list[Any]:
            return [None] * self.world_size

        def close(self) -> None:
            pass

    for module in (prove, reference, properties):
        monkeypatch.setattr(module, "RankPool", Pool)
    monkeypatch.setattr(prove, "record_references", lambda *_: {"fp32": (None, None)})
    monkeypatch.setattr(prove, "compare", lambda *_: Verdict())
    small, found = small_of("debug_model")[1:]
    cases = [case for case in found if case.kind == "fp32" and case.config.compile.enable is False]
    sizes = [1, *sorted({case.world_size for case in cases})]
    for gpus, backend in ((8, "nccl"), (0, "gloo")):
        started.clear()
        rows = [*prove.prove(small, cases, gpus)]
        assert [row.verdict.not_run for row in rows] == [""] * len(cases)
        reference.check_reference(small, small, backend)
        properties.check_properties(small, backend)
        assert started == [(size, backend) for size in [*sizes, 1, 1]]

    chosen = list[int]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    for backend, device in (("nccl", torch.device("cuda", 3)), ("gloo", torch.device("cpu"))):
        monkeypatch.setattr(job.dist, "get_backend", lambda name=backend: name)
        assert job.own_device() == device
    assert chosen == [3]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(job.dist, "get_backend", lambda: "nccl")
    with pytest.raises(ConfigError, match="^GPUs = 1: torch"):  # and no CPU in its place
        job.own_device()


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_kernels_are_deterministic_as_the_case_asks(monkeypatch, is_deterministic) -> None:
    asked = dict[str, Any]()
    monkeypatch.setattr(hardware, "make_deterministic", lambda: asked.update(made=True))
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: asked.update(on=on))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda p: asked.update(fp32=p))
    monkeypatch.setattr(hardware, "memory_gib", lambda _: 80.0)
    monkeypatch.setattr(hardware, "has_float8", lambda _: True)
    small = changed(small_of("debug_model")[1], {"training": {"deterministic": is_deterministic}})
    facts = job.look_on(torch.device("cuda", 0), small, 1)
    assert asked == {"made": True, "on": is_deterministic, "fp32": "highest"}
    assert (facts.device_type, facts.expects_gpus, facts.has_float8) == ("cuda", True, True)
    asked.clear()
    assert job.look_on(torch.device("cpu"), small, 1).device_type is None
    assert asked == {}


def test_the_command_proves_on_as_many_gpus_as_torch_can_use(monkeypatch, tmp_path, capsys) -> None:
    given = dict[str, Any]()

    def proof(small: JobConfig, cases: list[Case], gpus: int) -> Any:
        given.update(gpus=gpus, has_tf32="tf32" in {case.kind for case in cases})
        for case in cases:
            yield Row(case, Verdict(not_run=why_not_on(case, gpus)), 1.0)

    def checked(*words: Any) -> Any:
        given.setdefault("backends", []).append(words[-1])
        return reference.Checked() if len(words) == 3 else []

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setattr(hardware, "count_usable_gpus", lambda _: 2)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")  # a user's module
    monkeypatch.setattr(prove, "prove", proof)
    monkeypatch.setattr(reference, "check_reference", checked)
    monkeypatch.setattr(properties, "check_properties", checked)
    in_fp32 = "--training.mixed_precision_param=float32"
    run_proof(["debug_model_3d", in_fp32, "--gpu", "--output", tmp_path])
    assert given == {"gpus": 2, "has_tf32": True, "backends": ["nccl", "nccl"]}
    said = capsys.readouterr().out
    assert "not run: needs 8 GPUs, and this machine has 2" in said
    assert ", on 2 GPUs; see " in said
    written = json.loads((tmp_path / "proof.json").read_text())
    assert written["gpus"] == 2
    names = {one["name"] for one in written["cases"] if one["verdict"] == "not run"}
    assert {"as configured: pp 2 x dp_shard 2 x tp 2"} <= names
    assert {one["ranks"] for one in written["cases"] if one["verdict"] != "not run"} == {2}


def test_bounds_of_products_follow_from_the_types() -> None:
    bf16, tf32, fp32 = (BOUNDS[name] for name in ("bf16", "tf32", "fp32"))
    assert (bf16.loss, bf16.grad_norm, bf16.update) == (BF16, 4 * BF16, 0.5)
    assert tf32.loss == TF32 == bf16.loss / 8  # three bits more
    for name in ("loss", "grad_norm", "update", "later_loss", "later_grad_norm"):
        wide, narrow, exact = (getattr(bounds, name) for bounds in (bf16, tf32, fp32))
        assert exact < narrow < wide
    assert on_gpus.KEPT_LONGEST[-1] == "tp"
    assert SimpleNamespace(**vars(tf32)).rounding == 2
