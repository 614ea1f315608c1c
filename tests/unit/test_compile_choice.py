"""`compile.enable = "auto"`: a function of the job's work, its options, and the compiler."""

import stat
from collections.abc import Callable
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
from meshwright.parallelisms.rules import compile_choice
from meshwright.parallelisms.rules.compile_choice import LEAST_FLOP
from meshwright.system.errors import ConfigError
from meshwright.system.processes import Launch, Requests
from meshwright.train.main import _run_command_line
from meshwright.train.preflight import Plan, preflight
from meshwright.train.resolve_model import resolve_model
from tests.helpers.cli import check_job

DEBUG = str(Path(__file__).parents[2] / "train_configs/debug_model.toml")
LONG = ["--training.steps=50000"]
TWO_BY_TENSORS = ["--parallelism.tensor_parallel_degree=2"]
FULL = ["--activation_checkpoint.mode=full"]
SPLIT = ["--parallelism.pipeline_parallel_degree=2"]
SPLIT += ["--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"]
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
def plan_of(tmp_path: Path) -> Callable[..., Plan]:
    def plan_of(*words: str, ranks: int = 1) -> Plan:
        dump = f"--job.dump_folder={tmp_path / 'out'}"
        return preflight(load_config([DEBUG, dump, *words]), ranks)

    return plan_of


