"""Programs that people use on exports: each opens one and compares it with what we have.

`tests.campaigns.consumers` starts a process for each; an environment with the program and torch is
enough here.
"""

import importlib.metadata
import importlib.util
import json
import math
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

NEW_TOKENS = 24
SEQ_LEN = 64
PROMPT = "def f(x):\n"


class Wanted(NamedTuple):
    """An export, and what our tokenizer and our model give."""

    folder: Path
    texts: list[str]
    ids: list[list[int]]
    """Of each text, without BOS."""
    chats: list[list[dict[str, str]]]
    chat_ids: list[list[int]]
    tokens: list[int]
    """The prompt's and the greedy ones."""
    prompt: int
    """How many are the prompt's."""
    logprobs: Tensor
    """(S, V): after each of `tokens`."""


class Cell(NamedTuple):
    """What one program gives for one export; None: it isn't asked for that."""

    ids: int | None = None
    """Texts with equal ids."""
    chats: int | None = None
    greedy: int | None = None
    """Equal tokens, up to the first that differs."""
    apart: float | None = None
    """Largest difference of log-probabilities."""
    note: str = ""

    def __str__(self) -> str:
        counts = ((self.ids, "ids", 40), (self.chats, "chats", 10), (self.greedy, "greedy", 24))
        parts = [f"{what} {n}" for n, what, all_ in counts if n is not None and n != all_]
        if not parts and self.greedy is not None:
            parts = ["equal"]
        parts += [] if self.apart is None else [f"{self.apart:.0e}"]
        return "; ".join([*parts, *([self.note] if self.note else [])])


def greedy(logprobs: Callable[[list[int]], Tensor], prompt: list[int]) -> list[int]:
    """Return the prompt and `NEW_TOKENS` of the largest probability each."""
    tokens = [*prompt]
    for _ in range(NEW_TOKENS):
        tokens.append(int(logprobs(tokens)[-1].argmax()))
    return tokens


def compared(
    wanted: Wanted,
    logprobs: Callable[[list[int]], Tensor] | None = None,
    tokenizer: Any = None,
    note: str = "",
) -> Cell:
    """Return how a program's ids, conversations, greedy tokens and log-probabilities compare.

    Args:
        logprobs: from tokens to (S, V).
        tokenizer: as transformers has it.
    """
    ids = chats = tokens = apart = None
    if tokenizer:
        found = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in wanted.texts]
        ids = _equal(found, wanted.ids)
        rendered = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in wanted.chats]
        found = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]
        chats = _equal(found, wanted.chat_ids)
    if logprobs:
        tokens = prefix(greedy(logprobs, wanted.tokens[: wanted.prompt]), wanted)
        apart = float((logprobs(wanted.tokens) - wanted.logprobs).abs().max())
    return Cell(ids, chats, tokens, apart, note)


def _equal(found: list[list[int]], wanted: list[list[int]]) -> int:
    return sum(a == b for a, b in zip(found, wanted, strict=True))


