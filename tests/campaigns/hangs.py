"""Stall one rank in turn in each part of a job; print whom the launcher names, and how soon.

python -m tests.campaigns.hangs [--ranks 4] [--nodes 1] [--limit 15] [--cases data:stop,...]
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CASES = [f"{place}:stop" for place in ("data", "forward", "save", "validation")]
CASES += ["data:read", "forward:loop", "validation:loop"]
STEP = 4
NOT_NOTED = "history.jsonl does not end with the hang"
NAMED = {"forward": "forward/backward"}
VALIDATION = """
[validation]
enable = true
freq = 4
num_samples = 16
"""


def main() -> None:
    """Print a row for each case; exit with 1 if one is not named rightly, or too late."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=1, help="launchers that share the ranks")
    parser.add_argument("--limit", type=int, default=15, help="comm.train_timeout_seconds")
    parser.add_argument("--cases", default=",".join(CASES), help="place:way, ...")
    args = parser.parse_args()
    print(f"{'stalled in':12} {'by':5} {'rank named':>10} {'in phase':18} {'s':>5} {'exit':>4}")
    is_right = True
    for number, case in enumerate(args.cases.split(",")):
        place, way = case.split(":")
        rank = number % args.ranks
        named, phase, seconds, code, output = stalled(args, rank, place, way)
        good = (named, phase, code) == (str(rank), NAMED.get(place, place), 6)
        good = good and NOT_NOTED not in output
        # the evidence of other nodes comes later
        good = good and seconds < args.limit + 10 + 10 * (args.nodes - 1)
        is_right = is_right and good
        note = "" if good else f"  <- wrong: rank {rank}\n{output}"
        print(
            f"{place:12} {way:5} {named:>10} {phase:18} {seconds:5.1f} {code:4}{note}", flush=True
        )
    sys.exit(not is_right)


def stalled(
    args: argparse.Namespace, rank: int, place: str, way: str
) -> tuple[str, str, float, int, str]:
    """Run a job whose `rank` stalls; return whom the last line of the first node names, its phase,
    the seconds since it stalled until the job's end, the exit code and the console."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny = (ROOT / "tests/integration/tiny.toml").read_text()
        assets = str(ROOT / "assets")
        (folder / "job.toml").write_text(tiny.replace("../../assets", assets) + VALIDATION)
        with socket.create_server(("127.0.0.1", 0)) as free:
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        torchrun = ["--nnodes", str(args.nodes), "--nproc-per-node", str(args.ranks // args.nodes)]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
        torchrun += ["--local-ranks-filter", "0"]
        words = [
            *(sys.executable, "-u", "-m", "meshwright.launch.__main__", *torchrun, "--tee", "3"),
            *(str(ROOT / "tests/campaigns/stalling_train.py"), "--job.config_file"),
            *(str(folder / "job.toml"), "--job.dump_folder", str(folder / "out")),
            *("--training.local_batch_size", "1", "--checkpoint.interval", str(STEP)),
            *("--comm.train_timeout_seconds", str(args.limit), "--training.steps", "100"),
        ]
        variables = {"STALL": f"{rank} {STEP} {place} {way}", "STALLED": str(folder / "stalled")}
        variables |= {
            "MESHWRIGHT_COLUMNS": "1000",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
        }
        launchers = [
            subprocess.Popen(
                words, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, cwd=ROOT,
            )
            for _ in range(args.nodes)
        ]  # fmt: skip
        began: list[float] = []
        note = threading.Thread(target=_note_stall, args=(launchers[0], folder, began), daemon=True)
        note.start()
        outputs = [launcher.communicate(timeout=400)[0] for launcher in launchers]
        seconds = time.monotonic() - began[0] if began else float("nan")
        lasts = [output.rstrip().rpartition("\n")[2] for output in outputs]
        # torchrun numbers nodes as they come: all say the same
        output, last = "\n".join(outputs), lasts[0] if len(set(lasts)) == 1 else str(lasts)
        history = (folder / "out/history.jsonl").read_text().splitlines()
        if json.loads(history[-1]).get("reason") != "hung: " + last.removeprefix("meshwright: "):
            output += f"{NOT_NOTED}: {history[-1]}"
        found = re.search(r"rank (\d+) \(on .*\) hangs in (.*) of step (\d+)", last)
        named, phase = (found[1], found[2]) if found else ("?", "?")
        return named, phase, seconds, launchers[0].returncode, output


def _note_stall(job: subprocess.Popen[str], folder: Path, began: list[float]) -> None:
    """Note the time at which the rank says that it stalls."""
    marker = folder / "stalled"
    while job.poll() is None:
        if marker.exists():
            began.append(time.monotonic())
            return
        time.sleep(0.02)


if __name__ == "__main__":
    main()
