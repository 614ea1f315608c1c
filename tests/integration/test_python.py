"""The names that `import meshwright` has: they do as they say, and leave the process as it was."""

import faulthandler
import gc
import json
import logging
import math
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import meshwright as mw
from meshwright.system.log import logger
from meshwright.system.processes import OTHER_WAITING
from tests.helpers.compare_checkpoints import assert_same_tensors
from tests.helpers.jobs import CONFIG, ROOT, environment, train_alone
from tests.helpers.slow import slow


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As jobs of the tests have it: another number of threads adds up in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SMALL = {"training.steps": 6, "lr_scheduler.warmup_steps": 2, "metrics.enable_tensorboard": False}

OF_LIBC = 0b11 << 31
"""Signals 32 and 33, by which glibc's threads talk."""


def small(folder: Path, **changes: object) -> Any:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return mw.load(CONFIG, SMALL | {"job.dump_folder": str(folder)} | keys)


def surroundings() -> dict[str, Any]:
    """Everything of this process that a library could leave changed behind it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":\t") for line in lines if ":\t" in line)
    numbers = [n for n in signal.valid_signals() if n not in (signal.SIGKILL, signal.SIGSTOP)]
    return {
        "handlers": {number: signal.getsignal(number) for number in numbers},
        "signals": [int(status[name], 16) & ~OF_LIBC for name in ("SigBlk", "SigIgn", "SigCgt")],
        "gc": (gc.isenabled(), gc.get_threshold()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "environment": dict(os.environ),
        "logging": (logger.handlers[:], logger.level, logger.propagate, logging.root.handlers[:]),
        "random": torch.get_rng_state().tolist(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
            torch.backends.cudnn.benchmark,
        ),
        "gradients": (torch.is_grad_enabled(), torch.get_default_dtype()),
        "group": dist.is_initialized(),
        "folder": Path.cwd(),
        "path": sys.path[:],
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.gettrace()),
        "faulthandler": faulthandler.is_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "warnings": warnings.filters[:],
        "limits": {
            k: resource.getrlimit(v)
            for k, v in vars(resource).items()
            if k[:4] == "RLIM" and k != "RLIM_INFINITY"
        },
        "files": sorted(
            os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()
        ),
        "children": sorted(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "start method": multiprocessing.get_start_method(allow_none=True),
    }


def settled(before: dict[str, Any]) -> dict[str, Any]:
    """The surroundings now, once threads that have nothing more to do are gone. What earlier tests
    left, which `before` has, may have ended since, by the garbage collection as well."""
    end = time.monotonic() + 10
    while {*(now := surroundings())["threads"]} - {*before["threads"]} and time.monotonic() < end:
        time.sleep(0.05)
    for name in ("threads", "files", "children"):
        both = Counter(before[name]) & Counter(now[name])
        before[name] = sorted(both.elements())
    return now


def run(folder: Path, **changes: object) -> tuple[list[float], dict[str, torch.Tensor]]:
    with mw.Session(small(folder, **changes)) as session:
        losses = [step.loss for step in session.steps()]
        return losses, {k: v.clone() for k, v in session.model.state_dict().items()}


@pytest.mark.parametrize("deterministic", [False, *slow(True)])
def test_a_session_leaves_no_trace_and_a_second_one_gives_the_same_bits(
    tmp_path: Path, deterministic: bool
) -> None:
    assert mw.Session  # its modules are imported, which stay
    before = surroundings()
    losses, weights = run(tmp_path / "a", training__deterministic=deterministic)
    after = settled(before)
    assert {k: (before[k], v) for k, v in after.items() if v != before[k]} == {}
    again, same_weights = run(tmp_path / "b", training__deterministic=deterministic)
    assert losses == again
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
    assert losses[-1] < losses[0]


def test_a_session_writes_to_its_folder_wherever_the_caller_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by %cd in a notebook: the checkpoint went to another run_a."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with mw.Session(small(Path("run_a"))) as session:
        [*session.steps(1)]
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert session.save() == tmp_path / "run_a/checkpoint/step-1"
    assert [*Path().iterdir()] == []
    assert (tmp_path / "run_a/checkpoint/step-1").is_dir()
    assert len((tmp_path / "run_a/history.jsonl").read_text().splitlines()) == 2


def test_what_the_caller_has_set_in_torch_changes_nothing(tmp_path: Path) -> None:
    """Each ended the first step, or a load, with an error of torch; autocast changed its loss."""

    def use(folder: Path) -> tuple[object, ...]:
        with mw.Session(small(folder)) as session:
            losses = [step.loss for step in session.steps(2)]
            session.save()
            loss = session.evaluate(["a text"])["loss"]
        return losses, loss, mw.generate(*mw.load_model(folder), "a", 4)

    want, before = use(tmp_path / "a"), (torch.get_default_dtype(), torch.is_grad_enabled())
    try:
        torch.set_default_dtype(torch.bfloat16)
        bf16 = torch.autocast("cpu", torch.bfloat16)
        with torch.inference_mode(), torch.device("meta"), bf16:
            assert use(tmp_path / "b") == want
            assert torch.is_autocast_enabled("cpu")
            assert torch.is_inference_mode_enabled()
            assert torch.get_default_device().type == "meta"
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert before == (torch.get_default_dtype(), torch.is_grad_enabled())


MOE = {
    "model__name": "qwen3_moe",
    "model__flavor": "debugmodel",
    "experts__balance_loss": 0.5,
    "experts__bias_update_rate": 0.01,
}
EARLY = {"optimizer__early_step_in_backward": True, "training__max_norm": math.inf}


@pytest.mark.parametrize("changes", [MOE, EARLY], ids=["experts", "early"])
def test_own_use_of_the_model_changes_no_step(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Routers would count its tokens, and its gradients would be added to the step's; or weights
    would be updated at once."""
    want, _ = run(tmp_path / "a", **changes)
    with mw.Session(small(tmp_path / "b", **changes)) as session:
        losses = list[float]()
        while session.step < session.config.training.steps:
            logits = session.model(torch.arange(8).view(1, 8))
            logits.logsumexp(-1).mean().backward()
            losses += [step.loss for step in session.steps(1)]
    assert losses == want


