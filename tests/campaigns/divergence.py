"""Plants one difference between two runs and asks `meshwright diverge` for it; or none that
matters, which it must call rounding.

    python -m tests.campaigns.divergence --planted 60 --nulls 40 --seed 1

A run is the tiny model of the tests, 8 steps on one process or two ranks, that fork from a process
which has imported torch. Runs without a difference are shared. Of the planted ones every key,
document, patch and kernel is one, and the rest are flipped bits. `--torch PYTHON` adds a run by a
different interpreter, whose torch is another version; `--only N` repeats pairs by their numbers.
`--keep FOLDER` keeps all runs, and takes those that are there.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from meshwright.commands.diverge.verdict import Comparison, Verdict
from meshwright.commands.replay.recorded import read_recorded
from tests.helpers.jobs import CONFIG, ROOT, environment, start_on_ranks, train_alone

SCRIPT = ROOT / "tests/helpers/flipped_train.py"
WORDS = ["--training.steps", 8, "--checkpoint.interval", 4, "--checkpoint.keep_latest_k", 0]
WORDS += ["--metrics.grad_norm_by_group"]
TWO = ["--parallelism.data_parallel_shard_degree", 2]
START = "from meshwright.train.__main__ import start; start()"

KEYS: dict[str, object] = {
    "optimizer.lr": 4.1e-3,
    "optimizer.beta1": 0.91,
    "optimizer.beta2": 0.96,
    "optimizer.eps": 1e-5,
    "optimizer.weight_decay": 0.2,
    "lr_scheduler.warmup_steps": 6,
    "training.max_norm": 0.5,
    "training.seed": 1,
    "training.seq_len": 32,
    "training.global_batch_size": 4,
    "training.packing": "best_fit",
    "model.args.hidden_dim": 96,
}

CODE = [
    ("models/attention.py", "torch.stack([angle.cos(), angle.sin()])", "{}.bfloat16().float()"),
    ("models/attention.py", "1 / math.sqrt(spec.head_dim)", "1.001 * {}"),
    ("models/layers.py", "F.silu(gate)", "F.silu(gate * 1.0001)"),
    ("models/decoder.py", "(out if self.residual_scale == 1", "1.0002 * {}"),
    ("models/layers.py", "cast(self.weight, x.dtype), self.eps", "{} * 3"),
    ("train/optim/optimizers.py", "eps=config.eps, fused", "eps=config.eps * 100, fused"),
    ("train/optim/optimizers.py", "betas = (config.beta1, config.beta2", "{} * 0.999"),
    (
        "train/optim/schedules.py",
        "return step / warmup_steps\n    decay",
        "return (step + 0.01) / warmup_steps\n    decay",
    ),
    ("train/optim/gradients.py", "(norm + 1e-6) / max_norm", "{} / 1.001"),
    ("train/trainer.py", "share = total / num_labels", "{} * 1.0005"),
]
NAMED = (
    *("rope", "layers.0.attention.core", "layers.0.feed_forward", "layers.0"),
    *("layers.0.attention_norm", "update of", "exp_avg_sq of", "the learning rate"),
    *("exp_avg of", "gradient of"),
)
"""What the verdict on each of `CODE` has to say."""

TENSORS = ("layers.0.attention.wq", "layers.1.feed_forward.w1", "layers.1.attention.wo")
BITS = (0, 3, 6, 10, 14, 18, 20, 22, 23, 25, 27, 30)

KERNELS: list[tuple[str, dict[str, str]]] = [
    ("kernels.cpu", {"ATEN_CPU_CAPABILITY": "default"}),
    ("kernels.cpu", {"ATEN_CPU_CAPABILITY": "avx2"}),
    ("kernels.threads", {"OMP_NUM_THREADS": "1"}),
]
"""Facts that change only rounding, which the verdict has to say."""

INNOCENT: list[list[object]] = [
    [],
    ["--metrics.log_freq", 2],
    ["--training.max_bad_records", 3, "--training.gc_freq", 7],
    ["--job.description", "other", "--comm.train_timeout_seconds", 99],
]
"""Keys that change no number."""

Judge = Callable[[Verdict], bool]


@dataclass(frozen=True)
class Case:
    """A pair of runs."""

    kind: str
    planted: str
    train: Callable[[Path], None]
    """Trains B into a folder."""
    is_named: Judge
    base: str = "one"
    """The run A: "one" process, "two" ranks, or "json", which reads documents."""
    code: Path | None = None


def alone(
    folder: Path,
    *words: object,
    code: Path = ROOT,
    python: str = sys.executable,
    **variables: object,
) -> None:
    """Train on one process, which has imported everything by itself for other code, kernels or
    torch."""
    words = (*(WORDS[2:] if "--training.steps" in words else WORDS), *words)
    if (code, python) == (ROOT, sys.executable) and not variables:
        train_alone(folder, *words, PYTHONPATH=ROOT)
        return
    env = environment(**{"OMP_NUM_THREADS": 1, "PYTHONPATH": code, **variables})
    command = [python, "-P", "-c", START, *map(str, words)]
    command += ["--job.config_file", str(CONFIG), "--job.dump_folder", str(folder)]
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def on_ranks(folder: Path, *words: object, ranks: int = 2, **variables: object) -> None:
    """Train on ranks; a flip may end a job, whose record is left."""
    variables = {"PYTHONPATH": ROOT, **variables}
    words = (*WORDS, *words)
    done = start_on_ranks(folder, *words, ranks=ranks, script=SCRIPT, **variables).wait(600)
    assert done.returncode == 0 or "FLIP" in variables, done.stdout + done.stderr


def documents(file: Path, changed: int = -1) -> list[object]:
    """Write 60 documents, one of which may have one word more; return the keys that read them."""
    texts = [f"document {n}: " + " ".join(f"{n * k % 97}" for k in range(60)) for n in range(60)]
    if changed >= 0:
        texts[changed] += " more"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return ["--training.dataset", "json", "--training.dataset_path", file]


def other_code(folder: Path, number: int) -> Path:
    """Return a checkout in which a place of `CODE` is patched."""
    name, old, new = CODE[number]
    checkout = folder / f"code-{number}"
    shutil.rmtree(checkout, ignore_errors=True)  # of an earlier version
    shutil.copytree(ROOT / "meshwright", checkout / "meshwright")
    for beside in ("train_configs", "assets", "pyproject.toml"):
        (checkout / beside).symlink_to(ROOT / beside)
    file = checkout / "meshwright" / name
    text = file.read_text()
    assert text.count(old) == 1, (name, old)
    file.write_text(text.replace(old, new.replace("{}", old)))
    return checkout


def planted(
    folder: Path, count: int, draw: random.Random, interpreters: Sequence[str] = ()
) -> list[Case]:
    """Return pairs of which one run has a difference."""
    found = list[Case]()
    for key, value in KEYS.items():
        words = [f"--{key}", value, *draw.choice(INNOCENT)]
        found.append(Case("key", key, partial(_alone, words), partial(_is_called, "key", key)))
    words = ["--model.tokenizer_path", "bytes"]
    is_named = partial(_is_called, "key", "tokenizer")
    found.append(Case("tokenizer", "bytes", partial(_alone, words), is_named))
    for number in (0, 17, 41, 59):
        words = documents(folder / f"texts-{number}.jsonl", number)
        is_named = partial(_is_called, "data", f"json {number}")
        found.append(Case("document", f"json {number}", partial(_alone, words), is_named, "json"))
    for number, (name, old, _) in enumerate(CODE):
        code = other_code(folder, number)
        is_named = partial(_is_module, NAMED[number])
        train = partial(_alone, [], code=code)
        text = f"{name}: {old.strip()[:30]}"
        found.append(Case("code", text, train, is_named, code=code))
    for name, variables in KERNELS:
        train, is_named = partial(_alone, [], **variables), partial(_is_rounding_by, name)
        found.append(Case("kernels", f"{variables}", train, is_named))
    for python in interpreters:
        train = partial(_alone, [], python=python)
        is_named = partial(_is_rounding_by, "versions.torch")
        found.append(Case("torch", python, train, is_named))
    draw.shuffle(found)
    flips = [*_flips(draw)]
    draw.shuffle(flips)
    return [*found, *flips][:count] if count > len(found) else found[:count]


def nulls(count: int, draw: random.Random) -> list[Case]:
    """Return pairs that differ by rounding, or by keys that change no number."""
    found = [*_nulls(draw)]
    draw.shuffle(found)
    return found[:count]


def _is_called(kind: str, name: str, verdict: Verdict) -> bool:
    return (verdict.kind, list(verdict.names)) == (kind, [name])


def _is_module(name: str, verdict: Verdict) -> bool:
    return verdict.kind == "module" and name in verdict.text


def _alone(words: Sequence[object], folder: Path, **options: object) -> None:
    alone(folder, *words, **options)


def _flips(draw: random.Random) -> Iterator[Case]:
    for value in ("gradient", "weight", "exp_avg", "exp_avg_sq", "collective"):
        for bit in BITS if value != "collective" else (20, 22):
            rank, local = draw.randrange(2), draw.randrange(512)
            name = f"{draw.choice(TENSORS)}.weight"
            text = f"{value} {draw.choice((5, 6, 7))} {rank} {local} {bit} {name}"
            if value == "collective":
                text = f"collective 6 {rank} 0 {bit}"
            yield Case("flip", text, partial(_flipped, text), partial(_is_flip, text), "two")


def _flipped(text: str, folder: Path) -> None:
    on_ranks(folder, *TWO, FLIP=text)


def _is_flip(text: str, verdict: Verdict) -> bool:
    """Whether run, rank, tensor and element are named; of a collective, the rank."""
    value, _, rank, local, _, *names = text.split()
    if value == "collective":
        return (verdict.run, verdict.rank) == ("B", int(rank))
    rows = 32 if names[0].endswith("w1.weight") else 16  # of a rank
    element = (int(rank) * rows + int(local) // 32, int(local) % 32)
    found = verdict.run, verdict.rank, verdict.names[0], tuple(verdict.element)
    return found == ("B", int(rank), names[0], element)


def _is_rounding(verdict: Verdict) -> bool:
    return verdict.kind in ("equal", "rounding")


def _is_rounding_by(name: str, verdict: Verdict) -> bool:
    """Whether a fact is named of which no more than rounding followed."""
    return _is_rounding(verdict) and name in verdict.names


def _nulls(draw: random.Random) -> Iterator[Case]:
    tp, pp = "--parallelism.tensor_parallel_degree", "--parallelism.pipeline_parallel_degree"
    replicas = ["--parallelism.data_parallel_replicate_degree", 2]
    size = "--training.local_batch_size"
    meshes: list[list[object]] = [[tp, 2], TWO, replicas]
    meshes += [["--parallelism.context_parallel_degree", 2], [*TWO, tp, 2], [*replicas, tp, 2]]
    pairs = [(mesh, number) for mesh in meshes for number in (1, 2, 4)]
    pairs += [([pp, 2], 1), ([pp, 2], 2)]
    for mesh, number in pairs:
        ranks = 2 ** (len(mesh) // 2)
        words = [*mesh, size, number, *draw.choice(INNOCENT)]
        yield Case("null", f"{words}", partial(_meshed, words, ranks), _is_rounding)
    for number in (1, 4, 8):
        yield Case("null", f"{size} {number}", partial(_alone, [size, number]), _is_rounding)
    for words in INNOCENT[1:]:
        yield Case("null", f"{words}", partial(_alone, words), _is_rounding)
    for _, variables in KERNELS:
        train = partial(_alone, [], **variables)
        yield Case("null", f"{variables}", train, _is_rounding)
    train = partial(_alone, [size, 1], **KERNELS[0][1])
    yield Case("null", f"{size} 1 {KERNELS[0][1]}", train, _is_rounding)
    # ends before the decay: the rate of a later step depends on the last one
    for stops in ((3, 6, 8), (1, 8), (5, 6, 8), (2, 4, 6, 8), (4, 8), (6, 8)):
        yield Case("null", f"resumed {stops}", partial(_resumed, stops), _is_rounding)
    yield Case("null", "the same", partial(_meshed, TWO, 2), _is_rounding, "two")
    for words in INNOCENT[1:]:
        train = partial(_meshed, [*TWO, *words], 2)
        yield Case("null", f"two ranks {words}", train, _is_rounding, "two")


def _meshed(mesh: Sequence[object], ranks: int, folder: Path) -> None:
    on_ranks(folder, *mesh, ranks=ranks)


def _resumed(stops: Sequence[int], folder: Path) -> None:
    for steps in stops:
        alone(folder, "--training.steps", steps)


def base_of(case: Case, folder: Path) -> Path:
    """Return the run A of a pair, which is trained once."""
    base = folder / case.base
    if not base.exists():
        words = documents(folder / "texts.jsonl") if case.base == "json" else []
        _meshed(TWO, 2, base) if case.base == "two" else alone(base, *words)
    return base


def judge(case: Case, base: Path, folder: Path) -> tuple[str, str, float]:
    """Return "right", "silent" or "wrong", the verdict in words, and the seconds that it took; of a
    flip that left no other bit, as rounding may swallow it, "gone"."""
    torch.set_num_threads(1)
    if not folder.exists():
        case.train(folder)
    begin, lines = time.perf_counter(), list[str]()
    a, b = (read_recorded(one) for one in (base, folder))
    verdict = Comparison(a, b, case.code, 0, lambda *line: lines.append(": ".join(line))).verdict()
    seconds = time.perf_counter() - begin
    if case.is_named(verdict):
        return "right", verdict.text, seconds
    if verdict.kind == "equal" and case.kind == "flip":
        return "gone", verdict.text, seconds
    is_silent = verdict.kind in ("equal", "rounding", "run", "unexplained")
    return "silent" if is_silent else "wrong", "\n    ".join([*lines, verdict.text]), seconds


def attack(cases: Sequence[Case], chosen: Sequence[int], workers: int, folder: Path) -> bool:
    """Judge the chosen of all pairs, some at a time, and print a line for each; return whether no
    run was named wrongly."""
    totals, longest = Counter[str](), 0.0
    bases = {number: base_of(cases[number], folder) for number in chosen}
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        numbers = {
            pool.submit(judge, cases[number], base, folder / f"b-{number}"): number
            for number, base in bases.items()
        }
        for done in as_completed(numbers):
            case, failure = cases[numbers[done]], done.exception()
            result, text, seconds = ("wrong", repr(failure), 0.0) if failure else done.result()
            totals[f"{case.kind} {result}"] += 1
            longest = max(longest, seconds)
            line = f"{result:6} {seconds:5.1f} s  {numbers[done]:3} {case.kind} {case.planted}"
            print(f"{line}: {text}", flush=True)
    print(dict(sorted(totals.items())), f"at most {longest:.1f} s each")
    return not any("wrong" in name for name in totals)


def main() -> None:
    """Judge the pairs that the command line asks for; exit with 1 if one is named wrongly."""
    parser = ArgumentParser()
    parser.add_argument("--planted", type=int, default=60)
    parser.add_argument("--nulls", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--torch", nargs="*", default=[], metavar="PYTHON")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", nargs="*", type=int, default=[], metavar="N")
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    print(f"seed {given.seed}")
    with TemporaryDirectory() as name:
        folder = given.keep or Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        cases = planted(folder, given.planted, draw, given.torch) + nulls(given.nulls, draw)
        chosen = given.only or draw.sample(range(len(cases)), len(cases))
        is_right = attack(cases, chosen, given.workers, folder)
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
