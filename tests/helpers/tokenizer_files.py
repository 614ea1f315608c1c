"""Small tokenizer files of every kind, trained on the spot; and texts that are hard on them."""

import io
import json
import random
from pathlib import Path

import sentencepiece
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Of Llama 3's tokenizer.json."""

LLAMA3_SPECIALS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
]
CODE = (
    'def f(x):\n    """Grüße, 世界 <s>"""\n\treturn  x**2  # 1234567\n\n\nclass  A:\n        pass\n'
)
HARD_TEXTS = [
    CODE,
    "plain ASCII text, it's what we've got; they'LL see",
    "汉字和标点。没有空格",
    "😀👩‍👩‍👧‍👦🇩🇪 é é",
    " ",
    "   \n\n\n \t\t\r\n  ",
    "0123456789" * 7 + " 1 22 333 4444",
    "\n" * 50 + "a" + " " * 99 + "b" + "\t" * 33,
    "a\x00b\x1c\x1d\x85\u2028\ufeff",
    "עברית العربية हिन्दी ไทย",
    "",
]


def random_texts(number: int = 200, seed: int = 0) -> list[str]:
    """Of all of Unicode and of what matters to split patterns, mixed."""
    chance = random.Random(seed)
    usual = " \n\t\r'sSdabcXYZ0189.,!?-_(){}<|>é世😀\u0301\u3000\xa0"
    return [
        "".join(
            chance.choice(usual) if chance.random() < 0.8 else _any_character(chance)
            for _ in range(chance.randrange(1, 60))
        )
        for _ in range(number)
    ]


def _any_character(chance: random.Random) -> str:
    while 0xD800 <= (code := chance.randrange(1, 0x110000)) < 0xE000:
        pass  # halves of surrogate pairs are no characters
    return chr(code)


def byte_level_json(file: Path, specials: list[str], size: int = 400) -> Path:
    """A byte-level BPE that cuts text as Llama 3's does.

    It is trained on whole lines, so it has tokens that reach over every kind of cut: one that is
    not made shows.
    """
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(HARD_TEXTS * 2, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.add_special_tokens(specials)
    begin_with(tokenizer, specials[0])
    tokenizer.save(str(file))
    return file


def begin_with(tokenizer: Tokenizer, bos: str) -> None:
    """As Llama's files do."""
    if bos in ("<|begin_of_text|>", "<s>"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )


def metaspace_json(file: Path, specials: list[str]) -> Path:
    """Llama 2's kind of tokenizer.json: spaces as U+2581, bytes for what it has no piece for."""
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    trained.train_from_iterator(
        ["the cat sat on the mat", "def f(x): return x"] * 3,
        trainers.BpeTrainer(vocab_size=60, show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    pieces = [*specials, *byte_pieces, *model["vocab"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token=specials[0],
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    begin_with(tokenizer, specials[1])
    tokenizer.save(str(file))
    return file


def sentencepiece_model(file: Path, **options: object) -> Path:
    settings: dict[str, object] = {
        "vocab_size": 400,
        "model_type": "bpe",
        "byte_fallback": True,
        "character_coverage": 0.98,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
        "num_threads": 1,
    }
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(HARD_TEXTS * 3).splitlines()),
        model_writer=model,
        **(settings | options),
    )
    file.write_bytes(model.getvalue())
    return file
