"""`meshwright prove` finds nothing where nothing is wrong, and the mistake where there is one."""

import dataclasses
import functools
import itertools
import json
import os
import re
from pathlib import Path

import pytest

from meshwright.commands.main import main
from meshwright.commands.prove import properties, reference
from meshwright.commands.prove.bounds import bounds_of
from meshwright.commands.prove.cases import (
    HSDP,
    Case,
    Kind,
    build_case,
    can_run,
    default_cases,
    every_mesh,
    reference_case,
)
from meshwright.commands.prove.checked import Checked
from meshwright.commands.prove.compare import compare
from meshwright.commands.prove.job import clear_checkpoints
from meshwright.commands.prove.measure import measure
from meshwright.commands.prove.measurement import LAST_RESUMED_STEP, Measurement, Reference
from meshwright.commands.prove.prove import _largest_of_layers, prove, record_references
from meshwright.commands.prove.shrink import HEAD_DIM, KEPT, largest_tp, shrink
from meshwright.commands.prove.verdict import DIFFERENT, LATER_GRADIENT, OTHER_CHOICES, Verdict
from meshwright.config.changes import changed
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.models.args import DecoderArgs
from meshwright.models.families.llama import FLAVORS
from meshwright.parallelisms.rules.degrees import KEYS
from meshwright.parallelisms.rules.stages import SCHEDULES
from meshwright.system.errors import ConfigError
from meshwright.train.resolve_model import resolve_model
from tests.helpers.faults import FAULTS, MOMENT
from tests.helpers.needs import skip_without_mesh_of_experts
from tests.helpers.resolved import resolved
from tests.helpers.slow import slow_but

PRESETS = Path(__file__).parents[2] / "train_configs"
ARGS = FLAVORS["debugmodel"]


def args_of(config: JobConfig) -> DecoderArgs:
    return resolve_model(config)[1]


def small_job(*words: str, n_layers: int = 3) -> JobConfig:
    """As short as a proof can be, and uneven on two stages."""
    config = load_config([*words])
    small = shrink(config, args_of(config))
    args = small.model.args | {"n_layers": n_layers}
    return changed(small, {"training": {"steps": LAST_RESUMED_STEP}, "model": {"args": args}})


