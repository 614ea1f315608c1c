"""Train the small sentencepiece model of the debug presets on the running Python's own library.

Llama 2's settings: BPE, byte fallback, digits apart, white space kept as it is.

    python scripts/train_tokenizer.py --vocab-size 2048 assets/tokenizers/python_2k.model
"""

import argparse
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("output", type=Path)
parser.add_argument("--vocab-size", type=int, default=2048)
args = parser.parse_args()

library = Path(sysconfig.get_paths()["stdlib"])
files = sorted(map(str, library.rglob("*.py")))
files = [file for file in files if not LEFT_OUT & {*Path(file).relative_to(library).parts}]


def lines() -> Iterator[str]:
    for file in files:
        with tokenize.open(file) as opened:  # heeds the file's own coding line
            yield from opened.read().splitlines()


with open(args.output, "wb") as file:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines(),
        model_writer=file,
        vocab_size=args.vocab_size,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=0.9999,
        unk_surface=" \u2047 ",
        num_threads=1,  # the same model every time
    )
