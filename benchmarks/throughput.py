"""Tokens per second of one Llama in our trainer, a bare loop and other trainers, side by side.

All have the same weights, batches and optimizer, so their losses are compared as well. Each runs
in a process and an environment of its own (benchmarks/install_peers.sh), in turns, several rounds;
a peer that is not installed is left out with a word. Steps during which something else used the
machine are left out. Prints medians over rounds; --save NAME keeps them in benchmarks/results/.

    python benchmarks/throughput.py                               (bf16, eager and compiled)
    python benchmarks/throughput.py --modes compiled --rounds 5 --vocab 131072 --batch 1
    python benchmarks/throughput.py --ranks 2 --contenders ours bare
    python benchmarks/throughput.py --contenders ours ours:compile.enable=false
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
sys.path.append(str(HERE / "contenders"))  # last: one is called transformers
from workload import Workload, to_command_line  # noqa: E402

from meshwright.commands.train import environment  # noqa: E402
from meshwright.system import hardware  # noqa: E402
from meshwright.system.machine import Ranks  # noqa: E402

PEERS = ("torchtitan", "transformers", "fabric")
WARM_UP = 3  # steps that are not counted, the first among them
OTHER_LOAD = 0.1  # cores: a step during which others used more of the machine is left out
LIMIT_S = 400


class Run(NamedTuple):
    """One contender's round."""

    tokens_per_s: float
    first_step_s: float
    """From the start of the process to the end of its first step."""
    peak_gib: float
    cpu_s: float
    """Processor time of a step, which other load changes less than its time; with OMP_NUM_THREADS=1
    threads do not wait for each other in it."""
    disturbed: int
    """Steps left out."""
    losses: list[float]
    """Of each step."""


def python_of(name: str) -> Path | None:
    """Return the interpreter that runs a contender; None: not installed."""
    if name not in PEERS:
        return Path(sys.executable)
    found = HERE / ".peers" / name / "bin/python"
    return found if found.exists() else None


