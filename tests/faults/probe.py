"""Run the case of a fault in a process of its own, whose package has the fault in it.

Each is forked from one process that has imported torch, but nothing of the package.
"""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import torch
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel

from tests.faults.catalogue import Fault

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "meshwright"
PATIENCE_S = 900


def patched(fault: Fault) -> dict[str, str]:
    """Return the text of each of its files with the fault in it.

    Raises:
        ValueError: if its place has changed.
    """
    texts = {}
    for file, changes in fault.patches.items():
        text = (PACKAGE / file).read_text("utf-8")
        for old, new in changes:
            if text.count(old) != 1:
                raise ValueError(f"{fault.name}: {file} has changed; mend the patch")
            text = text.replace(old, new)
        texts[file] = text
    return texts


def plant(fault: Fault, folder: Path) -> None:
    """Copy the package to `folder`, with the fault in it."""
    _copy(PACKAGE.name, folder)
    for name in ("train_configs", "assets"):
        (folder / name).symlink_to(ROOT / name)
    for name, text in patched(fault).items():
        file = folder / PACKAGE.name / name
        file.chmod(0o644)  # of a read-only checkout, too
        file.write_text(text, "utf-8")


def _copy(name: str, folder: Path) -> None:
    shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


def failures_of(fault: Fault, *, planted: bool = True) -> list[str]:
    """Return what the fault's command says is wrong, in a copy with the fault or as it is.

    Raises:
        TimeoutError: if it says nothing; on a busy machine that is no proof of a fault.
    """
    assert not any(name.startswith(PACKAGE.name) for name in sys.modules), "imported too early"
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        path = ROOT
        if planted:
            plant(fault, Path(folder))
            path = Path(folder)
        ours, theirs = context.Pipe()
        process = context.Process(target=_answer, args=(fault, path, theirs))
        process.start()
        theirs.close()
        try:
            if not ours.poll(PATIENCE_S):
                raise TimeoutError(f"{fault.name}: no answer within {PATIENCE_S} s")
            found: list[str] = ours.recv()
            return found
        except EOFError:
            return ["stopped: its process ended"]
        finally:
            if process.is_alive() and process.pid is not None:
                os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
            process.join()


def _answer(fault: Fault, path: Path, connection: Connection) -> None:
    os.setsid()
    sys.path.insert(0, str(path))
    os.environ["PYTHONPATH"] = str(path)
    torch.set_num_threads(1)
    try:
        found = _failures(fault, path)
    except BaseException:
        text = traceback.format_exc()
        found = [f"stopped: {text}"]
        if fault.test_file:  # it couldn't be run, which isn't the fault
            print(text, file=sys.stderr)
            found = []
    connection.send(found)


def _failures(fault: Fault, path: Path) -> list[str]:
    if fault.test_file:
        return failures_of_test(fault, path)
    if fault.finder == "export":
        return _of_export(path)
    if fault.finder == "check":
        return _of_command(path, "check", "debug_model", *fault.words)
    if fault.finder == "reference":
        return _of_reference(fault)
    if fault.finder == "properties":
        return _of_properties(fault)
    return _of_proof(fault)


def _of_proof(fault: Fault) -> list[str]:
    """Return the verdict's failures in the case of `fault`, as short as a proof can be."""
    from meshwright.commands.prove import ranks
    from meshwright.commands.prove.cases import build_case, default_cases
    from meshwright.commands.prove.measurement import LAST_RESUMED_STEP
    from meshwright.commands.prove.prove import prove
    from meshwright.commands.prove.shrink import shrink
    from meshwright.config.changes import changed
    from meshwright.config.loader import load_config
    from meshwright.train.resolve_model import resolve_model

    # ranks fork from here, and need not import anything again
    patch.object(ranks, "fork_server", lambda *_: multiprocessing.get_context("fork")).start()
    config = load_config(["debug_model", *fault.words])
    _, args = resolve_model(config)
    small = shrink(config, args)
    model = {"args": small.model.args | {"n_layers": fault.n_layers}}
    small = changed(small, {"training": {"steps": LAST_RESUMED_STEP}, "model": model})
    case = build_case(
        fault.name,
        small,
        fault.mesh,
        num_microbatches=fault.num_microbatches,
        kind=fault.kind,
        **fault.sections,
    )
    if fault.case:
        case = {case.name: case for case in default_cases(config, small, args)}[fault.case]
    (row,) = prove(small, [case])
    assert not row.verdict.not_run, row.verdict.not_run
    return row.verdict.failures


def _of_reference(fault: Fault) -> list[str]:
    """Return the failures of the reference against plain PyTorch."""
    from meshwright.commands.prove import ranks
    from meshwright.commands.prove.reference import check_reference
    from meshwright.commands.prove.shrink import shrink
    from meshwright.config.loader import load_config
    from meshwright.train.resolve_model import resolve_model

    patch.object(ranks, "fork_server", lambda *_: multiprocessing.get_context("fork")).start()
    config = load_config(["debug_model", *fault.words])
    checked = check_reference(config, shrink(config, resolve_model(config)[1]))
    assert checked.verdict != "not checked", checked.not_checked
    return checked.failures


def _of_properties(fault: Fault) -> list[str]:
    """Return the failures of the properties of one process."""
    from meshwright.commands.prove import ranks
    from meshwright.commands.prove.properties import check_properties
    from meshwright.commands.prove.shrink import shrink
    from meshwright.config.loader import load_config
    from meshwright.train.resolve_model import resolve_model

    patch.object(ranks, "fork_server", lambda *_: multiprocessing.get_context("fork")).start()
    config = load_config(["debug_model", *fault.words])
    properties = check_properties(shrink(config, resolve_model(config)[1]))
    return [f"{one.name}: {line}" for one in properties for line in one.failures]


def _of_command(path: Path, *words: str) -> list[str]:
    """Return the lines of the error of a `meshwright` command, if there is one."""
    # the module's full name, since python -m looks into the current folder first
    command = [sys.executable, "-m", "meshwright.commands.main", *words]
    done = subprocess.run(command, cwd=path, capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines() if done.returncode else []


def _of_export(path: Path) -> list[str]:
    """Train for a step, export, and return the error of `meshwright export`, if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        job = ["train", "debug_model", "--job.dump_folder", folder, "--training.steps=1"]
        job += ["--validation.enable=false", "--training.global_batch_size=2"]
        job += ["--training.local_batch_size=1", "--training.seq_len=64"]
        out = str(Path(folder) / "exported")
        return _of_command(path, *job) or _of_command(path, "export", folder, out)


def failures_of_test(fault: Fault, path: Path) -> list[str]:
    """Return the lines in which pytest says what failed, if the fault's test fails."""
    if path != ROOT:
        _copy("tests", path)
        shutil.copy(ROOT / "pyproject.toml", path)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfE", fault.finder]
    own = os.environ | {"PYTHONPATH": str(path)}
    done = subprocess.run(command, cwd=path, env=own, capture_output=True, text=True, check=False)
    if done.returncode in (0, 1):
        lines = done.stdout.splitlines() if done.returncode else []
        return [line for line in lines if line.startswith(("FAILED", "ERROR", "E "))]
    raise RuntimeError(f"{fault.finder} can't be run:\n{done.stdout}{done.stderr}")
