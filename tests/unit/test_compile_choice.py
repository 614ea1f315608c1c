"""`compile.enable = "auto"`: a function of the device, the steps, the options, and the compiler."""

import os
import stat
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from meshwright.commands.plan.devices import find_device
from meshwright.commands.plan.search import legal
from meshwright.commands.plan.simulate import plan_job
from meshwright.commands.prove.cases import default_cases
from meshwright.commands.prove.shrink import shrink
from meshwright.config.changes import Difference, changes, config_defaults, to_json
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config, to_toml
from meshwright.config.rules import broken_rules
from meshwright.parallelisms.rules import compile_choice
from meshwright.parallelisms.rules.compile_choice import LEAST_STEPS_ON_CPU, why_no_compiler
from meshwright.system.errors import ConfigError
from meshwright.system.processes import Launch, Requests
from meshwright.train.main import _run_command_line
from meshwright.train.resolve import ResolvedJob
from meshwright.train.resolve_model import resolve_model
from tests.helpers.cli import check_job
from tests.helpers.resolved import resolved

DEBUG = str(Path(__file__).parents[2] / "train_configs/debug_model.toml")
LONG = ["--training.steps=50000"]
TWO_BY_TENSORS = ["--parallelism.tensor_parallel_degree=2"]
FULL = ["--activation_checkpoint.mode=full"]
SPLIT = ["--parallelism.pipeline_parallel_degree=2"]
SPLIT += ["--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"]
BUDGET = "--activation_checkpoint.mode=memory_budget"
INSIDE = ['--training.fp32_modules=["layers.0.attention"]']
INSIDE += ["--training.mixed_precision_param=bfloat16"]


