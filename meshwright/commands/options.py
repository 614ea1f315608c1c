"""Options that several commands have, and kinds of their values."""

import os
import shlex
from argparse import ArgumentTypeError
from contextlib import suppress
from pathlib import Path

from meshwright.config.command_line import Parser
from meshwright.config.job_config import JobConfig
from meshwright.config.section import ADDRESS
from meshwright.config.stages import staged
from meshwright.system.errors import ConfigError, check, config_error, numbered, out_of_reach

CHECKPOINT = "a step's folder, or a dump folder for its newest checkpoint"


def readable(text: str) -> str:
    """Return the path.

    Raises:
        ArgumentTypeError: if this user can't read it.
    """
    if why := out_of_reach(text):
        raise ArgumentTypeError(f"{text!r}: {why}")
    return text


def input_path(text: str) -> Path:
    """Return the path; raises as `readable`."""
    return Path(readable(text))


def output_folder(text: str) -> Path:
    """Return the path.

    Raises:
        ArgumentTypeError: for an address: as a path, "s3://bucket" is a folder called "s3:".
    """
    if ADDRESS.match(text):
        raise ArgumentTypeError(f"{text!r} is an address\n  fix: write to a folder, and copy that")
    return input_path(text)


def output_file(text: str) -> Path:
    """Return the path.

    Raises:
        ArgumentTypeError: if no file can be written there: better now than after minutes of work.
    """
    path = output_folder(text)
    folder = path.absolute().parent
    if not folder.is_dir():
        fix = f"make it: mkdir -p {shlex.quote(str(folder))}"
        raise ArgumentTypeError(f"{text!r}: there is no folder {folder}\n  fix: {fix}")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ArgumentTypeError(f"{text!r}: cannot be written\n  fix: choose a different file")
    return path


def write_output(path: Path, text: str, key: str) -> None:
    """Write a file that a command makes; a new one is there whole, or not at all.

    Args:
        key: of the command line.

    Raises:
        ConfigError: if it can't be written: `output_file` hasn't seen a full disk, nor a file
            that no option names.
    """
    is_new = not path.exists()
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        if is_new:
            with suppress(OSError):  # of a folder that is read-only, even if the file is missing
                path.unlink()
        rule = f"cannot be written: {error.strerror}"
        raise config_error(key, str(path), rule, "choose a different file") from None


def check_named(config: object) -> None:
    """Raise `ConfigError` if there is no config, by CONFIG or its keys, to do something with."""
    if not config:
        raise ConfigError("", "CONFIG: not given\n  fix: name a TOML, or a preset")


def add_stage(parser: Parser) -> None:
    """Option for one stage of a job that has several."""
    parser.add_argument(
        "--stage",
        type=int,
        default=1,
        metavar="N",
        help="which of [[training.stages]] (default: 1)",
    )


def of_stage(config: JobConfig, stage: int) -> JobConfig:
    """Return the config of one stage of a job, as a job without stages.

    Raises:
        ConfigError: if there is no such stage.
    """
    configs = staged(config)
    rule = f"the job has {numbered(len(configs), 'stage')}"
    check(1 <= stage <= len(configs), "--stage", stage, rule, "name one of them")
    return configs[stage - 1]


def add_ranks(parser: Parser) -> None:
    """Options for the number of ranks, shared by commands that start or count them."""
    parser.add_argument(
        "--ngpu", metavar="N", help="ranks per node (default: $NGPU, or all GPUs, or 2 on a CPU)"
    )
    parser.add_argument("--nnodes", metavar="N", help="number of nodes (default: $NNODES, or 1)")


def add_saved_model(parser: Parser) -> None:
    """Options for parts of a saved model that are elsewhere."""
    parser.add_argument(
        "--tokenizer",
        type=readable,
        metavar="PATH",
        help="the tokenizer, if it has moved since the run",
    )
    parser.add_argument(
        "--custom-import", default="", metavar="MODULE", help="your module that defines the model"
    )