def command_of(contender: str, work: Workload) -> tuple[list[str], dict[str, str]]:
    """Return the command of one round, and its environment."""
    name, _, keys = contender.partition(":")
    python = python_of(name)
    assert python is not None
    script = [str(HERE / "contenders" / f"{name}.py"), to_command_line(work)]
    threads = str(max(1, (os.cpu_count() or 1) // work.ranks))
    env = {"OMP_NUM_THREADS": threads} | os.environ | {"PYTHONPATH": ""}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(work.ranks)]
    command = [str(python), *(torchrun if work.ranks > 1 else []), *script]
    if name != "ours":
        return command, env
    pairs = dict(pair.split("=", 1) for pair in keys.split(",") if pair)
    env |= {key: pairs.pop(key) for key in list(pairs) if key.isupper()}
    env["MESHWRIGHT_BENCHMARK_KEYS"] = json.dumps(pairs)
    # the settings that the launcher chooses
    env |= environment(Ranks(work.ranks, 1, torch.cuda.device_count()), env)
    return command, env


def run_once(contender: str, work: Workload) -> Run:
    """Run a contender once.

    Raises:
        RuntimeError: with the end of what it printed, if it failed.
    """
    command, env = command_of(contender, work)
    start = time.time()
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    lines = [line for line in done.stdout.splitlines() if "RESULT {" in line]
    if not lines:
        raise RuntimeError(f"{contender} (exit {done.returncode}): {done.stderr[-2000:]}")
    result = json.loads(lines[-1].partition("RESULT ")[2])
    marks = result["marks"]
    times, quiet, cpu = [], [], []
    for before, after in zip(marks[WARM_UP - 1 :], marks[WARM_UP:], strict=False):
        seconds, own, busy = (b - a for a, b in zip(before, after, strict=True))
        times.append(seconds)
        cpu.append(own)
        if busy - own * work.ranks <= OTHER_LOAD * seconds:
            quiet.append(seconds)
    tokens = work.batch * work.ranks * work.seq_len
    return Run(
        tokens / median(quiet or times),
        marks[0][0] - start,
        result["peak_bytes"] / 2**30,
        median(cpu),
        len(times) - len(quiet),
        result["losses"],
    )


def measure(
    contenders: list[str], work: Workload, rounds: int, warm_ups: int
) -> tuple[dict[str, list[Run]], list[float]]:
    """Run all in turns, and measure the limit of each round; a contender that fails is left out
    of later rounds."""
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    limits: list[float] = []
    for index in range(-warm_ups, rounds):
        if index >= 0:
            limits.append(limit_of(work))
        names = list(runs)
        first = index % len(names) if names else 0  # so that none is always the first of a round
        for name in names[first:] + names[:first]:
            try:
                run = run_once(name, work)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                del runs[name]
                continue
            figures = run._replace(losses=run.losses[-1:])
            print(f"  {index} {name:14} {figures}", file=sys.stderr, flush=True)
            if index >= 0:
                runs[name].append(run)
    return runs, limits


def limit_of(work: Workload) -> float:
    """Return FLOP/s of this model's matrix products alone, by roofline.py."""
    command = [sys.executable, str(HERE / "roofline.py"), to_command_line(work), "--only-products"]
    env = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // work.ranks))}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["products_flops_per_s"])


def table(runs: dict[str, list[Run]], work: Workload, limits: list[float]) -> list[dict[str, Any]]:
    """Return a row for each contender: medians, also of ratios within rounds."""

    def ratio(ours: list[Run], theirs: list[Run]) -> float:
        pairs = zip(ours, theirs, strict=False)
        return round(median(a.tokens_per_s / b.tokens_per_s for a, b in pairs), 3)

    def apart(ours: list[Run], theirs: list[Run]) -> float:
        pairs = zip(ours[0].losses, theirs[0].losses, strict=True)
        return max(abs(a - b) / b for a, b in pairs)

    rows = []
    first = next((own for own in runs.values() if own), [])
    for name, own in runs.items():
        if not own:
            continue
        of_limit = [
            run.tokens_per_s / work.ranks * work.flops_per_token / limit
            for run, limit in zip(own, limits, strict=False)
        ]
        rows.append(
            {
                "contender": name,
                "tokens_per_s": round(median(run.tokens_per_s for run in own), 1),
                "spread": [round(f(run.tokens_per_s for run in own), 1) for f in (min, max)],
                "ratio_to_bare": ratio(own, runs.get("bare") or own),
                "first_over_it": ratio(first, own),
                "mfu_pct": round(100 * median(of_limit), 1),
                "peak_gib": round(max(run.peak_gib for run in own), 2),
                "cpu_s": round(median(run.cpu_s for run in own), 3),
                "first_step_s": round(median(run.first_step_s for run in own), 1),
                "loss_apart": f"{apart(first, own):.1e}",
                "disturbed_steps": sum(run.disturbed for run in own),
                "rounds": len(own),
            }
        )
    return rows


def machine() -> dict[str, str]:
    """Return what the figures depend on besides the code."""
    head = subprocess.run(
        ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    versions = {}
    for peer in PEERS:
        found = HERE / ".peers" / peer / "lib"
        for info in found.glob(f"python*/site-packages/*{peer}*.dist-info"):
            versions[peer] = info.name.removesuffix(".dist-info").partition("-")[2]
    return {
        "device": hardware.device_name(hardware.pick_device(0)),
        "cores": str(os.cpu_count()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": head,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    } | versions


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contenders", nargs="+", default=["ours", "bare", *PEERS])
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-ups", type=int, default=1, help="rounds to fill compilers' caches")
    parser.add_argument(
        "--save", default="", metavar="NAME", help="write benchmarks/results/NAME.json"
    )
    for field, default in Workload().__dict__.items():
        if field != "compile":
            parser.add_argument(f"--{field}".replace("_", "-"), type=type(default), default=default)
    args = parser.parse_args()
    if args.steps <= WARM_UP:
        parser.error(f"--steps: must be more than {WARM_UP}, which are not counted")
    contenders = [name for name in args.contenders if python_of(name.partition(":")[0])]
    for name in {*args.contenders} - {*contenders}:
        print(f"{name}: not installed (benchmarks/install_peers.sh)", file=sys.stderr)
    results = []
    for mode in args.modes:
        fields = {key: getattr(args, key) for key in Workload().__dict__ if key != "compile"}
        work = Workload(**fields, compile=mode == "compiled")
        warm_ups = args.warm_ups if work.compile else 0
        runs, limits = measure(contenders, work, args.rounds, warm_ups)
        rows = table(runs, work, limits)
        rounds = {
            name: [round(run.tokens_per_s, 1) for run in own] for name, own in runs.items()
        } | {"products_flops_per_s": limits}
        results.append(
            {"mode": mode, "workload": work.__dict__, "rows": rows, "of_each_round": rounds}
        )
        found = ", ".join(f"{limit / 1e9:.0f}" for limit in limits)
        print(f"\n{mode}, {work.dtype}; matrix products alone, GFLOP/s a rank, by round: {found}")
        names = list(rows[0]) if rows else []
        print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
        for row in rows:
            print("| " + " | ".join(str(value) for value in row.values()) + " |")
    if args.save:
        folder = HERE / "results"
        folder.mkdir(exist_ok=True)
        text = json.dumps({"machine": machine(), "results": results}, indent=1)
        (folder / f"{args.save}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
