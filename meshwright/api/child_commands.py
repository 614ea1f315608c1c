"""Commands from Python, each in its own process, since they hide GPUs or start ranks."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, Literal

from meshwright.config.job_config import JobConfig
from meshwright.config.loader import to_toml
from meshwright.system.errors import EXIT_CONFIG, ConfigError
from meshwright.system.log import logger

Note = Callable[[str, str], None]
"""Logs a format and its value."""

NOT_EQUAL = 1
"""Exit code of `meshwright prove` if a case differs."""


def plan(
    config: JobConfig, world_size: int, device: str, *, all_stages: bool = False
) -> dict[str, Any]:
    """Return memory, traffic and step time of a job, as `meshwright plan --json` prints them.

    Args:
        world_size: ranks of the job.
        device: "h100" or another that the command knows, "cpu", or the GiB of a different GPU.
        all_stages: plan one rank of every pipeline stage.

    Raises:
        ConfigError: if the job can't run.
    """
    words = ["--world-size", str(world_size), "--device", device, "--json"]
    words += ["--all-stages"] if all_stages else []
    planned: dict[str, Any] = json.loads(run_with_config(config, "plan", words))
    return planned


def prove(config: JobConfig, *, quick: bool = False, every_mesh: bool = False) -> dict[str, Any]:
    """Train the config in small on many meshes, and compare each with one process: minutes.

    Args:
        quick: run three cases.
        every_mesh: run every schedule, and every mesh of 2, 4 and 8 ranks.

    Returns:
        The content of proof.json: "proved" says whether all cases are equal, "cases" has each. The
        log "meshwright" gets a line as a case is done.

    Raises:
        ConfigError: if the job can't run on any number of ranks.
    """
    with TemporaryDirectory() as folder:
        words = ["--output", folder]
        words += ["--quick"] if quick else []
        words += ["--every-mesh"] if every_mesh else []
        run_with_config(config, "prove", words, passes=(0, NOT_EQUAL), note=logger.info)
        proof: dict[str, Any] = json.loads((Path(folder) / "proof.json").read_text("utf-8"))
    return proof


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    average: bool = False,
    tokenizer: str | None = None,
    with_tokenizer: bool = True,
    custom_import: str = "",
) -> Path:
    """Write a checkpoint as a Hugging Face directory, compare the two, and return the directory.

    Args:
        checkpoint: a step's folder, or a dump folder: its newest.
        out: the directory to make.
        dtype: of the weights there.
        average: export the mean of `checkpoint.average`.
        tokenizer: its path, if it is no longer where the job read it.
        with_tokenizer: write the tokenizer's files as well.
        custom_import: your module that has the model's family.

    Raises:
        ConfigError: if it can't be exported.
    """
    words = [str(checkpoint), str(out), "--dtype", dtype]
    words += ["--average"] if average else []
    words += [] if with_tokenizer else ["--without-tokenizer"]
    words += ["--tokenizer", tokenizer] if tokenizer else []
    words += ["--custom-import", custom_import] if custom_import else []
    _run(["export", *words])
    return Path(out)


def run_with_config(
    config: JobConfig,
    command: str,
    words: Sequence[str] = (),
    passes: Sequence[int] = (0,),
    note: Note = logger.debug,
) -> str:
    """Run a command that takes a config; return what it prints."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.toml"
        file.write_text(to_toml(config), "utf-8")
        try:
            return _run([command, str(file), *words], passes, note)
        except ConfigError as error:  # the file is no place that the caller knows
            place = rf"\S*{re.escape(file.parent.name)}/config\.toml:\d+: "
            raise ConfigError(error.key, re.sub(place, "", str(error))) from None


def _run(words: Sequence[str], passes: Sequence[int] = (0,), note: Note = logger.debug) -> str:
    """Run a command; log its lines by `note`, and return them.

    Args:
        passes: exit codes that are no error.
    """
    lines = list[str]()
    with TemporaryFile("w+", encoding="utf-8") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "meshwright", *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        with child:
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    lines.append(line)
                    note("%s", line.rstrip())
            except BaseException:  # Ctrl-C in a notebook reaches only this process
                child.terminate()
                raise
        errors.seek(0)
        text = errors.read().strip()
    if child.returncode == EXIT_CONFIG:
        raise ConfigError("", text.rpartition("meshwright: ")[2])
    if child.returncode not in passes:
        raise RuntimeError(f"meshwright {words[0]} ended with code {child.returncode}: {text}")
    return "".join(lines)