@pytest.mark.slow
def test_every_other_name_leaves_no_trace(tmp_path: Path) -> None:
    job = small(tmp_path / "job")
    with mw.Session(job) as session:
        [*session.steps()]
        session.save()
    model, tokenizer = mw.load_model(tmp_path / "job")
    mw.generate(model, tokenizer, "a", 2)  # modules that are imported stay
    calls = {
        "load": lambda: mw.load(job, {"training.seed": 3}),
        "load_model": lambda: mw.load_model(tmp_path / "job"),
        "generate": lambda: mw.generate(model, tokenizer, "def ", 4, temperature=0.8),
        "read_metrics": lambda: mw.read_metrics(tmp_path / "job"),
        "plan": lambda: mw.plan(job, world_size=2, device="h100"),
        "export": lambda: mw.export(tmp_path / "job", tmp_path / "hf", with_tokenizer=False),
        "prove": lambda: mw.prove(job, quick=True),
    }
    assert {*calls} == {*mw.API} - {"Session", "Step", "ConfigError"}
    for name, call in calls.items():
        before = surroundings()
        assert call(), name
        after = settled(before)
        assert {k: (before[k], v) for k, v in after.items() if v != before[k]} == {}, name


def test_a_failed_session_leaves_no_trace(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("meshwright.api.session.set_up", lambda *_, **__: 1 / 0)
    for _ in range(2):  # modules that the first one imports stay
        before = surroundings()
        with pytest.raises(ZeroDivisionError):
            mw.Session(small(tmp_path / "a"))
    monkeypatch.undo()
    after = settled(before)
    assert {k: v for k, v in after.items() if v != before[k]} == {}
    run(tmp_path / "a")


def test_a_session_and_the_command_take_the_same_steps(tmp_path: Path) -> None:
    words = [f"--{key}={str(value).lower()}" for key, value in SMALL.items()]
    train_alone(tmp_path / "whole", *words)
    with mw.Session(small(tmp_path / "parts")) as session:
        assert [step.step for step in session.steps(2)] == [1, 2]
        first = session.save()
    assert first.name == "step-2"
    train_alone(tmp_path / "parts", *words)
    step = Path("checkpoint/step-6")
    assert_same_tensors(tmp_path / "parts" / step, tmp_path / "whole" / step)
    records = [mw.read_metrics(tmp_path / name) for name in ("whole", "parts")]
    losses = [{row["step"]: row["loss/train"] for row in rows} for rows in records]
    assert losses[0] == losses[1]
    assert [*losses[0]] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(mw.ConfigError, match=r"holds step 6, the last of the job\n  fix: raise"):
        mw.Session(small(tmp_path / "parts"))
    with mw.Session(small(tmp_path / "parts", training__steps=7)) as session:
        assert [step.step for step in session.steps()] == [7]


def test_a_session_evaluates_as_plain_pytorch(tmp_path: Path) -> None:
    texts = ["def main():\n    return 0\n", "x = 1", "y" * 300]
    with mw.Session(small(tmp_path)) as session:
        model, tokenizer = session.model, session.tokenizer
        got = session.evaluate(texts)
        total, count = 0.0, 0
        for text in texts:
            ids = [*tokenizer.before, *tokenizer.encode(text), *tokenizer.after]
            for first in range(0, len(ids) - 1, 64):
                part = torch.tensor([ids[first : first + 65]])
                logits = model(part[:, :-1]).double()[0]
                total += F.cross_entropy(logits, part[0, 1:], reduction="sum").item()
                count += part.shape[1] - 1
        assert got["loss"] == pytest.approx(total / count, rel=1e-6)
        num_bytes = sum(len(text.encode()) for text in texts)
        assert got["bits_per_byte"] == pytest.approx(total / math.log(2) / num_bytes, rel=0.05)
        with pytest.raises(mw.ConfigError, match=r"validation.enable = false: there is no data"):
            session.evaluate()


def test_a_compiled_session_generates_as_a_plain_one_and_trains_on(tmp_path: Path) -> None:
    compiled = {"compile__enable": True, "compile__backend": "eager"}
    found = []
    for options in ({}, compiled):
        folder = tmp_path / str(len(found))
        with mw.Session(small(folder, checkpoint__enable=False, **options)) as session:
            next(session.steps())
            text = mw.generate(session.model, session.tokenizer, "a word", 20)
            found.append((text, next(session.steps()).loss))
    assert found[0] == found[1]


def test_misuse_is_one_sentence_with_a_fix(tmp_path: Path, monkeypatch) -> None:
    with mw.Session(small(tmp_path)) as session:
        with pytest.raises(mw.ConfigError, match=r"there is no new step\n  fix: take one"):
            session.save()
        with pytest.raises(mw.ConfigError, match=r"has a process group already\n  fix: close"):
            mw.Session(small(tmp_path / "other"))
        with pytest.raises(mw.ConfigError, match=r"model is made for 64\n  fix: load_model"):
            mw.generate(session.model, session.tokenizer, "a", 100)
        with pytest.raises(mw.ConfigError, match=r"texts = \[\]: have no token to predict\n  fix"):
            session.evaluate([])
        with pytest.raises(mw.ConfigError, match=r"top_p = 0.5: has no effect without a temperat"):
            mw.generate(session.model, session.tokenizer, "a", 5, top_p=0.5)
    session.close()  # again, which does nothing
    for use in (lambda: next(session.steps()), session.save, session.evaluate):
        with pytest.raises(mw.ConfigError, match=r"the Session is closed\n  fix: make another"):
            use()
    with mw.Session(small(tmp_path, checkpoint__enable=False)) as session:
        next(session.steps())
        with pytest.raises(mw.ConfigError, match="checkpoint.enable = false"):
            session.save()
    stages = [{"until_tokens": 512}, {}]
    with pytest.raises(mw.ConfigError, match=r"training.stages = 2: a Session takes the steps"):
        mw.Session(small(tmp_path, training__stages=stages))
    with pytest.raises(mw.ConfigError, match="training.exclude.0 = .*no source is called other"):
        mw.Session(small(tmp_path / "new", training__exclude=["other sample 1"]))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(mw.ConfigError, match=r"a Session is one rank, and WORLD_SIZE is 2"):
        mw.Session(small(tmp_path))


def test_a_step_that_did_not_end_is_not_continued(tmp_path: Path, monkeypatch) -> None:
    """Its batch was taken, and its update may be half done: the next Session takes it again."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    losses, _ = run(tmp_path / "whole")
    with mw.Session(small(tmp_path / "broken")) as session:
        assert [step.loss for step in session.steps(2)] == losses[:2]
        session.save()
        with pytest.raises(mw.ConfigError, match=r"there is no new step\n  fix: take one"):
            session.save()
        with monkeypatch.context() as patched:
            patched.setattr("meshwright.api.session.take_step", interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(session.steps())
        for go_on in (session.save, lambda: next(session.steps())):
            with pytest.raises(mw.ConfigError, match=r"the last step didn't end.*\n  fix: make an"):
                go_on()
    assert [path.name for path in (tmp_path / "broken/checkpoint").glob("step-*")] == ["step-2"]
    assert run(tmp_path / "broken")[0] == losses[2:]


def test_load_gives_the_errors_of_the_command_line(tmp_path: Path) -> None:
    changes = {"training.stepz": 5, "optimizer.lr": -1, "model.args": {"n_layers": "two"}}
    with pytest.raises(mw.ConfigError) as caught:
        mw.load("debug_model", changes)
    words = [sys.executable, "-m", "meshwright", "check", "debug_model"]
    words += ["--training.stepz=5", "--optimizer.lr=-1"]
    shown = subprocess.run(words, capture_output=True, text=True, env=environment()).stderr
    assert str(caught.value) in shown.replace("meshwright: ", "").replace("\n      ", " ")
    job = mw.load("debug_model", {"training.steps": "5", "job.dump_folder": tmp_path})
    assert (job.training.steps, job.job.dump_folder) == (5, str(tmp_path))
    again = mw.load(job, {"optimizer.lr": 1e-4})
    assert (again.training.steps, again.optimizer.lr) == (5, 1e-4)
    assert again.training.model_fields_set == job.training.model_fields_set
    with pytest.raises(mw.ConfigError, match=r"training.steps = -5: should be greater than 0"):
        mw.load(job, {"training.steps": -5})
    for arguments, fix in (
        ((None,), r"config is None, .*\n  fix: write load\("),
        (({1: 2},), r"config is \{1 = 2\}, .*\n  fix: write load\("),
        (("debug_model", {1: 2}), r"overrides is \{1 = 2\}, not a dict with dotted keys\n  fix: "),
        (("debug_model", "training.steps=5"), "overrides is 'training.steps=5', not a dict"),
    ):
        with pytest.raises(mw.ConfigError, match=fix):
            mw.load(*arguments)


def test_the_import_is_quick_and_quiet_and_knows_its_names() -> None:
    program = "import sys, meshwright; print('torch' in sys.modules, 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False False\n", "")
    assert {*mw.API} <= {*dir(mw)}
    for name in mw.API:
        assert getattr(mw, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'sessions'"):
        mw.sessions  # noqa: B018
    hints = (ROOT / "meshwright/__init__.py").read_text("utf-8")
    assert {*re.findall(r" as (\w+)\n", hints)} == {*mw.API}


@pytest.mark.parametrize(
    ("variable", "taken"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
)
def test_threads_of_a_session_wait_as_those_of_the_launcher(variable, taken: str) -> None:
    """GNU's OpenMP prints what it was given when torch loads it. The environment stays the same."""
    words = "import os, meshwright as mw; was = {**os.environ}; mw.Session"
    words += "; assert was == {**os.environ}"
    plain = {k: v for k, v in environment().items() if k not in OTHER_WAITING}
    shown = subprocess.run(
        [sys.executable, "-c", words],
        env={**plain, **variable, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert f"GOMP_SPINCOUNT = '{taken}'" in shown


@pytest.mark.slow
def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    page = (ROOT / "docs/python.md").read_text("utf-8")
    blocks = re.findall(r"^```(?:python|bash)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert {*re.findall(r"mw\.(\w+)", "".join(blocks))} == {*mw.API} - {"Step"}  # which steps are
    text = "\n".join(
        f"import subprocess; subprocess.run({block!r}, shell=True, check=True)"
        if block.startswith("meshwright ")
        else block
        for block in blocks
    ).replace("meshwright train", f"{sys.executable} -m meshwright train")
    done = run_script(text, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "unknown key training.stepz" in done.stdout
    assert "True 3 of 3 cases equal one process" in done.stdout


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "examples/notebook.ipynb").read_text("utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    done = run_script("\n".join(cells) + "\nprint(losses[0], losses[-1])", tmp_path)
    assert done.returncode == 0, done.stderr
    first, last = map(float, done.stdout.splitlines()[-1].split())
    assert last < first - 1


def run_script(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As a script without `if __name__ == "__main__"`, which a spawned process would run again."""
    script = folder / "script.py"
    script.write_text(text, "utf-8")
    return subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env=environment(PYTHONPATH=ROOT, CONFIG_FILE="", OMP_NUM_THREADS=1),
        capture_output=True,
        text=True,
        timeout=600,
    )
