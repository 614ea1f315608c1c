"""Open exports of every family with the programs that people use, each offline, and compare.

    python -m tests.campaigns.consumers --seed 1        (--only NAME, --family NAME)

Each family is exported in fp32 with a byte-level and with a sentencepiece tokenizer, and with the
chat template of the run. What a program gives is compared with our tokenizer and our model: the ids
of 40 texts and 10 conversations, 24 greedy tokens, and the log-probabilities at every position of
the prompt and of those tokens. A program that isn't installed is skipped, and the table says so.

Install the programs in an environment of their own, next to the project's, with torch first so
that pip doesn't fetch another build of it:

    python -m venv consumers && . consumers/bin/activate
    pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    pip install -r requirements.txt transformers==5.24.0 peft trl accelerate ctranslate2 \
        onnx onnxruntime onnxscript lm_eval xllamacpp
    pip download --no-deps --no-binary :all: llama-cpp-python    # for llama.cpp's converter
    tar xzf llama_cpp_python-*.tar.gz

and pass --llama-cpp llama_cpp_python-VERSION/vendor/llama.cpp. Other versions of transformers are
in environments of their own with torch, for example --transformers old/bin/python, which need
nothing of the project. xllamacpp is llama.cpp as a wheel: its server is asked over the loopback
interface. MoE models are exported to ONNX with transformers' batched experts.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.conversion.tokenizer_files import to_tokenizer_json
from meshwright.datasets.tokenizers.chat import ChatTemplate
from meshwright.datasets.tokenizers.kinds import build_tokenizer
from meshwright.models.families import MODELS
from tests.campaigns.consumer_programs import PROGRAMS, PROMPT, SEQ_LEN, Wanted, greedy
from tests.helpers.checkpoints import set_manifest
from tests.helpers.cli import export
from tests.helpers.families import small
from tests.helpers.hf import random_model, save_checkpoint
from tests.helpers.tokenizer_files import (
    HARD_TEXTS,
    LLAMA3_SPECIALS,
    byte_level_json,
    random_texts,
    sentencepiece_model,
)

FAMILIES = ("llama", "qwen3", "olmo2", "qwen3_moe", "olmoe", "mixtral")
TOKENIZERS = ("bytes", "pieces")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]\n{{ m.content | trim }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}"
)


def make_exports(folder: Path, families: list[str], seed: int) -> None:
    """Write an export of each family and tokenizer, and what is wanted of it."""
    for family in families:
        for kind in TOKENIZERS:
            wanted = _export(folder / f"{family}-{kind}", family, kind, seed)
            torch.save(wanted._asdict(), folder / f"{family}-{kind}.pt")


def _export(folder: Path, family: str, kind: str, seed: int) -> Wanted:

    made = folder.with_name(f"{folder.name}.job")
    made.mkdir()
    if kind == "bytes":
        file = byte_level_json(made / "tokenizer.json", LLAMA3_SPECIALS)
        names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    else:
        # both, as published folders have: conversations need tokenizer.json, llama.cpp the other
        model_file = sentencepiece_model(made / "tokenizer.model")
        file = made / "tokenizer.json"
        file.write_text(to_tokenizer_json(build_tokenizer(str(model_file))) or "")
        names = {"bos_token": "<s>", "eos_token": "</s>"}
    (made / "tokenizer_config.json").write_text(json.dumps(names))
    (made / "template.jinja").write_text(TEMPLATE)
    tokenizer = build_tokenizer(str(file))
    # llama.cpp's OLMoE has no grouped-query attention, as the published one
    sizes = {"dim": 64, "n_layers": 2, "hidden_dim": 96, "head_dim": 16}
    sizes |= {"n_kv_heads": 4} if family == "olmoe" else {}
    args = small(MODELS[family], tokenizer.vocab_size, **sizes)
    model = random_model(args, SEQ_LEN).eval()
    checkpoint = save_checkpoint(made / "checkpoint", model, args, tokenizer_path=str(file))
    keys = {"tokenizer_path": str(file), "chat_template_path": str(made / "template.jinja")}
    set_manifest(checkpoint, config={"model": keys})
    export([checkpoint, folder, "--dtype", "float32"])

    texts, chats = drawn(seed)
    ids = [tokenizer.encode(text) for text in texts]
    template = ChatTemplate(tokenizer, TEMPLATE)
    prompt = [*tokenizer.before, *tokenizer.encode(PROMPT)]

    def logprobs(tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]))
        return logits[0].float().log_softmax(-1)

    tokens = greedy(logprobs, prompt)
    chat_ids = [template.encode(chat)[0] for chat in chats]
    return Wanted(folder, texts, ids, chats, chat_ids, tokens, len(prompt), logprobs(tokens))


def drawn(seed: int) -> tuple[list[str], list[list[dict[str, str]]]]:
    """Return 40 texts and 10 conversations: code with line ends, white space, all of Unicode."""
    # a special token in a text is text in training, and a token to others
    texts = [text.replace("<s>", "<x>") for text in HARD_TEXTS if text]
    texts += [text.replace("<s>", "") for text in random_texts(40 - len(texts), seed)]
    draw = random.Random(seed)
    chats = []
    for _ in range(10):
        said = draw.sample(texts[:10], 2 * draw.randint(1, 2))
        roles = ["user", "assistant"] * 2
        chat = [{"role": r, "content": f"{t} ."} for r, t in zip(roles, said, strict=False)]
        system = [{"role": "system", "content": "Be brief."}] * draw.randint(0, 1)
        chats.append([*system, *chat])
    return texts, chats


def outcome(program: str, python: str, folder: Path, llama_cpp: str) -> tuple[str, dict[str, str]]:
    """Return the version of a program and a cell for each export, from a process of its own."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "LLAMA_CPP": llama_cpp}
    done = subprocess.run(
        [python, "-m", "tests.campaigns.consumer_programs", program, str(folder)],
        env=os.environ | offline,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        return "ended with " + str(done.returncode), {}
    version, cells = json.loads(done.stdout.splitlines()[-1])
    return version, cells


def table(rows: dict[str, dict[str, str]], families: list[str]) -> str:
    """Return Markdown: programs x families, with a row for each tokenizer."""
    lines = ["| program | tokenizer | " + " | ".join(families) + " |"]
    lines.append("|---" * (len(families) + 2) + "|")
    for program, cells in rows.items():
        for kind in TOKENIZERS:
            found = [cells.get(f"{family}-{kind}", "not run") for family in families]
            lines.append("| " + " | ".join([program, kind, *found]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=PROGRAMS, help="one program")
    parser.add_argument("--family", choices=FAMILIES, help="one family")
    parser.add_argument("--llama-cpp", default="", help="folder of convert_hf_to_gguf.py")
    parser.add_argument(
        "--transformers",
        action="append",
        default=[],
        help="python of another version's environment",
    )
    parser.add_argument("--jobs", type=int, default=1, help="programs at the same time")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    torch.set_num_threads(1)
    families = [given.family] if given.family else [*FAMILIES]
    runs = [(name, sys.executable) for name in PROGRAMS if given.only in (None, name)]
    if given.only in (None, "transformers"):
        runs[:0] = [("transformers", python) for python in given.transformers]
    rows = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_exports(folder, families, given.seed)
        with ThreadPoolExecutor(given.jobs) as pool:
            found = pool.map(lambda run: outcome(*run, folder, given.llama_cpp), runs)
            for (program, _), (version, cells) in zip(runs, found, strict=True):
                rows[f"{program} {version}"] = cells
    print(table(rows, families))


if __name__ == "__main__":
    main()
