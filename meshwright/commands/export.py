"""`meshwright export`: a checkpoint as a Hugging Face model directory."""

import re
import sys
from argparse import Namespace
from pathlib import Path

from meshwright.commands.options import CHECKPOINT, add_saved_model, input_path, output_folder
from meshwright.config.command_line import Parser
from meshwright.system.errors import check
from meshwright.system.files import NamedPath
from meshwright.system.log import console_width, wrap
from meshwright.train.resolve_model import extend_by


def add_options(parser: Parser) -> None:
    parser.add_argument("checkpoint", type=input_path, help=CHECKPOINT)
    parser.add_argument("out", type=output_folder, help="the folder to create")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="type of the exported weights (default: bfloat16)",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default="5GB",
        help="maximum size of a file, for example 500MB (default: 5GB)",
    )
    parser.add_argument(
        "--average", action="store_true", help="export the EMA of the weights of checkpoint.average"
    )
    parser.add_argument(
        "--fused",
        action="store_true",
        help="write experts stacked, as transformers 5 holds them, not one tensor each",
    )
    add_saved_model(parser)
    parser.add_argument(
        "--without-mtp",
        action="store_true",
        help="don't write the layers for multi-token prediction",
    )
    parser.add_argument(
        "--without-tokenizer", action="store_true", help="don't write the tokenizer's files"
    )


def run(given: Namespace) -> None:
    """Export, and print the comparisons made.

    Raises:
        ConfigError: if the checkpoint can't be exported.
    """
    out, fix = given.out.absolute(), "choose a different folder, or remove it"
    check(not out.exists(), "OUT", str(given.out), "exists already", fix)
    size, fix = given.max_shard_size, "write a number and KB, MB or GB, as 5GB"
    is_size = bool(re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)?\s*[KMG]B", size))
    check(is_size, "--max-shard-size", size, "is not a file size", fix)
    _say(f"exporting {given.checkpoint} to {given.out} ...")
    # not at the top: torch takes a second
    import torch

    from meshwright.checkpoint.conversion.export import Export, export
    from meshwright.checkpoint.conversion.tokenizer_files import tokenizer_files
    from meshwright.checkpoint.state import AVERAGE, MODEL
    from meshwright.checkpoint.store import open_checkpoint
    from meshwright.commands.saved import open_tokenizer, saved_spec

    extend_by(given.custom_import, "--custom-import")
    with open_checkpoint(NamedPath("CHECKPOINT", given.checkpoint), _say) as (place, manifest):
        _say(f"checkpoint: {place.path}")
        tokenizer, path = open_tokenizer(place, manifest, given.tokenizer)
        files: dict[str, Path | str] = {}
        if not given.without_tokenizer:
            files = tokenizer_files(
                tokenizer,
                path,
                seq_len=manifest["data_identity"]["training.seq_len"],
                chat_template_path=manifest["config"].get("model", {}).get("chat_template_path"),
            )
            _say(f"tokenizer: {path}, as {', '.join(files)}")
        job = Export(
            place,
            manifest,
            saved_spec(place, manifest),
            tokenizer,
            files,
            dtype=getattr(torch, given.dtype),
            max_shard_size=size,
            prefix=AVERAGE if given.average else MODEL,
            is_fused=given.fused,
            has_mtp=not given.without_mtp,
        )
        export(job, out, _say)


def _say(line: str) -> None:
    print(wrap(line, console_width(sys.stdout), "  "), flush=True)
