"""What an installed wheel holds: the commands, the presets and their tokenizer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_wheel_checks_its_own_presets(tmp_path: Path) -> None:
    """`meshwright train PRESET` starts with the same check, and ranks read the same files."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("meshwright", "train_configs", "assets"):
        subprocess.run(["cp", "-a", ROOT / name, source], check=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_text((ROOT / name).read_text())
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *alone, "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    folder = tmp_path / "installed"
    subprocess.run([*pip, "install", *alone, "--target", folder, wheel], check=True)

    def meshwright(*words: str) -> str:
        return subprocess.run(
            [sys.executable, "-P", "-m", "meshwright", *words],
            env=os.environ | {"PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""},
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    assert "llama3_8b" in meshwright("config", "--presets").split()
    assert str(folder) in meshwright("config", "debug_model")
    assert meshwright("check", "debug_model").startswith("debug_model can run: ")
    assert (folder / "meshwright/train_configs/schema.json").is_file()
    assert (folder / "meshwright/train/__main__.py").is_file()
    assert (folder / "meshwright/config/synonyms.toml").is_file()
    for source_file in (ROOT / "meshwright").rglob("*.*"):  # C++ as well, which is compiled there
        if source_file.suffix in (".cpp", ".css", ".js"):
            assert (folder / source_file.relative_to(ROOT)).is_file()