SMALL = small_job()
WITH_DOCUMENTS = small_job("--training.mask_documents=true")
STREAMED = small_job("--training.dataset_mode=streamed")
FLOAT8 = small_job("--float8.enable=true")
TENSORWISE = small_job("--float8.enable=true", "--float8.recipe_name=tensorwise")
BALANCED = ("--model.name=qwen3_moe", "--experts.balance_loss=0.1")
WITH_EXPERTS = small_job(*BALANCED)
WITH_ALL = small_job(*BALANCED, "--optimizer.name=muon", "--checkpoint.average.decay=0.5")
IN_BF16 = ("--training.mixed_precision_param=bfloat16", "--training.dtype=bfloat16")
STORED_IN_BF16 = small_job(*IN_BF16, "--optimizer.name=muon", "--checkpoint.average.decay=0.5")
WITH_FP32 = '--training.fp32_modules=["output", "layers.*.attention_norm"]'
STORED_BUT_SOME = small_job(*IN_BF16, WITH_FP32)
REDUCED_IN_BF16 = small_job(IN_BF16[0], "--training.mixed_precision_reduce=bfloat16")
PARTS = ", ".join(
    f'{{name = "{n}", dataset = "stdlib", weight = 1, loss_weight = {n}.5}}' for n in (1, 3)
)
WITH_LOSS_WEIGHTS = small_job(f"--training.datasets=[{PARTS}]", "--training.packing=best_fit")
STATS = "--metrics.layer_stats_freq=10"
WITH_MTP = small_job(*BALANCED, "--model.args.mtp_depth=2", "--training.mask_documents=true")
WITH_COPY = small_job(
    *IN_BF16,
    '--training.fp32_modules=["layers.1", "output"]',
    "--model.args.mtp_depth=2",
    "--model.args.n_kv_heads=8",
    "--optimizer.name=muon",
    "--training.max_norm=inf",
    "--training.seed=272",
    n_layers=5,
)
NORM_OF_COPY = small_job(
    IN_BF16[0],
    "--model.args.mtp_depth=2",
    "--training.seed=2",
    "--metrics.grad_norm_by_group=true",
    n_layers=5,
)
WITH_NORMS = small_job(*BALANCED, "--metrics.grad_norm_by_group=true", STATS)
WITH_STATS = small_job(STATS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("proof")


@pytest.fixture(scope="module")
def references() -> dict[str, dict[Kind, tuple[Reference, Path]]]:
    """Those that tests have needed so far, by their config."""
    return {}


def measure_with(fault: str, config: JobConfig, world_size: int, file: Path) -> Measurement:
    with FAULTS[fault]():
        return measure(config, world_size, file)


def case_on(small: JobConfig = SMALL, kind: Kind = "fp32", **mesh: int) -> Case:
    return build_case("case", small, mesh, kind=kind)


@pytest.fixture
def verdict_of(on_ranks, references, folder):
    def run(case: Case, fault: str = "none", small: JobConfig = SMALL) -> Verdict:
        if not can_run(case):
            skip_without_mesh_of_experts()
        key, n = f"{small.model_dump_json()} {case.kind}", case.world_size
        if key not in references:
            mine = folder / str(len(references))
            mine.mkdir()
            run_on_one = functools.partial(on_ranks, 1)
            references[key] = record_references(run_on_one, small, {case.kind}, mine)
        reference, file = references[key][case.kind]
        ranks = on_ranks(n, measure_with, fault, case.config, n, file)
        return compare(reference, ranks, bounds_of(case))

    return run


ON_EP = {"dp_shard": 2, "ep": 2}
SOUND = {
    "fsdp-tp": (SMALL, "fp32", {"dp_shard": 2, "tp": 2}),
    "pp-cp, statistics of layers": (WITH_STATS, "fp32", {"pp": 2, "cp": 2}),
    "pp-cp, loss weights": (WITH_LOSS_WEIGHTS, "fp32", {"pp": 2, "cp": 2}),
    "documents": (WITH_DOCUMENTS, "fp32", {"cp": 2}),
    "streamed": (STREAMED, "fp32", {"dp_shard": 2}),
    "tp-ep": (WITH_EXPERTS, "fp32", {"tp": 2, "ep": 2}),
    "fsdp-ep": (WITH_EXPERTS, "fp32", ON_EP),
    "pp, experts": (WITH_EXPERTS, "fp32", {"pp": 2}),
    "fsdp-ep, bf16": (WITH_EXPERTS, "bf16", ON_EP),  # choices may be others, but few
    "fsdp-ep, muon and a mean": (WITH_ALL, "fp32", ON_EP),
    "pp, muon and a mean": (WITH_ALL, "fp32", {"pp": 2}),
    "hsdp, bf16 sums": (SMALL, "bf16 sums", HSDP),
    "tp, bf16": (SMALL, "bf16", {"tp": 2}),
    "hsdp, weights and Muon in bf16": (STORED_IN_BF16, "user types", HSDP),
    "hsdp, weights in bf16 but some": (STORED_BUT_SOME, "user types", HSDP),
    "fsdp, reduced in bf16": (REDUCED_IN_BF16, "user types", {"dp_shard": 2}),
    "fsdp-ep, norms of groups and statistics": (WITH_NORMS, "fp32", ON_EP),
    "fsdp-ep, norms of groups and statistics, bf16": (WITH_NORMS, "bf16", ON_EP),
    "mtp, pp": (WITH_MTP, "fp32", {"pp": 2}),
    "mtp, fsdp-ep": (WITH_MTP, "fp32", ON_EP),
    "mtp, tp-cp": (WITH_MTP, "fp32", {"tp": 2, "cp": 2}),
    "mtp, pp, bf16": (WITH_MTP, "bf16 sums", {"pp": 2}),
    "mtp, pp, weights in bf16 but some": (WITH_COPY, "user types", {"pp": 2}),
    "mtp, pp, norms of groups": (NORM_OF_COPY, "bf16 sums", {"pp": 2}),
    "pp, float8": (FLOAT8, "bf16 sums", {"pp": 2}),
    "tp, float8": (FLOAT8, "bf16", {"tp": 2}),
    "hsdp, float8 by tensor": (TENSORWISE, "bf16 sums", HSDP),
    "tp-cp, float8 by tensor": (TENSORWISE, "bf16", {"tp": 2, "cp": 2}),
    "pp, float8 by tensor": (TENSORWISE, "bf16 sums", {"pp": 2}),
}


@pytest.mark.parametrize(("small", "kind", "mesh"), slow_but("fsdp-tp streamed", SOUND))
def test_a_sound_mesh_is_equal(verdict_of, small, kind, mesh) -> None:
    verdict = verdict_of(case_on(small, kind, **mesh), small=small)
    assert verdict.failures == []
    assert verdict.errors["metrics"] == 0
    if small in (STORED_IN_BF16, STORED_BUT_SOME):  # hardly a sum in fp32 lies at a tie
        assert verdict.errors[DIFFERENT] < 1e-3
    if kind == "fp32":  # gradients are computed in another order; a loss may be equal by chance
        errors = verdict.errors
        assert errors["of"]
        assert errors["loss"] < 1e-6
        assert 0 < errors["gradient"] < 1e-5
        assert errors[OTHER_CHOICES] == 0
        assert 0 <= errors[LATER_GRADIENT] < 1e-5
        assert (errors[LATER_GRADIENT] > 0) == (small.model.name == "qwen3_moe")
        assert 0 < errors["update"] < 1e-3
    elif small is SMALL:  # nothing but sums in another order, or matmuls of parts
        low, high = (0, 1e-7) if kind == "bf16 sums" else (1e-3, 0.05)
        assert low <= verdict.errors["gradient"] < high


USES = {
    "tied-mtp-1": ["--model.args.mtp_depth=1", "--model.args.tie_embeddings=true"],
    "mtp-2": ["--model.args.mtp_depth=2"],
}


@pytest.mark.parametrize(
    "words", slow_but("mtp-2", {name: [words] for name, words in USES.items()})
)
def test_an_embedding_that_a_stage_uses_twice_goes_with_a_backward_in_two_passes(
    verdict_of, words
) -> None:
    small = small_job(*words, n_layers=4)
    options = {"pipeline_parallel_schedule": "InterleavedZeroBubble"}
    case = build_case("case", small, {"pp": 2}, parallelism=options)
    assert verdict_of(case, small=small).failures == []


@pytest.mark.parametrize(
    ("axes", "name"),
    [
        ({"dp_shard": 8}, "dp_shard 8 x ep 8"),
        ({"tp": 2}, "dp_shard 2 x tp 2 x ep 4"),
        ({"pp": 4}, "pp 4 x dp_shard 2 x ep 2"),
    ],
)
def test_experts_stay_experts_and_their_degree_fits_the_ranks(axes, name) -> None:
    words = [f"--parallelism.{KEYS[axis]}={degree}" for axis, degree in axes.items()]
    words += ["--model.name=qwen3_moe", "--parallelism.expert_parallel_degree=8"]
    config = load_config(words)
    small = shrink(config, args_of(config))
    skip_without_mesh_of_experts()
    assert small.model.args["n_experts"] == 8
    cases = default_cases(config, small, args_of(config))
    assert all(map(can_run, cases))
    assert cases[0].mesh == {part.split()[0]: int(part.split()[1]) for part in name.split(" x ")}
    every = every_mesh(small, args_of(config))
    assert {case.mesh.get("ep", 1) for case in every} == {1, 2, 4, 8}
    assert all(case.mesh.get("ep", 1) <= case.world_size <= 8 for case in every)


FIRST_LOSS = "loss: .* at step 1 "
SHARDS = {"dp_shard": 2}
FAULTY = {
    "gradients_times_eight": (SHARDS, ["norm: ", r"of tok_embeddings.weight: .* 7\.0e\+00"]),
    "no_sum_over_tp": ({"tp": 2}, [FIRST_LOSS]),
    "validation_of_own_samples": (SHARDS, ["validation/bits_per_byte: .* on rank 0, 1"]),
    "resume_a_batch_late": (SHARDS, ["resume: .* samples, .* on rank 1"]),
    "a_tensor_not_saved": ({"pp": 2}, [f"checkpoint: does not hold {MOMENT}, on rank 1"]),
    "loss_in_bf16": (SHARDS, ["^gradient of output"], "bf16 sums"),
    "sums_over_tp_in_bf16": (
        {"tp": 2},
        ["^sums over ranks: gradients of norm.weight in bfloat16, .* on rank 0, 1$"],
        "bf16",
    ),
}
"""Many more: tests/faults."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if "bf16" in name else ()) for name in FAULTY],
)
def test_planted_faults_are_named(verdict_of, name) -> None:
    mesh, words, *kind = FAULTY[name]
    verdict = verdict_of(case_on(SMALL, *kind, **mesh), name)
    text = "\n".join(verdict.failures)
    for pattern in words:
        assert re.search(pattern, text, re.MULTILINE), text
    assert verdict.errors["weights"] == verdict.errors["batches"] == 0
    if words[0].startswith(("validation", "resume", "checkpoint")):
        assert "gradient of" not in text  # training itself is right
    if name == "gradients_times_eight":
        assert verdict.errors["gradient"] == pytest.approx(7, rel=1e-3)


@pytest.mark.ranks(1)
def test_a_case_leaves_the_folder_of_checkpoints_to_the_next(tmp_path) -> None:
    """A save into a folder that is gone since the last one warns about its file system."""
    folder = tmp_path / "checkpoint"
    clear_checkpoints(folder)
    (folder / "step-4").mkdir(parents=True)
    clear_checkpoints(folder)
    assert folder.is_dir()
    assert not (folder / "step-4").exists()


def test_rounding_is_the_largest_of_all_layers() -> None:
    errors = {"layers.0.w1": 0.1, "layers.11.w1": 0.3, "layers.0.w2": 0.2, "norm": 0.4}
    assert _largest_of_layers(errors) == errors | {"layers.0.w1": 0.3}


def break_off(config: JobConfig, world_size: int, file: Path, _: bool) -> Measurement:
    if config.parallelism.tensor_parallel_degree == 2:
        raise ValueError("no such luck")
    return measure(config, world_size, file)


def has_no_luck(config: JobConfig, file: Path, _: bool) -> None:
    raise ValueError("no such luck")


def test_a_job_that_stops_on_one_process_is_one_sentence(monkeypatch) -> None:
    monkeypatch.setattr("meshwright.commands.prove.prove.record_reference", has_no_luck)
    sentence = r"small job stops on one process: ValueError: no such luck \(.*py:\d+\)\n  fix: corr"
    with pytest.raises(ConfigError, match=sentence):
        next(prove(SMALL, [case_on(tp=2), case_on(dp_shard=2)]))


def test_the_command_goes_on_after_a_case_that_stops(tmp_path, monkeypatch, capsys) -> None:
    words = ["debug_model", "--output", str(tmp_path), "--parallelism.tensor_parallel_degree=2"]
    monkeypatch.setattr("sys.argv", ["meshwright", "prove", *words])
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")  # as for other tests, afterwards
    assert [*prove(SMALL, [])] == []
    assert os.environ.pop("TORCHINDUCTOR_VEC_ISA_OK") == "1"  # the user's
    cases = [case_on(tp=2), case_on(dp_shard=2)]
    monkeypatch.setattr("meshwright.commands.prove.command.shrink", lambda *_: SMALL)
    monkeypatch.setattr("meshwright.commands.prove.command.default_cases", lambda *_: cases)
    monkeypatch.setattr("meshwright.commands.prove.prove.measure", break_off)
    monkeypatch.setattr(reference, "check_reference", lambda *_: Checked(errors={"loss": 0.0}))
    reach = properties.Property("reach", 4, 0, "keys", ["layer 1: query 2 sees no key"])
    monkeypatch.setattr(properties, "check_properties", lambda *_: [reach])
    with pytest.raises(SystemExit) as exit_code:
        main()
    assert exit_code.value.code == 1
    assert os.environ["TORCHINDUCTOR_VEC_ISA_OK"] == "0"  # a minute less for compiled cases
    out = capsys.readouterr().out
    assert re.search(
        r"\n    stopped: rank \d: ValueError: no such luck \(.*/test_prove.py:\d+\)\n", out
    )
    assert "Traceback" not in out
    assert "1 of 2 cases equal one process, which fails reach; see" in out
    assert "reach      4        0      FAILED   keys\n    layer 1: query 2 sees no key" in out
    assert "reference against plain PyTorch: equal; loss 0.0e+00" in out
    proof = json.loads((tmp_path / "proof.json").read_text())
    assert proof["proved"] is False
    assert [bool(case["failures"]) for case in proof["cases"]] == [True, False]
    assert "Traceback" in proof["cases"][0]["details"]
    assert "no such luck" in (tmp_path / "proof.md").read_text()


@pytest.mark.parametrize(
    "preset",
    slow_but(
        "debug_model debug_model_3d debug_qwen3_moe llama3_8b",
        {path.stem: [path] for path in sorted(PRESETS.glob("*.toml"))},
    ),
)
def test_every_case_of_every_preset_can_run(preset) -> None:
    text = preset.read_text()
    config = load_config(["--job.config_file", str(preset)])
    args = args_of(config)
    if args.table.mixtures:
        skip_without_mesh_of_experts()
    small = shrink(config, args)
    cases = default_cases(config, small, args) + every_mesh(small, args)
    assert len({case.name for case in cases}) > 16
    assert max(case.world_size for case in cases) == 8
    for case in cases:
        plan = resolved(case.config, case.world_size)
        assert plan.config.training.global_batch_size == 8
    own = next(case for case in cases if case.name.startswith("as configured"))
    for key in ("tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree"):
        is_used = getattr(config.parallelism, key) > 1
        assert (getattr(own.config.parallelism, key) > 1) == is_used, text


def test_float8_is_proved_in_bf16_and_emulated() -> None:
    config = load_config(["--float8.enable=true", "--parallelism.tensor_parallel_degree=2"])
    cases = default_cases(config, shrink(config, ARGS), ARGS)
    for case in cases:
        plan = resolved(case.config, case.world_size)
        assert bool(plan.float8_layers) == (case.kind != "fp32")
        assert case.bounds == case.kind.replace("bf16", "float8")
        assert case.config.float8.emulate
    names = {case.name for case in cases if case.kind != "fp32"}
    assert {"float8: dp_shard 2 x tp 2", "float8, compiled: dp_shard 2"} <= names


@pytest.mark.slow
def test_another_recipe_of_float8_shows(verdict_of) -> None:
    case = case_on(FLOAT8, "bf16 sums", pp=2)
    config = changed(case.config, {"float8": {"recipe_name": "tensorwise"}})
    verdict = verdict_of(dataclasses.replace(case, config=config), small=FLOAT8)
    assert any(text.startswith("gradient of layers.") for text in verdict.failures)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_has_microbatches_enough(schedule) -> None:
    axes = [f"--parallelism.{key}=2" for key in KEYS.values()]
    words = [*axes, f"--parallelism.pipeline_parallel_schedule={schedule}"]
    config = load_config([*words, "--compile.enable=false"])
    args = args_of(config)
    cases = default_cases(config, shrink(config, args), args)
    for case in cases:
        resolved(case.config, case.world_size)
    own = [case.config.parallelism for case in cases if case.name.startswith("as configured")]
    for key in KEYS.values():
        assert any(getattr(parallelism, key) == 2 for parallelism in own)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["tp=8", "dp_shard=1"], ["as configured: tp 8"]),
        (
            ["tp=4", "dp_shard=16"],
            ["as configured: dp_shard 2 x tp 4", "dp_shard only: dp_shard 8"],
        ),
        (["cp=4", "dp_shard=2"], ["as configured: dp_shard 2 x cp 4"]),
        (["pp=8", "dp_shard=1"], ["as configured: pp 8"]),
        (["pp=3", "dp_shard=-1"], ["as configured: pp 3 x dp_shard 2"]),
        (
            ["pp=64", "dp_shard=64", "tp=8"],
            ["as configured: pp 2 x dp_shard 2 x tp 2", "tp only: tp 8"],
        ),
    ],
)
def test_degrees_are_the_users_where_they_fit(words, names) -> None:
    words = [word.split("=") for word in words]
    config = load_config([f"--parallelism.{KEYS[axis]}={degree}" for axis, degree in words])
    args = FLAVORS["llama3_8b"]
    cases = default_cases(config, shrink(config, args), args)
    assert {*names} <= {case.name for case in cases}
    for case in cases:
        resolved(case.config, case.world_size)


def parts_of(*sizes: int) -> list[list[str]]:
    """Stages of so many layers."""
    ends = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    parts = [[f"layers.{i}" for i in range(*pair)] for pair in itertools.pairwise(ends)]
    return [["tok_embeddings", *parts[0]], *parts[1:-1], [*parts[-1], "norm", "output"]]


@pytest.mark.parametrize(
    ("flavor", "pp", "schedule", "parts", "per_rank", "small"),
    [
        ("debugmodel", 2, "1F1B", parts_of(1, 5), -1, parts_of(1, 5)),  # small as it is
        ("debugmodel", 3, "1F1B", parts_of(3, 1, 2), -1, parts_of(3, 1, 2)),
        ("llama3_8b", 4, "1F1B", parts_of(7, 8, 9, 8), -1, parts_of(2, 2, 2, 2)),
        ("llama3_8b", 4, "1F1B", parts_of(1, 12, 12, 7), -1, parts_of(1, 2, 2, 2)),
        ("llama3_8b", 2, "Interleaved1F1B", parts_of(8, 8, 8, 8), 2, parts_of(2, 2, 2, 2)),
        ("llama3_8b", 4, "Interleaved1F1B", [], 2, []),
    ],
)
def test_stages_are_the_users_where_they_fit(flavor, pp, schedule, parts, per_rank, small) -> None:
    config = load_config(
        [
            f"--parallelism.pipeline_parallel_degree={pp}",
            f"--parallelism.pipeline_parallel_schedule={schedule}",
            f"--parallelism.module_fqns_per_model_part={parts}",
            f"--parallelism.pipeline_parallel_stages_per_rank={per_rank}",
            "--parallelism.data_parallel_shard_degree=1",
        ]
    )
    args = FLAVORS[flavor]
    case = default_cases(config, shrink(config, args), args)[0]
    plan, own = resolved(case.config, case.world_size), case.config.parallelism
    assert (own.pipeline_parallel_degree, own.pipeline_parallel_schedule) == (pp, schedule)
    assert own.module_fqns_per_model_part == small
    assert own.pipeline_parallel_stages_per_rank == per_rank
    assert len(plan.pipeline_modules) == pp * max(per_rank, 1)


def test_what_is_kept_and_what_is_not() -> None:
    tied = FLAVORS["llama3_1b"]
    config = load_config(["--training.seed=7", "--optimizer.lr=3e-4", "--model.flavor=llama3_1b"])
    plan = resolved(shrink(config, tied), 1)
    assert plan.config.training.seed == 7
    assert plan.config.optimizer.lr == 3e-4
    assert plan.model_args.tie_embeddings
    assert plan.model_args.rope_scaling == tied.rope_scaling
    assert plan.model_args.vocab_size % 2
    assert plan.model_args.n_heads > plan.model_args.n_kv_heads
    assert plan.model_args.n_kv_heads % largest_tp(tied) == 0


@pytest.mark.parametrize("flavor", FLAVORS)
def test_heads_are_narrow_whatever_the_users_are(flavor) -> None:
    words = [f"--model.flavor={flavor}", "--model.args.norm_eps=1e-6"]
    if flavor == "debugmodel":
        words.append("--model.args.dim=1024")
    config = load_config(words)
    args = resolve_model(config)[1]
    small = resolved(reference_case(shrink(config, args)).config, 1).model_args
    assert small.head_dim == HEAD_DIM != args.head_dim
    assert small.norm_eps == 1e-6
    # all that is not known to be kept is the small model's: a new field must be decided on
    decided = {*KEPT, *shrink(config, args).model.args, "mup_base_dim"}  # None, as the user's
    assert decided == {*dataclasses.asdict(args)}


def test_a_config_that_cannot_run_is_not_proved(monkeypatch, capsys) -> None:
    arguments = ["prove", "debug_model", "--parallelism.tensor_parallel_degree", "3"]
    monkeypatch.setattr("sys.argv", ["meshwright", *arguments])
    with pytest.raises(SystemExit) as exit_code:
        main()
    assert exit_code.value.code == 2
    assert "does not divide n_heads = 8" in capsys.readouterr().err
