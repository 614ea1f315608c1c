"""The options of every command. Free of torch, so that `--help` and completion take no time."""

import os
import re
from argparse import ArgumentTypeError
from pathlib import Path

from meshwright.config.command_line import Parser
from meshwright.system.errors import out_of_reach

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


CHECKPOINT = "a step's folder, or a dump folder: its newest"


def readable(text: str) -> str:
    """Return the path.

    Raises:
        ArgumentTypeError: if this user cannot read it.
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
        raise ArgumentTypeError(f"{text!r} is an address; write to a folder, and copy that")
    return input_path(text)


def output_file(text: str) -> Path:
    """Return the path.

    Raises:
        ArgumentTypeError: if no file can be written there: better now than after minutes of work.
    """
    path = output_folder(text)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ArgumentTypeError(f"{text!r}: there is no folder {folder}")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ArgumentTypeError(f"{text!r}: cannot be written")
    return path


def ranks(parser: Parser) -> None:
    """Options for the number of ranks, shared by commands that start or count them."""
    parser.add_argument(
        "--ngpu", metavar="N", help="ranks per machine (default: $NGPU, or its GPUs, or 2)"
    )
    parser.add_argument("--nnodes", metavar="N", help="machines (default: $NNODES, or 1)")


def train(parser: Parser) -> None:
    """Options of `meshwright train`."""
    ranks(parser)
    parser.add_argument(
        "--log-rank", metavar="N[,N]", help="ranks whose log is shown (default: $LOG_RANK, or 0)"
    )
    parser.add_argument(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="where machines meet, one of them (default: $RDZV_ENDPOINT)",
    )
    parser.add_argument(
        "--rdzv-id", metavar="NAME", help="of the job there (default: $RDZV_ID, or meshwright)"
    )


def config(parser: Parser) -> None:
    """Options of `meshwright config`."""
    parser.add_argument(
        *("--help", "-h"),
        nargs="?",
        const="",
        metavar="NAME",
        help="document every key, or those of a section, or one key",
    )
    parser.add_argument("--presets", action="store_true", help="list the presets")


def config_diff(parser: Parser) -> None:
    """Options of `meshwright config diff`."""
    parser.add_argument("a", help="a TOML file, or a preset by name")
    parser.add_argument("b", help="the same")


def nothing(parser: Parser) -> None:
    """No options."""


def completion(parser: Parser) -> None:
    """Options of `meshwright completion`."""
    parser.add_argument("shell", choices=("bash", "zsh"))


def tokenize(parser: Parser) -> None:
    """Options of `meshwright tokenize`."""
    parser.add_argument(
        "--workers", type=int, metavar="N", default=0, help="processes (default: one per core)"
    )
    parser.add_argument("--verify", action="store_true", help="read every byte, repair damage")
    parser.add_argument("--quiet", action="store_true", help="print nothing for existing caches")


def plan(parser: Parser) -> None:
    """Options of `meshwright plan`."""
    parser.add_argument("--world-size", type=int, metavar="N", default=0, help="ranks of the job")
    parser.add_argument(
        "--device",
        metavar="D",
        default="",
        help="h100, h200, a100, b200, mi300x, cpu, or GiB of another GPU",
    )
    parser.add_argument(
        "--rank", type=int, metavar="R", help="a rank to simulate (default: those that need most)"
    )
    parser.add_argument("--all-stages", action="store_true", help="one rank of every stage")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", type=output_file, metavar="FILE", help="write a page, too")
    parser.add_argument("--search", action="store_true", help="find the best mesh and modes")
    parser.add_argument(
        "--no-remedies", action="store_true", help="try no switches if it does not fit"
    )
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="processes (default: one per core)"
    )


def prove(parser: Parser) -> None:
    """Options of `meshwright prove`."""
    parser.add_argument("--every-mesh", action="store_true", help="try every mesh of 8 ranks")
    parser.add_argument(
        "--output",
        type=output_folder,
        metavar="FOLDER",
        help="folder for the tables (default: {dump_folder}/proof)",
    )


def checkpoint_ls(parser: Parser) -> None:
    """Options of `meshwright checkpoint ls`."""
    parser.add_argument("folder", type=input_path, help="a dump folder, or one of checkpoints")


def checkpoint_show(parser: Parser) -> None:
    """Options of `meshwright checkpoint show`."""
    parser.add_argument("checkpoint", type=input_path, help=CHECKPOINT)
    parser.add_argument("--tensors", action="store_true", help="name every tensor")


def checkpoint_verify(parser: Parser) -> None:
    """Options of `meshwright checkpoint verify`."""
    parser.add_argument(
        "folder", type=input_path, help="a step's folder, or a dump folder: all in it"
    )


def checkpoint_diff(parser: Parser) -> None:
    """Options of `meshwright checkpoint diff`."""
    parser.add_argument("a", type=input_path, help=CHECKPOINT)
    parser.add_argument("b", type=input_path, help="the same")
    parser.add_argument("--tensors", action="store_true", help="compare tensors alone")


def _saved_model(parser: Parser) -> None:
    """Options for parts of a saved model that are elsewhere."""
    parser.add_argument(
        "--tokenizer",
        type=readable,
        metavar="PATH",
        help="its path, if it is no longer where the job read it",
    )
    parser.add_argument(
        "--custom-import", default="", metavar="MODULE", help="your module that has the model"
    )


def export(parser: Parser) -> None:
    """Options of `meshwright export`."""
    parser.add_argument("checkpoint", type=input_path, help=CHECKPOINT)
    parser.add_argument("out", type=output_folder, help="the folder to make")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="type of the weights there (default: bfloat16)",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default="5GB",
        help="most bytes per file: a number and KB, MB or GB (default: 5GB)",
    )
    _saved_model(parser)
    parser.add_argument(
        "--without-tokenizer", action="store_true", help="leave the tokenizer's files out"
    )


def report(parser: Parser) -> None:
    """Options of `meshwright report`."""
    parser.add_argument("run_dir", type=input_path, metavar="RUN_DIR", help="a job.dump_folder")
    parser.add_argument(
        "--output",
        type=output_file,
        metavar="FILE",
        help="HTML file (default: RUN_DIR/report.html)",
    )


def generate(parser: Parser) -> None:
    """Options of `meshwright generate`."""
    parser.add_argument(
        "source",
        type=input_path,
        metavar="CHECKPOINT_OR_HF_FOLDER",
        help=f"{CHECKPOINT}; or a model folder of Hugging Face",
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", default=100, help="default: 100")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        default=0.0,
        help="0, the default: the likeliest token each time; 0.8: varied; above 1: wild",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        default=1.0,
        help="sample from the likeliest tokens whose probabilities sum to P (default: 1, all)",
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", default=0, help="another seed, another text (default: 0)"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="auto, the default: bfloat16 on a GPU, float32 on a CPU",
    )
    _saved_model(parser)