def prefix(tokens: list[int], wanted: Wanted) -> int:
    """Return how many greedy tokens are equal before the first that isn't."""
    pairs = list(zip(tokens, wanted.tokens, strict=False))[wanted.prompt :]
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def load(wanted: Wanted) -> tuple[Any, Any]:
    """Return the model and the tokenizer, as transformers' users load them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(wanted.folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(wanted.folder)


def of_model(model: Any) -> Callable[[list[int]], Tensor]:
    def logprobs(tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens])).logits
        return logits[0].float().log_softmax(-1)

    return logprobs


def with_transformers(wanted: Wanted) -> Cell:
    model, tokenizer = load(wanted)
    cell = compared(wanted, of_model(model), tokenizer)
    given = tokenizer(PROMPT, return_tensors="pt")  # with BOS, and whatever else it returns
    least = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    with torch.inference_mode():
        tokens = model.generate(**given, **least, eos_token_id=None)[0].tolist()
    padded = tokenizer(wanted.texts[:3], padding=True, truncation=True, return_tensors="pt")
    assert padded["input_ids"].shape[1] <= SEQ_LEN
    assert not model(**padded).logits.isnan().any()
    return cell._replace(greedy=min(cell.greedy or 0, prefix(tokens, wanted)))


def with_llama_cpp(wanted: Wanted) -> Cell:
    """The converter is told which pre-tokenizer a byte-level tokenizer has: it has a list of
    published ones, by a hash of the ids that they give."""
    if not os.environ["LLAMA_CPP"]:
        return Cell(note="skipped: no --llama-cpp")
    root, file = Path(os.environ["LLAMA_CPP"]), wanted.folder.with_suffix(".gguf")
    run = (
        "import runpy, sys; sys.path[:0] = [sys.argv[1], sys.argv[1] + '/gguf-py'];"
        "from conversion.base import TextModel;"
        "told = lambda *_: 'llama-bpe';"
        "is_told = sys.argv.pop(2) == 'bytes';"
        "TextModel.get_vocab_base_pre = told if is_told else TextModel.get_vocab_base_pre;"
        "sys.argv = ['convert', *sys.argv[2:]];"
        "runpy.run_path(sys.path[0] + '/convert_hf_to_gguf.py', run_name='__main__')"
    )
    kind = wanted.folder.name.split("-")[1]
    words = [str(wanted.folder), "--outtype", "f32", "--outfile", str(file)]
    done = subprocess.run(
        [sys.executable, "-c", run, str(root), kind, *words], capture_output=True, text=True
    )
    if done.returncode:
        return Cell(note="converter: " + done.stderr.strip().splitlines()[-1][:70])
    with _server(file) as ask:
        ids = [
            ask("tokenize", {"content": t, "add_special": False})["tokens"] for t in wanted.texts
        ]
        chats = []
        for chat in wanted.chats:
            text = ask("apply-template", {"messages": chat, "add_generation_prompt": False})
            # it takes BOS off a rendered conversation, and adds it as it tokenizes
            given = {"content": text["prompt"], "add_special": True, "parse_special": True}
            chats.append(ask("tokenize", given)["tokens"])
        request = {"temperature": 0.0, "cache_prompt": False, "return_tokens": True}
        given = request | {"prompt": wanted.tokens[: wanted.prompt], "n_predict": NEW_TOKENS}
        tokens = [*wanted.tokens[: wanted.prompt], *ask("completion", given)["tokens"]]
        apart, request["n_predict"], request["n_probs"] = 0.0, 1, wanted.logprobs.shape[1]
        for length, row in enumerate(wanted.logprobs, start=1):
            # nothing is given for a token that is a part of a character
            steps = ask("completion", request | {"prompt": wanted.tokens[:length]})
            for step in steps.get("completion_probabilities", []):
                there = {one["id"]: one["logprob"] for one in step["top_logprobs"]}
                apart = max(apart, *(abs(value - float(row[i])) for i, value in there.items()))
    return Cell(
        _equal(ids, wanted.ids), _equal(chats, wanted.chat_ids), prefix(tokens, wanted), apart
    )


@contextmanager
def _server(file: Path) -> Iterator[Callable[[str, dict[str, Any]], Any]]:
    """Yield a function that asks llama.cpp's server, which keeps keys and values in fp32."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(file), 512, 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.verbosity, params.prefill_assistant = -1, False
    params.cpuparams.n_threads, params.use_jinja, params.warmup = 1, True, False
    server = xllamacpp.Server(params)

    def ask(path: str, given: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{server.listening_address}/{path}",
            json.dumps(given).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    yield ask


def with_ctranslate2(wanted: Wanted) -> Cell:
    import ctranslate2
    import numpy
    from ctranslate2.converters import TransformersConverter

    out = wanted.folder.with_suffix(".ct2")
    try:
        TransformersConverter(str(wanted.folder)).convert(str(out))
    except ValueError as error:
        return Cell(note=str(error).split("(")[0].strip()[:70])
    generator = ctranslate2.Generator(str(out), device="cpu", compute_type="float32")
    _, tokenizer = load(wanted)

    def logprobs(tokens: list[int]) -> Tensor:
        given = tokenizer.convert_ids_to_tokens(tokens)
        found = generator.forward_batch([given], return_log_probs=True)
        return torch.tensor(numpy.array(found))[0]

    return compared(wanted, logprobs)


def with_onnxruntime(wanted: Wanted) -> Cell:
    import onnxruntime

    model, _ = load(wanted)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # its eager one loops over data

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.eval()

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.model(input_ids=input_ids, use_cache=False).logits

    file = wanted.folder.with_suffix(".onnx")
    example = torch.tensor([wanted.tokens])
    size = {"input_ids": {1: torch.export.Dim("length", min=2, max=SEQ_LEN)}}
    torch.onnx.export(Plain(), (example,), file, dynamo=True, dynamic_shapes=size, verbose=False)
    session = onnxruntime.InferenceSession(file)
    name = session.get_inputs()[0].name

    def logprobs(tokens: list[int]) -> Tensor:
        (logits,) = session.run(None, {name: torch.tensor([tokens]).numpy()})
        return torch.tensor(logits)[0].log_softmax(-1)

    return compared(wanted, logprobs)


def with_lm_eval(wanted: Wanted) -> Cell:
    """A local task over the first tokens of each text: the mean loss per token is ours."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    model, tokenizer = load(wanted)
    logprobs = of_model(model)
    before = wanted.tokens[
        : wanted.prompt - len(tokenizer(PROMPT, add_special_tokens=False).input_ids)
    ]
    task = wanted.folder.with_suffix(".task")
    task.mkdir()
    texts = [
        t for t, ids in zip(wanted.texts, wanted.ids, strict=True) if 0 < len(ids) < SEQ_LEN - 1
    ]
    (task / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    metrics = [{"metric": "bits_per_byte"}]
    settings = {
        "task": "held_out",
        "dataset_path": "json",
        "output_type": "loglikelihood_rolling",
        "dataset_kwargs": {"data_files": {"test": str(task / "texts.jsonl")}},
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": metrics,
    }
    (task / "held_out.yaml").write_text(json.dumps(settings))
    total = 0.0
    for text in texts:
        tokens = [*before, *tokenizer(text, add_special_tokens=False).input_ids]
        rows = logprobs(tokens)[len(before) - 1 : -1]
        total -= float(rows.gather(1, torch.tensor(tokens[len(before) :])[:, None]).sum())
    ours = total / math.log(2) / sum(len(text.encode()) for text in texts)
    given = {"pretrained": str(wanted.folder), "dtype": "float32", "add_bos_token": False}
    result = lm_eval.simple_evaluate(
        model="hf",
        model_args=given,
        tasks=["held_out"],
        task_manager=TaskManager(include_path=str(task), include_defaults=False),
        device="cpu",
        bootstrap_iters=0,
    )
    theirs = result["results"]["held_out"]["bits_per_byte,none"]
    return Cell(note=f"bits per byte {theirs / ours - 1:+.0e}")


def with_peft(wanted: Wanted) -> Cell:
    """A LoRA of attention: without it the model is ours, and merged it is the same as beside."""
    from peft import LoraConfig, get_peft_model

    model, tokenizer = load(wanted)
    options = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    with adapted.disable_adapter():
        cell = compared(wanted, of_model(adapted), tokenizer)
    with_adapter = of_model(adapted)(wanted.tokens)
    changed = float((with_adapter - wanted.logprobs).abs().max())
    merged = of_model(adapted.merge_and_unload())(wanted.tokens)
    apart = float((merged - with_adapter).abs().max())
    return cell._replace(note=f"merged {apart:.0e} of {changed:.1f}")


def with_trl(wanted: Wanted) -> Cell:
    """Two steps of fine-tuning on the conversations: rows have our ids, the loss is finite."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = load(wanted)
    cell = compared(wanted, of_model(model))
    options = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    config = SFTConfig(
        output_dir=str(wanted.folder.with_suffix(".trl")),
        max_steps=2,
        per_device_train_batch_size=2,
        max_length=None,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        **options,
    )
    rows = Dataset.from_list([{"messages": chat} for chat in wanted.chats])
    trainer = SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer)
    chats = _equal([[*row["input_ids"]] for row in trainer.train_dataset], wanted.chat_ids)
    loss = trainer.train().training_loss
    assert math.isfinite(loss), f"the loss is {loss}"
    return cell._replace(chats=chats, note=f"loss {loss:.2f}")