@pytest.fixture(autouse=True)
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The g++ of a machine that has it and gcc; the environment may have Triton or not."""
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    (folder := tmp_path / "bin").mkdir()
    program = folder / "g++"
    program.write_text("")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (folder / "gcc").symlink_to(program)
    monkeypatch.setenv("PATH", str(folder))
    (headers := tmp_path / "include").mkdir()
    (headers / "Python.h").touch()
    monkeypatch.setattr(compile_choice.sysconfig, "get_path", lambda *_: str(headers))
    monkeypatch.setattr(compile_choice, "_torch_file", lambda: "/usr/lib/torch/__init__.py")
    return program


@pytest.fixture
def plan_of(tmp_path: Path) -> Callable[..., ResolvedJob]:
    def plan_of(*words: str, ranks: int = 1) -> ResolvedJob:
        dump = f"--job.dump_folder={tmp_path / 'out'}"
        return resolved(load_config([DEBUG, dump, *words]), ranks)

    return plan_of


def test_gpus_compile_and_cpus_from_a_number_of_steps_on(plan_of) -> None:
    for steps, is_on in ((LEAST_STEPS_ON_CPU - 1, False), (LEAST_STEPS_ON_CPU, True)):
        plan = plan_of(f"--training.steps={steps}")
        assert plan.config.compile.enable is is_on
        assert bool(plan.reasons["compile.enable"]) is is_on
    assert "compiled, since the job has 500 steps (500 or more)" in plan.reasons["compile.enable"]
    for device_type, is_said in (("cuda", True), (None, False)):  # None: it isn't known here
        plan = resolved(load_config([DEBUG]), 1, expects_gpus=True, device_type=device_type)
        assert plan.config.compile.enable is True
        said = plan.reasons["compile.enable"]
        assert ("compiled, since the job trains on GPUs" in said) is is_said


def test_a_value_that_is_given_decides(plan_of) -> None:
    for words, value in ((LONG, False), ([], True)):
        plan = plan_of(*words, f"--compile.enable={str(value).lower()}")
        assert (plan.config.compile.enable, plan.reasons["compile.enable"]) == (value, "")


@pytest.mark.parametrize(
    ("words", "ranks", "reason", "error"),
    [
        (INSIDE, 1, "training.fp32_modules names modules inside a block", "inside a block"),
        (SPLIT, 2, "ZBVZeroBubble computes gradients in two passes", "which compiled blocks"),
        (["--compile.backend=aot_eager"], 1, '"aot_eager" makes no step faster', ""),
    ],
)
def test_an_option_that_is_against_it_leaves_the_job_eager(
    words, ranks, reason, error, plan_of
) -> None:
    """While true is an error as ever, or compiles."""
    words = [*LONG, *words]
    plan = plan_of(*words, ranks=ranks)
    assert plan.config.compile.enable is False
    assert plan.reasons["compile.enable"].startswith('compile.enable = "auto": eager, since ')
    assert reason in plan.reasons["compile.enable"]
    words.append("--compile.enable=true")
    if error:
        with pytest.raises(ConfigError, match=error):
            plan_of(*words, ranks=ranks)
    else:
        assert plan_of(*words, ranks=ranks).config.compile.enable is True


def test_a_memory_budget_on_gpus_needs_a_torch_that_counts_grouped_heads(monkeypatch) -> None:
    """Old ones raise an assertion, in the first step, where flash attention has them."""
    grouped, bf16 = "--model.args.n_kv_heads=4", "--training.mixed_precision_param=bfloat16"
    for version, is_gpu, words, is_refused in (
        *(("2.11.0", True, [grouped, bf16], True), ("2.13.0", True, [grouped, bf16], False)),
        *(("2.11.0", False, [grouped, bf16], False), ("2.11.0", True, [grouped], False)),
        ("2.11.0", True, ["--model.args.n_kv_heads=8", bf16], False),
        ("2.11.0", True, [grouped, bf16, "--training.mask_documents=true"], False),
    ):
        monkeypatch.setattr(compile_choice, "torch_version", lambda version=version: version)
        monkeypatch.setattr("meshwright.system.modules.torch_version", compile_choice.torch_version)
        config = load_config([DEBUG, BUDGET, *words])
        refusal = pytest.raises(ConfigError, match=r"torch 2\.11\.0 cannot on GPUs")
        with refusal if is_refused else nullcontext():
            resolved(config, 1, expects_gpus=is_gpu)


def test_the_same_options_that_can_be_compiled_are(plan_of) -> None:
    whole = ['--training.fp32_modules=["layers.0"]', INSIDE[1]]
    one_pass = [SPLIT[0], "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"]
    for words, ranks in ((whole, 1), (one_pass, 2), ([*TWO_BY_TENSORS, *FULL], 2), (SPLIT[1:], 1)):
        assert plan_of(*LONG, *words, ranks=ranks).config.compile.enable is True, words


def test_without_a_compiler_the_job_is_eager(plan_of, compiler) -> None:
    assert plan_of(*LONG).config.compile.enable is True
    compiler.unlink()
    plan = plan_of(*LONG)
    assert plan.config.compile.enable is False
    assert "eager, since there is no C++ compiler 'g++'" in plan.reasons["compile.enable"]
    for words, is_told in (
        (["--compile.enable=true"], True),
        ([BUDGET], True),
        (LONG, False),
        (["--compile.enable=true", "--compile.backend=aot_eager"], False),
    ):
        plan = plan_of(*words)
        on_cpu = replace(plan.facts, device_type="cpu")
        said = "".join(map(str, broken_rules(plan.config, on_cpu, compile_choice.RULES)))
        assert ("enable = true: there is no C++ compiler" in said) == is_told
        on_gpu = replace(plan.facts, device_type="cuda")
        assert not broken_rules(plan.config, on_gpu, compile_choice.RULES)


def test_where_libraries_do_not_load_the_job_is_eager(plan_of, monkeypatch, tmp_path) -> None:
    """As in /tmp of many clusters and containers."""
    (noexec := tmp_path / "noexec").mkdir()
    found = os.statvfs
    monkeypatch.setattr(
        "os.statvfs",
        lambda path: Mock(f_flag=os.ST_NOEXEC) if path == noexec else found(path),
    )
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert why_no_compiler() == ""
    monkeypatch.setattr("tempfile.tempdir", str(noexec))
    assert f"{noexec} is mounted noexec (TORCHINDUCTOR_CACHE_DIR" in why_no_compiler()
    assert plan_of(*LONG).config.compile.enable is False
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
    assert why_no_compiler() == ""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(noexec / "sub/folder"))
    assert "sub/folder is mounted noexec" in why_no_compiler()


def test_the_compilers_that_a_machine_needs(compiler, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", str(compiler))
    assert why_no_compiler() == ""
    monkeypatch.setenv("CXX", "clang++")  # and g++ is not looked for
    assert "no C++ compiler 'clang++'" in why_no_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(compile_choice, "is_installed", lambda name: name == "triton")
    assert why_no_compiler() == ""
    (gcc := compiler.with_name("gcc")).unlink()
    assert "no C compiler for Triton" in why_no_compiler()
    gcc.with_name("clang").symlink_to(compiler)
    assert why_no_compiler() == ""
    monkeypatch.setattr(compile_choice, "_torch_file", lambda: "/home/me/my work/torch/__init__.py")
    assert "in a folder with a blank in its name (/home/me/my work/torch" in why_no_compiler()
    assert why_no_compiler(is_gpu=True) == ""  # Triton links by itself
    (tmp_path / "include/Python.h").unlink()
    assert "Python's headers for C++ are not installed" in why_no_compiler()


def test_an_error_of_the_compiler_names_the_way_out(plan_of, monkeypatch) -> None:
    class FailedError(Exception):
        __module__ = "torch._inductor.exc"

    monkeypatch.setattr("meshwright.train.main.run", Mock(side_effect=FailedError))
    notes = []
    for words in (LONG, [*LONG, "--compile.enable=true"], []):
        monkeypatch.setattr("sys.argv", ["train.py", "--job.config_file", DEBUG, *words])
        with pytest.raises(FailedError) as caught:
            _run_command_line(Launch(), Requests())
        notes.append("".join(getattr(caught.value, "__notes__", [])))
    assert notes[0].endswith("fix: compile.enable = false")
    assert notes[1:] == ["", ""]


ASYNC_TP = [*TWO_BY_TENSORS, "--parallelism.enable_async_tensor_parallel"]


def test_an_option_that_needs_it_compiles_the_smallest_job(plan_of) -> None:
    """As true would, with its errors."""
    budget_by = [BUDGET, "--compile.backend=aot_eager"]
    for words, ranks in (([BUDGET], 1), (ASYNC_TP, 2), (budget_by, 1)):
        plan = plan_of("--training.steps=1", *words, ranks=ranks)
        assert plan.config.compile.enable is True
        assert "needs it" in plan.reasons["compile.enable"]
    assert plan_of(ASYNC_TP[1]).config.compile.enable is False  # of no effect on one rank
    with pytest.raises(ConfigError, match="which compiled blocks cannot"):
        plan_of(BUDGET, *SPLIT, ranks=2)
    with pytest.raises(ConfigError, match="names modules inside a block"):
        plan_of(BUDGET, *INSIDE)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], "auto"),
        (["--compile.enable", "auto"], "auto"),
        (["--compile.enable", '"auto"'], "auto"),
        (["--compile.enable", "--training.steps", "3"], True),
        (["--compile.enable=false"], False),
    ],
)
def test_every_way_to_write_it(words, value, tmp_path) -> None:
    config = load_config(words)
    assert config.compile.enable is value or config.compile.enable == value == "auto"
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_config([str(tmp_path / "again.toml")]).compile == config.compile
    assert JobConfig.model_validate(to_json(config)).compile == config.compile


@pytest.mark.parametrize(
    ("text", "meant"), [('"off"', "false"), ("1", "true"), ('"atuo"', ""), ("[true]", "")]
)
def test_another_value_is_one_mistake(text, meant, tmp_path) -> None:
    (tmp_path / "a.toml").write_text(f"[compile]\nenable = {text}\n")
    with pytest.raises(ConfigError) as caught:
        load_config([str(tmp_path / "a.toml")])
    said = str(caught.value)
    assert said.count('must be true, false or "auto"') == said.count("compile.enable = ") == 1
    assert said.partition("fix: ")[2] == (f"write {meant}, without quotes" if meant else "")


def test_check_says_it_once(tmp_path, capsys) -> None:
    words = [DEBUG, "--job.dump_folder", str(tmp_path)]
    for others, times in (LONG, 1), ([*LONG, "--compile.enable=true"], 0):
        check_job([*words, *others])
        assert capsys.readouterr().out.count("compile.enable = ") == times


def test_what_is_beside_it_is_idle_only_if_the_job_is_eager(plan_of) -> None:
    words = ["--compile.cpu_attention=torch"]
    text = "compile.cpu_attention = 'torch' has no effect: compile.enable = false"
    assert text in plan_of(*words).notes
    assert text not in plan_of(*LONG, *words).notes


REPLICATED = ["--parallelism.data_parallel_replicate_degree=2"]


@pytest.mark.parametrize(
    ("words", "first", "is_on"),
    [
        ([*LONG, *REPLICATED], "as configured", False),
        (["--compile.enable=true", *REPLICATED], "as configured", True),
        ([BUDGET, *REPLICATED], "as configured", True),
        (["--compile.enable=true", *FULL, *TWO_BY_TENSORS], "as configured", True),
        (["--compile.enable=false", *FULL, *TWO_BY_TENSORS], "as configured", False),
    ],
)
def test_a_proof_compiles_the_config_if_it_says_so_or_must(words, first, is_on) -> None:
    """Many compilers at once take minutes, so "auto" has one case of its own."""
    config = load_config([DEBUG, *words])
    _, args = resolve_model(config)
    cases = default_cases(config, shrink(config, args), args)
    assert cases[0].name.split(":")[0] == first
    for case in cases:
        plan = resolved(case.config, case.world_size)
        has_options = case.name.startswith("as configured") or case.kind == "bf16"
        wanted = case.name.startswith("compiled") or (has_options and is_on)
        assert plan.config.compile.enable is wanted, case.name


def test_a_plan_refuses_what_cannot_be_compiled() -> None:
    config = load_config([DEBUG, *SPLIT, "--compile.enable=true"])
    with pytest.raises(ConfigError, match="which compiled blocks cannot"):
        plan_job(config, 2, is_gpu=True)


def test_a_search_leaves_a_job_compiled_that_is() -> None:
    for words, has_split in (([], False), (["--compile.enable=false"], True)):
        config = load_config([DEBUG, *words, "--training.global_batch_size=64"])
        plans = (plan for _, plan in legal(config, 2, find_device("h100")) if plan.dims.pp > 1)
        schedules = {plan.config.parallelism.pipeline_parallel_schedule for plan in plans}
        assert ("ZBVZeroBubble" in schedules) == has_split
        assert "1F1B" in schedules


def test_a_longer_job_may_change_when_it_resumes(plan_of) -> None:
    short, long = (to_json(plan_of(*words).config) for words in ([], LONG))
    found = [change for change in changes(short, long, config_defaults()) if change.old is False]
    assert found == [Difference("compile.enable", False, True)]
