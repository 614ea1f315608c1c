"""Draw model folders of Hugging Face, many of them wrong in one place, and judge what is read.

python -m tests.campaigns.model_folders --count 40 --seed 1      (--only N repeats one)

A folder is tied or not, by its config.json and by its tensors, which may disagree; in one file or
in shards with an index; with a stale shard, a stale copy of a tensor, a second set of weights, a
pointer of Git LFS, and so on. right: the model computes the logits that transformers computes from
the tensors that the index means; or it is rejected, and the message has the cause. Where the fix
says to set model.args.tie_embeddings, that is done, and has to work.
"""

import argparse
import dataclasses
import json
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from meshwright.checkpoint.conversion.readers import HuggingFaceWeights
from meshwright.config.loader import load_config
from meshwright.models.args import DecoderArgs
from meshwright.models.decoder import Decoder
from meshwright.system.errors import ConfigError
from meshwright.system.files import NamedPath
from tests.helpers.families import family_of
from tests.helpers.hf import CASES, save_as_published, transformers_model
from tests.helpers.resolved import resolved

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 63}1\nsize 499723\n"
TOKENS = torch.arange(50).view(1, 50) * 7 % 259
TIE_FIX = re.compile(r"fix: set model\.args\.tie_embeddings = (true|false)")


class Folder(NamedTuple):
    """A folder as it was drawn."""

    path: Path
    args: DecoderArgs
    truth: dict[str, Tensor]
    """The tensors that the index, or the single file, means."""
    says_tied: bool
    given: bool | None
    """What the user says of ties, if anything."""
    fault: str
    """What is wrong with it; "": nothing."""
    expected: str
    """Words of the message by which it is rejected; "": it is read."""

    def is_tied(self) -> bool:
        """Return whether the model is tied: the user's word, or else the tensors' where config.json
        says that it is."""
        if self.given is not None:
            return self.given
        embedding, head = self.truth.get(EMBEDDING), self.truth.get(HEAD)
        is_same = embedding is None or head is None or torch.equal(embedding, head)
        return self.says_tied and is_same