PROGRAMS: dict[str, tuple[str, Callable[[Wanted], Cell]]] = {
    "transformers": ("transformers", with_transformers),
    "llama.cpp": ("xllamacpp", with_llama_cpp),
    "ctranslate2": ("ctranslate2", with_ctranslate2),
    "onnxruntime": ("onnxruntime", with_onnxruntime),
    "lm_eval": ("lm_eval", with_lm_eval),
    "peft": ("peft", with_peft),
    "trl": ("trl", with_trl),
}
"""Name in the table -> package that must be there, and what it does with one export."""


def inside(name: str, folder: Path) -> None:
    """Open every export with one program, and print a JSON object of its version and cells."""
    connect = socket.socket.connect

    def stay(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"{name} connects to {address}: it isn't offline")
        connect(self, address)

    socket.socket.connect = stay  # type: ignore[method-assign, assignment]
    torch.set_num_threads(1)
    package, program = PROGRAMS[name]
    if not importlib.util.find_spec(package):
        print(json.dumps(["", {}]))
        return
    cells = {}
    for file in sorted(folder.glob("*.pt")):
        wanted = Wanted(**torch.load(file, weights_only=False))
        try:
            cells[file.stem] = str(program(wanted))
        except Exception as error:  # of any program: the table has it
            cells[file.stem] = f"{type(error).__name__}: {error}".splitlines()[0][:90]
        print(name, file.stem, cells[file.stem], file=sys.stderr, flush=True)
    print(json.dumps([importlib.metadata.version(package), cells]))


if __name__ == "__main__":
    inside(sys.argv[1], Path(sys.argv[2]))
