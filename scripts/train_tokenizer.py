"""Train the small sentencepiece model of the debug presets on the running Python's own library.

Llama 2's settings: BPE, byte fallback, digits apart, white space kept as it is.

    python scripts/train_tokenizer.py --vocab-size 2048 assets/tokenizers/python_2k.model
"""

import argparse
from pathlib import Path

import sentencepiece

from meshwright.config.training import Source
from meshwright.datasets.files import Entry
from meshwright.datasets.sources import open_stdlib

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("output", type=Path)
parser.add_argument("--vocab-size", type=int, default=2048)
args = parser.parse_args()

with open(args.output, "wb") as file:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(
            line
            for split in ("train", "validation")
            for document in open_stdlib(
                Entry("training", "", Source(dataset_split=split)), streamed=False
            ).read(0, 1)
            for line in document.splitlines()
        ),
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
