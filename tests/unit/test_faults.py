"""The catalogue of faults: every patch has its place, and each fault a finder that exists."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.__main__ import row
from tests.faults.catalogue import FAULTS, Fault, parse
from tests.faults.probe import ROOT, failures_of_test, patched, plant

TWO_FILES = """\
@ of_two_files: seen here
@ models/loss.py | dp_shard 2, tp 2 --model.name=qwen3 | loss:
@ {"num_microbatches": 2}
-taken out
@@ models/layers.py
-old
+new
+line"""


def test_every_fault_can_be_planted(tmp_path: Path) -> None:
    for fault in FAULTS:
        for text in patched(fault).values():
            compile(text, fault.name, "exec")
        assert all(old != new for patch in fault.patches.values() for old, new in patch), fault.name
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 110
    assert all(fault.thread for fault in FAULTS)
    first = FAULTS[0]
    plant(first, tmp_path)
    for file, text in patched(first).items():
        assert (tmp_path / "meshwright" / file).read_text() == text
    changed = dataclasses.replace(first, patches={"models/loss.py": [("no such line", "")]})
    with pytest.raises(ValueError, match="has changed"):
        patched(changed)


def test_no_fault_uses_a_name_that_its_module_lacks(tmp_path: Path) -> None:
    """It would be found as a NameError, by any test."""
    for fault in FAULTS:
        for file, text in patched(fault).items():
            path = tmp_path / fault.name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    words = ["ruff", "check", "--isolated", "--no-cache", "--select=F821"]
    done = subprocess.run([sys.executable, "-m", *words, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_test_that_must_find_a_fault_exists() -> None:
    for fault in FAULTS:
        if fault.test_file:
            name = fault.finder.removeprefix(f"{fault.test_file}::").partition("[")[0]
            text = (ROOT / fault.test_file).read_text("utf-8")
            assert re.search(rf"^def {name}\(", text, re.MULTILINE), fault.name
        else:
            finders = ("prove", "reference", "properties", "check", "export")
            assert fault.finder in finders, fault.name


def test_a_fault_is_read_from_its_lines() -> None:
    fault = parse(TWO_FILES)
    assert fault.patches == {
        "models/loss.py": [("taken out\n", "")],
        "models/layers.py": [("old", "new\nline")],
    }
    assert fault.mesh == {"dp_shard": 2, "tp": 2}
    assert (fault.words, fault.num_microbatches) == (["--model.name=qwen3"], 2)
    assert (fault.name, fault.thread, fault.named) == ("of_two_files", "seen here", "loss:")
    assert parse(TWO_FILES.replace('"num_microbatches": 2', '"finder": "a.py::b"')).test_file


def test_a_row_of_the_table_is_one_line() -> None:
    line = "stopped: rank 1: Traceback\n  File\nKeyError: 'a|b'\n"
    text = row(FAULTS[0], 1.5, "named", line)
    assert text.endswith(r"| 1.5 | named | KeyError: 'a\|b' |" + "\n")
    assert text.count("\n") == 1
    assert row(FAULTS[0], 1.5, "BLIND", "").endswith("| BLIND |  |\n")


@pytest.mark.slow
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.test_file], ids=lambda f: f.name)
def test_a_named_test_finds_its_fault(fault: Fault, tmp_path: Path) -> None:
    """Those that commands find are in tests/integration/test_campaigns.py."""
    plant(fault, tmp_path)
    lines = failures_of_test(fault, tmp_path)
    assert any(fault.named in line for line in lines), lines