def test_the_work_of_the_whole_job_decides(plan_of) -> None:
    plan = plan_of()
    training = plan.config.training
    assert plan.config.compile.enable is False
    work = plan.model_args.table.flops_per_token(training.seq_len) * training.seq_len
    work *= training.global_batch_size
    assert work * training.steps < LEAST_FLOP / 5
    enough = -int(-LEAST_FLOP // work)
    for steps, is_on in ((enough - 1, False), (enough, True)):
        plan = plan_of(f"--training.steps={steps}")
        assert plan.config.compile.enable is is_on, steps
        assert bool(plan.compile_line) is is_on
    assert plan.compile_line == (
        'compile.enable = "auto": compiled, since the job computes 100 TFLOP (100 TFLOP or more)'
    )
    batch = ["--training.global_batch_size=160", f"--training.steps={enough // 10 + 1}"]
    assert plan_of(*batch).config.compile.enable is True
    length = ["--training.seq_len=2560", f"--training.steps={enough // 10 + 1}"]
    assert plan_of(*length).config.compile.enable is True
    deeper = ["--model.args.n_layers=24", f"--training.steps={enough // 2}"]
    assert plan_of(*deeper).config.compile.enable is True


def test_neither_the_mesh_nor_a_value_that_is_given_decides(plan_of) -> None:
    for value in (True, False):
        for words in ([], LONG):
            plan = plan_of(*words, f"--compile.enable={str(value).lower()}")
            assert plan.config.compile.enable is value
            assert plan.compile_line == ""
    words = [*LONG, "--training.global_batch_size=16", "--training.local_batch_size=1"]
    for ranks in (1, 2, 8):
        plan = plan_of(*words, ranks=ranks)
        assert plan.config.compile.enable is True
        assert "compiled, since the job computes 7.41 PFLOP" in plan.compile_line


@pytest.mark.parametrize(
    ("words", "ranks", "reason", "error"),
    [
        (INSIDE, 1, "training.fp32_modules names modules inside a block", "inside a block"),
        (SPLIT, 2, "ZBVZeroBubble computes gradients in two passes", "which compiled blocks"),
        ([*TWO_BY_TENSORS, *FULL], 2, "recomputed attention under tensor or expert", ""),
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
    assert plan.compile_line.startswith('compile.enable = "auto": eager, since ')
    assert reason in plan.compile_line
    words.append("--compile.enable=true")
    if error:
        with pytest.raises(ConfigError, match=error):
            plan_of(*words, ranks=ranks)
    else:
        assert plan_of(*words, ranks=ranks).config.compile.enable is True


def test_the_same_options_that_can_be_compiled_are(plan_of) -> None:
    whole = ['--training.fp32_modules=["layers.0"]', INSIDE[1]]
    one_pass = [SPLIT[0], "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"]
    for words, ranks in ((whole, 1), (one_pass, 2), (TWO_BY_TENSORS, 2), (FULL, 1), (SPLIT[1:], 1)):
        assert plan_of(*LONG, *words, ranks=ranks).config.compile.enable is True, words


def test_without_a_compiler_the_job_is_eager(plan_of, compiler, monkeypatch) -> None:
    monkeypatch.setenv("CXX", str(compiler))
    assert plan_of(*LONG).config.compile.enable is True
    monkeypatch.setenv("CXX", "clang++")  # and g++ is not looked for
    assert "no C++ compiler 'clang++'" in plan_of(*LONG).compile_line
    monkeypatch.delenv("CXX")
    compiler.unlink()
    plan = plan_of(*LONG)
    assert plan.config.compile.enable is False
    assert "eager, since there is no C++ compiler 'g++'" in plan.compile_line
    assert plan_of(*LONG, "--compile.enable=true").config.compile.enable is True


def test_triton_needs_a_c_compiler(plan_of, compiler, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "triton" or None)
    assert plan_of(*LONG).config.compile.enable is True
    (gcc := compiler.with_name("gcc")).unlink()
    plan = plan_of(*LONG)
    assert plan.config.compile.enable is False
    assert "no C compiler for Triton" in plan.compile_line
    gcc.with_name("clang").symlink_to(compiler)
    assert plan_of(*LONG).config.compile.enable is True


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


def test_machines_that_cannot_compile_are_eager(plan_of, monkeypatch, tmp_path) -> None:
    """Without Python's headers; with a torch that cannot be linked."""
    (headers := tmp_path / "include/Python.h").unlink()
    plan = plan_of(*LONG)
    assert plan.config.compile.enable is False
    assert "Python's headers for C++ are not installed" in plan.compile_line
    headers.touch()
    monkeypatch.setattr(compile_choice, "_torch_file", lambda: "/home/me/my work/torch/__init__.py")
    plan = plan_of(*LONG)
    assert plan.config.compile.enable is False
    assert "in a folder with a blank in its name (/home/me/my work/torch" in plan.compile_line
    assert compile_choice.why_no_compiler(is_gpu=True) == ""  # Triton links by itself


BUDGET = "--activation_checkpoint.mode=memory_budget"
ASYNC_TP = [*TWO_BY_TENSORS, "--parallelism.enable_async_tensor_parallel"]


def test_an_option_that_needs_it_compiles_the_smallest_job(plan_of, compiler) -> None:
    """As true would: with its errors, and on a machine that cannot."""
    compiler.unlink()
    budget_by = [BUDGET, "--compile.backend=aot_eager"]
    for words, ranks in (([BUDGET], 1), (ASYNC_TP, 2), (budget_by, 1)):
        plan = plan_of("--training.steps=1", *words, ranks=ranks)
        assert plan.config.compile.enable is True
        assert "needs it" in plan.compile_line
    assert plan_of(ASYNC_TP[1]).config.compile.enable is False  # of no effect on one rank
    with pytest.raises(ConfigError, match="which compiled blocks cannot"):
        plan_of(BUDGET, *SPLIT, ranks=2)
    with pytest.raises(ConfigError, match="names modules inside a block"):
        plan_of(BUDGET, *INSIDE)


def test_every_way_to_write_it(tmp_path) -> None:
    path = tmp_path / "again.toml"
    key = "--compile.enable"
    for words, value in (
        *(([], "auto"), ([key, "auto"], "auto"), ([key, '"auto"'], "auto")),
        *(([key], True), ([key, "True"], True), ([key, "--training.steps", "3"], True)),
        ([f"{key}=false"], False),
    ):
        config = load_config(words)
        assert config.compile.enable is value or config.compile.enable == value == "auto"
        path.write_text(to_toml(config))
        assert load_config([str(path)]).compile == config.compile
        assert JobConfig.model_validate(to_json(config)).compile == config.compile
    for text, meant in (
        ('"true"', "true"),
        ('"off"', "false"),
        ("1", "true"),
        ('"atuo"', ""),
        ("[true]", ""),
    ):
        path.write_text(f"[compile]\nenable = {text}\n")
        with pytest.raises(ConfigError) as caught:
            load_config([str(path)])
        said = str(caught.value)
        assert said.count("compile.enable = ") == 1
        assert 'must be true, false or "auto"' in said
        assert said.partition("fix: ")[2] == (f"write {meant}, without quotes" if meant else ""), (
            text
        )


def test_check_says_it_once(tmp_path, capsys) -> None:
    words = [DEBUG, "--ngpu", "1", "--job.dump_folder", str(tmp_path)]
    check_job([*words, *LONG])
    out = capsys.readouterr().out
    assert out.count('compile.enable = "auto": compiled, since the job computes 7.41 PFLOP') == 1
    check_job([*words, *LONG, "--compile.enable=true"])
    check_job(words)  # and is silent if it is as small as the preset
    assert "compile.enable" not in capsys.readouterr().out


def test_what_is_beside_it_is_idle_only_if_the_job_is_eager(plan_of) -> None:
    words = ["--compile.cpu_attention=torch"]
    text = "compile.cpu_attention = 'torch' has no effect: compile.enable = false"
    assert text in plan_of(*words).notes
    assert text not in plan_of(*LONG, *words).notes


@pytest.mark.parametrize(
    ("words", "is_on"),
    [(LONG, False), (["--compile.enable=true"], True), ([BUDGET], True)],
)
def test_a_proof_compiles_the_config_if_it_says_so_or_must(words, is_on) -> None:
    """Many compilers at once take minutes, so "auto" has one case of its own."""
    words = [DEBUG, *words, "--parallelism.data_parallel_replicate_degree=2"]
    config = load_config(words)
    _, args = resolve_model(config)
    cases = default_cases(config, shrink(config, args), args)
    for case in cases:
        plan = preflight(case.config, case.world_size)
        wanted = {"as configured": is_on, "compiled": True}
        assert plan.config.compile.enable is wanted.get(case.name.split(":")[0], False), case.name


@pytest.mark.parametrize(
    ("value", "name"), [("true", "as configured, but eager"), ("false", "as configured")]
)
def test_a_proof_says_where_it_is_eager_against_the_config(value, name) -> None:
    words = [*FULL, *TWO_BY_TENSORS, f"--compile.enable={value}"]
    config = load_config([DEBUG, *words])
    _, args = resolve_model(config)
    assert default_cases(config, shrink(config, args), args)[0].name.split(":")[0] == name


def test_recomputed_attention_that_is_cut_is_compiled_on_gpus_but_not_in_a_plan() -> None:
    config = load_config([DEBUG, *LONG])
    assert plan_job(config, 1, is_gpu=True).config.compile.enable is False
    config = load_config([DEBUG, *LONG, *FULL, *TWO_BY_TENSORS])
    for is_gpu in (False, True):
        assert preflight(config, 2, is_gpu=is_gpu).config.compile.enable is is_gpu


def test_a_search_leaves_a_job_compiled_that_is() -> None:
    for words, has_split in ((LONG, False), ([], True)):
        config = load_config([DEBUG, *words, "--training.global_batch_size=64"])
        plans = (plan for _, plan in legal(config, 2, find_device("h100")) if plan.dims.pp > 1)
        schedules = {plan.config.parallelism.pipeline_parallel_schedule for plan in plans}
        assert ("ZBVZeroBubble" in schedules) == has_split
        assert "1F1B" in schedules


def test_a_longer_job_may_change_when_it_resumes(plan_of) -> None:
    short, long = (to_json(plan_of(*words).config) for words in ([], LONG))
    found = [change for change in changes(short, long, config_defaults()) if change.old is False]
    assert found == [Difference("compile.enable", False, True)]