def _with_ties(draw: random.Random, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with a head that is absent, equal to the embedding, or another one."""
    found = {name: tensor for name, tensor in tensors.items() if name != HEAD}
    embedding = found[EMBEDDING]
    match draw.choice(["absent", "equal", "one element", "other", "head alone"]):
        case "equal":
            found[HEAD] = embedding.clone()
        case "one element":
            found[HEAD] = embedding.clone()
            found[HEAD][draw.randrange(len(embedding)), draw.randrange(embedding.shape[1])] += 1
        case "other":
            found[HEAD] = embedding.flip(0).contiguous()
        case "head alone":
            found[HEAD] = found.pop(EMBEDDING)
    return found


def _write(draw: random.Random, path: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Write one file, or shards and their index; return the file of each tensor."""
    count = draw.choice([1, 2, 3])
    files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    files = [SINGLE] if count == 1 else files
    where = {name: draw.choice(files) for name in tensors}
    for file in files:
        save_file({n: tensors[n] for n, of in where.items() if of == file}, path / file)
    if count > 1 or draw.random() < 0.2:
        write_index(path, where)
    return where


def write_index(path: Path, where: dict[str, str]) -> None:
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


Fault = Callable[[random.Random, Path, dict[str, str], dict[str, Tensor]], str]
"""Breaks a folder, and returns words of the message; "": it is still right."""


def _change(path: Path, file: str, change: Callable[[dict[str, Tensor]], None]) -> None:
    content = load_file(path / file)
    change(content)
    save_file(content, path / file)


def stale_copy(draw: random.Random, path: Path, where: dict[str, str], truth: object) -> str:
    """A tensor's copy in a shard that the index doesn't name for it."""
    files = sorted({*where.values()})
    name = draw.choice(sorted(where))
    others = [file for file in files if file != where[name]]
    if not (path / INDEX).exists() or not others:
        return ""
    value = load_file(path / where[name])[name] + 1
    _change(path, draw.choice(others), lambda content: content.update({name: value}))
    return ""


def stale_shard(draw: random.Random, path: Path, where: dict[str, str], truth: object) -> str:
    name = draw.choice(sorted(where))
    save_file({name: load_file(path / where[name])[name] + 1}, path / "model-00009.safetensors")
    return ""


def second_set(draw: random.Random, path: Path, where: dict[str, str], truth: object) -> str:
    """A single file, newer, beside an index of shards."""
    if SINGLE in where.values() or not (path / INDEX).exists():
        return ""
    whole = {name: load_file(path / file)[name] + 1 for name, file in where.items()}
    save_file(whole, path / SINGLE)
    return "holds model.safetensors, and model.safetensors.index.json"


def without_index(draw: random.Random, path: Path, where: dict[str, str], truth: object) -> str:
    (path / INDEX).unlink(missing_ok=True)
    return "" if {*where.values()} == {SINGLE} else f"but no {INDEX}"


def missing_file(draw: random.Random, path: Path, where: dict[str, str], truth: object) -> str:
    file = draw.choice(sorted({*where.values()}))
    (path / file).unlink()
    if not (path / INDEX).exists():
        return "holds neither model.safetensors nor"
    return f"{file} is missing, which {INDEX} names"


def missing_tensor(draw: random.Random, path: Path, where: dict[str, str], truth: object) -> str:
    name = draw.choice(sorted({*where} - {HEAD, EMBEDDING}))
    _change(path, where[name], lambda content: content.pop(name))
    if (path / INDEX).exists():
        return f"{INDEX} says that {name} is in {where[name]}, but it isn't"
    return f"{name}, our "


def wrong_file(draw: random.Random, path: Path, where: dict[str, str], truth: object) -> str:
    """The index names another shard for a tensor than the one that holds it."""
    name, files = draw.choice(sorted(where)), sorted({*where.values()})
    if not (path / INDEX).exists() or len(files) == 1:
        return ""
    file = next(file for file in files if file != where[name])
    write_index(path, where | {name: file})
    return f"{INDEX} says that {name} is in {file}, but it isn't"


def surplus(draw: random.Random, path: Path, where: dict[str, str], truth: object) -> str:
    file = draw.choice(sorted({*where.values()}))
    _change(path, file, lambda content: content.update({"model.layers.99.x": torch.ones(2)}))
    if not (path / INDEX).exists():
        return "holds model.layers.99.x, for which the model has no place"
    return ""  # the index doesn't name it


def pointer(draw: random.Random, path: Path, where: dict[str, str], truth: object) -> str:
    names = [*{*where.values()}, *[INDEX] * (path / INDEX).exists(), "config.json"]
    name = draw.choice(sorted(names))
    (path / name).write_text(POINTER)
    return f"{name} is a Git LFS pointer"


def truncated(draw: random.Random, path: Path, where: dict[str, str], truth: object) -> str:
    file = path / draw.choice(sorted({*where.values()}))
    content = file.read_bytes()
    file.write_bytes(content[: draw.randrange(len(content))])
    return f"{file.name} is damaged"


def other_shape(draw: random.Random, path: Path, where: dict[str, str], truth: object) -> str:
    name = draw.choice(sorted({*where} - {HEAD, EMBEDDING}))
    _change(path, where[name], lambda content: content.update({name: torch.ones(3, 5)}))
    return f"{name} in {where[name]} has shape (3, 5)"


def other_type(draw: random.Random, path: Path, where: dict[str, str], truth: object) -> str:
    name = draw.choice(sorted({*where} - {HEAD, EMBEDDING}))
    _change(path, where[name], lambda content: content.update({name: content[name].to(torch.int8)}))
    return f"{name} in {where[name]} is of type I8"


def no_map(draw: random.Random, path: Path, where: dict[str, str], truth: object) -> str:
    (path / INDEX).write_text(json.dumps(draw.choice([{}, {"weight_map": {"a": "../b"}}])))
    return f"{INDEX} has no weight_map"


def bfloat16_copy(
    draw: random.Random, path: Path, where: dict[str, str], truth: dict[str, Tensor]
) -> str:
    """All tensors in bfloat16, which is exact in fp32."""
    for file in {*where.values()}:
        _change(path, file, lambda all_: all_.update({k: v.bfloat16() for k, v in all_.items()}))
    truth.update({name: tensor.bfloat16().float() for name, tensor in truth.items()})
    return ""


def frequencies(draw: random.Random, path: Path, where: dict[str, str], truth: object) -> str:
    """Of old files: they follow from config.json."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    file = draw.choice(sorted({*where.values()}))
    _change(path, file, lambda content: content.update({name: torch.ones(4)}))
    if (path / INDEX).exists():
        write_index(path, where | {name: file})
    return ""


FAULTS: tuple[Fault, ...] = (
    *(stale_copy, stale_shard, second_set, without_index, missing_file, missing_tensor),
    *(wrong_file, surplus, pointer, truncated, other_shape, other_type, no_map, bfloat16_copy),
    frequencies,
)


def draw_folder(path: Path, draw: random.Random) -> Folder:
    """Make a folder, and foretell what has to come of it."""
    args = CASES[draw.choice(sorted(CASES))]
    args = dataclasses.replace(args, tie_embeddings=False)
    path.mkdir()
    model = transformers_model(args, seed=draw.randrange(1000))
    save_as_published(model, path, args, max_shard_size="1GB")
    tensors = load_file(path / SINGLE)
    (path / SINGLE).unlink()
    truth = _with_ties(draw, tensors)
    where = _write(draw, path, truth)
    config = json.loads((path / "config.json").read_text())
    says_tied = draw.choice([True, True, False])
    config["tie_word_embeddings"] = says_tied
    (path / "config.json").write_text(json.dumps(config))
    fault = draw.choice(FAULTS) if draw.random() < 0.7 else None
    expected = fault(draw, path, where, truth) if fault else ""
    given = draw.choice([None, None, None, True, False])
    name = fault.__name__ if fault else ""
    folder = Folder(path, args, truth, says_tied, given, name, expected)
    if not expected:
        is_tied = folder.is_tied()
        if HEAD not in truth and not is_tied:
            folder = folder._replace(expected=f"{HEAD}, our output.weight, is in none of its files")
        elif EMBEDDING not in truth and not is_tied:
            folder = folder._replace(expected=f"{EMBEDDING}, our tok_embeddings.weight")
    return folder


def logits(folder: Path) -> Tensor:
    """Return what transformers computes from a folder."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    with torch.no_grad():
        found: Tensor = model.eval()(TOKENS).logits
    return found


def logits_of_truth(folder: Folder) -> Tensor:
    """Return what transformers computes from a clean folder with the tensors that are meant."""
    clean, truth, is_tied = folder.path.parent / "clean", dict(folder.truth), folder.is_tied()
    clean.mkdir(exist_ok=True)
    if is_tied:  # to the one that is there
        head = truth.pop(HEAD, None)
        truth.setdefault(EMBEDDING, head)
    config = json.loads((folder.path / "config.json").read_text())
    (clean / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": is_tied}))
    save_file(truth, clean / SINGLE)
    return logits(clean)


def ours(folder: Folder, given: bool | None) -> Tensor:
    """Return what we compute from the folder, if it is not rejected."""
    data = folder.path.parent / "rows.jsonl"
    data.write_text('{"text": "a b c"}\n' * 200)
    words = ["--model.flavor", str(folder.path), "--model.tokenizer_path", "bytes"]
    words += ["--training.dataset", "json", "--training.dataset_path", str(data)]
    words += ["--checkpoint.initial_load_in_hf", "true", "--training.seq_len", "64"]
    words += ["--job.dump_folder", str(folder.path.parent / "out")]
    if given is not None:
        words += ["--model.args.tie_embeddings", str(given).lower()]
    plan = resolved(load_config(words), 1)
    model = Decoder(plan.model_args, seq_len=64)
    model.init_buffers()
    model.init_state()
    weights = HuggingFaceWeights(
        NamedPath("folder", folder.path), family_of(folder.args).hf, plan.model_args
    )
    with torch.no_grad():
        weights.load(model.state_dict())
        found: Tensor = model(TOKENS)
    return found


def equal(found: Tensor, want: Tensor) -> bool:
    return bool((found - want).abs().max() <= 1e-5 * want.abs().max())


def judge(folder: Folder) -> tuple[str, str]:
    """Return "read", "rejected" or "wrong", and what was said."""
    try:
        found = ours(folder, folder.given)
    except ConfigError as error:
        said = str(error)
        if not folder.expected or folder.expected not in said:
            return "wrong", f"expected {folder.expected!r}, and it said: {said}"
        if (fix := TIE_FIX.search(said)) and not folder.fault:
            try:
                ours(folder, fix[1] == "true")
            except ConfigError as again:
                return "wrong", f"its fix leads to: {again}"
        return "rejected", said
    if folder.expected:
        return "wrong", f"was read, and should be rejected: {folder.expected}"
    if not equal(found, logits_of_truth(folder)):
        return "wrong", "other logits than those of the tensors that are meant"
    # transformers loads stale copies, and gives a missing head random values
    is_read_alike = folder.given is None and folder.fault in ("", "frequencies", "bfloat16_copy")
    if is_read_alike and not equal(found, logits(folder.path)):
        return "wrong", "other logits than transformers'"
    return "read", ""


def run(seed: int, number: int, root: Path) -> tuple[Folder, str, str]:
    """Draw folder `number` of a seed and judge it."""
    where = root / str(number)
    where.mkdir()
    folder = draw_folder(where / "folder", random.Random(f"{seed} {number}"))
    return folder, *judge(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of one folder")
    given = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(f"seed {given.seed}")
    counts = Counter[str]()
    with tempfile.TemporaryDirectory() as root:
        for number in [given.only] if given.only is not None else range(given.count):
            folder, verdict, said = run(given.seed, number, Path(root))
            counts[verdict] += 1
            head = said.partition("\n")[0].replace(str(folder.path), "FOLDER")
            facts = f"{folder.fault or '-'}, says tied: {folder.says_tied}, given: {folder.given}"
            print(f"{number:4} {verdict:9} {facts}: {said if verdict == 'wrong' else head}")
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    raise SystemExit(counts["wrong"] > 0)


if __name__ == "__main__":
    main()
