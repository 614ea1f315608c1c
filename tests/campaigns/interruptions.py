"""A training that is interrupted over and over, at random moments, beside one that is not.

The job is started by the launcher on two ranks, as anyone would, and started again with the same
words each time it ends before its last step; when it gets there, another round begins. It saves
every few steps, in a mode drawn anew at each start, and validates now and then. A kill is SIGKILL
to one rank, or to the launcher and with it to all; a stop is a signal to the launcher, SIGUSR1 to
one rank, or a STOP file. A third of them waits for a save to be under way, another hits the start.

Checked after each: the exit code; that it had resumed from the newest checkpoint; and that every
loss and gradient norm on record is, to the bit, that of the uninterrupted job. After each round
every tensor of the last checkpoint, too. It ends with 1 at the first that differs.

With `--file-faults` it is the file system that fails (`file_faults.py`): full, read-only, slow,
without flock or fsync, with files and links of others, two jobs in one folder, a rank that does not
see it. Each fault has a job of its own, which must get to its last step; every checkpoint left is
verified, too.

With `--world-faults` a job has two machines of one rank each, and the world around it fails
(`world_faults.py`): signals, kills, tools, clocks, read errors, cold caches, and the files' faults.

    python -m tests.campaigns.interruptions --kills 200
    python -m tests.campaigns.interruptions --file-faults 50 --seed 3
    python -m tests.campaigns.interruptions --stops 50 --compile
    python -m tests.campaigns.interruptions --kills 5 --file-faults 5
    python -m tests.campaigns.interruptions --world-faults 60 --seed 1
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from meshwright.checkpoint import integrity, listing
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.system.errors import EXIT_STOPPED
from tests.campaigns import file_faults, world_faults

ROOT = Path(__file__).resolve().parents[2]
VALIDATION_FREQ = 10
JOB = {
    "model.args": "{dim = 32, n_layers = 2, n_heads = 4, n_kv_heads = 2, hidden_dim = 64}",
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "training.mixed_precision_param": "float32",
    "optimizer.lr": "4e-3",
    "lr_scheduler.warmup_steps": 5,
    "checkpoint.enable": "true",
    "checkpoint.interval": 5,
    "checkpoint.keep_latest_k": 3,
    "validation.enable": "true",
    "validation.freq": VALIDATION_FREQ,
    "validation.num_samples": 160,  # about as long as the steps between
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": "false",
}
FIGURES = ("loss/train", "optim/grad_norm", "validation/loss")
HERE = {"NGPU": "2", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
START_S, COMPILED_START_S = 8, 20
"""From the launcher to the first step, or a little longer."""


class Start:
    """The job, started into `folder`; up to its end."""

    def __init__(
        self,
        folder: Path,
        steps: int,
        is_compiled: bool,
        mode: str,
        console: Path | None = None,
        machines: int = 1,
        only_first: dict[str, str | None] | None = None,
        **environment: str,
    ) -> None:
        self.folder, self.console = folder, console or folder.with_suffix(".log")
        self.codes: list[int] = []
        self.newest = _saved(folder)
        self._begun = time.time()
        self._start_s = COMPILED_START_S if is_compiled else START_S
        self._records_before = _records(folder)
        keys = JOB | {"checkpoint.async_mode": mode, "job.dump_folder": folder}
        keys |= {"training.steps": steps, "compile.enable": str(is_compiled).lower()}
        words = [str(ROOT / "run_llama_train.sh"), *(f"--{k}={v}" for k, v in keys.items())]
        variables: dict[str, str | None] = os.environ | HERE | environment
        with self.console.open("wb") as console:
            self.processes = [
                subprocess.Popen(
                    command,
                    env={k: v for k, v in (variables | of_machine).items() if v is not None},
                    stdout=console,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for command, of_machine in world_faults.on_machines(words, machines, only_first)
            ]

    @property
    def is_over(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    @property
    def has_begun(self) -> bool:
        """Whether there is a figure of this start."""
        return _records(self.folder) != self._records_before

    @property
    def is_saving(self) -> bool:
        for unfinished in (self.folder / "checkpoint").glob(f"*{listing.UNFINISHED}"):
            try:
                if unfinished.lstat().st_ctime > self._begun:  # else a killed save left it
                    return True
            except FileNotFoundError:  # it has just been finished
                pass
        return False

    def ranks(self) -> list[int]:
        """Their process numbers, in no order."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if b"meshwright.train" in words[:5] and os.fsencode(self.folder) in words:
                found.append(int(path.parent.name))
        return found

    def wait_for(self, moment: str, chance: random.Random) -> None:
        """Return at a random time of the start, of the steps, or of a save."""
        if moment == "start":
            self._sleep(chance.uniform(0, self._start_s))
            return
        while not self.is_over and not self.has_begun:
            time.sleep(0.01)
        self._sleep(chance.uniform(0, 3))
        if moment == "save":
            while not self.is_over and not self.is_saving:
                time.sleep(0.0005)
            time.sleep(chance.uniform(0, 0.03))

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.is_over and time.monotonic() < end:
            time.sleep(0.005)

    def strike(self, kind: str, chance: random.Random) -> str:
        """Kill or stop it; in words, how and when."""
        when = (
            "in a save" if self.is_saving else "in training" if self.has_begun else "at the start"
        )
        ranks = self.ranks()
        how = chance.choice(("one", "all") if kind == "kill" else ("one", "all", "file"))
        if how == "one" and not (ranks and (kind == "kill" or self.has_begun)):
            how = "all"
        if how == "file":
            self.folder.mkdir(exist_ok=True)
            (self.folder / "STOP").touch()
            return f"STOP file, {when}"
        try:
            if how == "one":
                number = signal.SIGKILL if kind == "kill" else signal.SIGUSR1
                os.kill(chance.choice(ranks), number)
                return f"{number.name} to one rank, {when}"
            if kind == "kill":
                self.kill()
                return f"SIGKILL to all, {when}"
            number = chance.choice((signal.SIGTERM, signal.SIGUSR1))
            self.processes[0].send_signal(number)
        except ProcessLookupError:
            return "nothing, for it was over"
        return f"{number.name} to the launcher, {when}"

    def kill(self) -> None:
        """SIGKILL to the launchers and all ranks."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def end(self) -> int:
        """Wait for launchers and ranks; the largest exit code, as a shell would see it."""
        codes = [process.wait(timeout=600) for process in self.processes]
        while self.ranks():
            time.sleep(0.01)
        self.codes = [128 - code if code < 0 else code for code in codes]
        return max(self.codes)


def main() -> None:
    """Interrupt, check, count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--stops", type=int, default=0)
    parser.add_argument("--file-faults", type=int, default=0)
    parser.add_argument("--world-faults", type=int, default=0, help="with two machines a job")
    kinds = file_faults.FAULTS | world_faults.FAULTS
    parser.add_argument("--only", action="append", choices=kinds, help="these faults alone")
    parser.add_argument(
        "--skip", type=int, default=0, help="so many faults that were planted before"
    )
    parser.add_argument("--steps", type=int, help="120; with faults alone 30")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    plan = ["kill"] * options.kills + ["stop"] * options.stops
    chance.shuffle(plan)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="interruptions_") as folder:
        steps = options.steps or (120 if plan else 30)
        reference = Path(folder) / "uninterrupted"
        want = train_uninterrupted(reference, steps, options.compile)
        done = Counter[str]()
        if plan:
            done += interrupt(reference, want, plan, steps, options.compile, chance)
        if options.file_faults:
            kinds = options.only or file_faults.possible()
            done += plant(reference, want, options.file_faults, options.skip, kinds, steps, chance)
        if options.world_faults:
            kinds = options.only or [*world_faults.FAULTS, *file_faults.FAULTS]
            reference = Path(folder) / "two_machines"
            want = train_uninterrupted(reference, steps, options.compile, machines=2)
            count, skip = options.world_faults, options.skip
            done += plant(reference, want, count, skip, kinds, steps, chance, machines=2)
    for what, count in sorted(done.items()):
        print(f"{count:5}  {what}")
    print(f"all as they should be, in {time.monotonic() - begun:.0f} s")


Records = dict[int, dict[str, float]]
"""By step."""


def train_uninterrupted(folder: Path, steps: int, is_compiled: bool, machines: int = 1) -> Records:
    """Train into `folder` without any fault; return its records."""
    start = Start(folder, steps, is_compiled, "disabled", machines=machines)
    if start.end():
        sys.exit(f"the uninterrupted job failed:\n{start.console.read_text()}")
    return {record["step"]: record for record in _records(folder)}


def interrupt(
    reference: Path,
    want: Records,
    plan: list[str],
    steps: int,
    is_compiled: bool,
    chance: random.Random,
) -> Counter[str]:
    """Go through `plan`, and on to the last step; how often what was done."""
    done, rounds = Counter[str](), 0
    while True:
        current = reference.with_name(f"round_{rounds}")
        start = Start(current, steps, is_compiled, chance.choice(("disabled", "thread")))
        how = ""
        try:
            if plan:
                start.wait_for(chance.choice(("start", "steps", "save")), chance)
                how = start.strike(plan[-1], chance)
            code = start.end()
        finally:
            start.kill()  # it still runs if this script itself is being ended
        if wrong := _what_is_wrong(start, code, plan[-1] if how else "", want):
            sys.exit(f"WRONG after {how}: {wrong}\n{start.console.read_text()}")
        if code:
            plan.pop()
            last_record = (_records(current) or [{"step": 1}])[-1]
            is_due = last_record["step"] % VALIDATION_FREQ == 0
            if (
                start.has_begun
                and is_due
                and code == EXIT_STOPPED
                and FIGURES[-1] not in last_record
            ):
                how += ", which gave up a validation"
            done[how] += 1
            print(f"{how}; exit code {code}, newest checkpoint {_saved(current)}", flush=True)
            continue
        (current / "STOP").unlink(missing_ok=True)  # it came too late
        rounds += 1
        compare = [sys.executable, ROOT / "tests/helpers/compare_checkpoints.py"]
        last = [run / "checkpoint" / f"step-{steps}" for run in (current, reference)]
        subprocess.run([*compare, *last], check=True)
        print("at the last step, all tensors equal", flush=True)
        if not plan:
            done["rounds to the last step"] = rounds
            return done


def plant(
    reference: Path,
    want: Records,
    number: int,
    skip: int,
    kinds: list[str],
    steps: int,
    chance: random.Random,
    machines: int = 1,
) -> Counter[str]:
    """Plant so many faults, but for the first `skip`; how often which was."""
    done = Counter[str]()
    shuffled: list[str] = []
    for count in range(number):
        if not shuffled:  # each once, before one comes again
            shuffled = chance.sample(kinds, len(kinds))
        kind, seed = shuffled.pop(), chance.random()
        current, mode = reference.with_name(f"fault_{count}"), chance.choice(("disabled", "thread"))
        if count < skip:
            continue
        begun, starts = time.monotonic(), list[Start]()

        def begin(
            into: Path, starts: list[Start] = starts, mode: str = mode, **given: object
        ) -> Start:
            path = os.pathsep.join((str(file_faults.SHIM), os.environ.get("PYTHONPATH", "")))
            given = {"PYTHONPATH": path, "machines": machines, **given}
            start = Start(into, steps, False, mode, **given)  # type: ignore[arg-type]
            starts.append(start)
            return start

        try:
            fault = (file_faults.FAULTS | world_faults.FAULTS)[kind]
            how = fault(begin, current, random.Random(seed))
            _check_all(current, reference, steps, want)
        except file_faults.WrongError as wrong:
            sys.exit(f"WRONG after {kind} ({mode}, fault {count}): {wrong}")
        finally:
            for start in starts:
                start.kill()
        done[kind] += 1
        seconds = time.monotonic() - begun
        print(f"{how} ({mode}); {len(starts)} starts, {seconds:.0f} s: as it was", flush=True)
        shutil.rmtree(current)
    return done


def _check_all(current: Path, reference: Path, steps: int, want: Records) -> None:
    """Nothing is lost, nothing is wrong.

    Raises:
        WrongError: naming the first thing that is.
    """
    records = _records(current)
    if [record["step"] for record in records] != list(range(1, steps + 1)):
        raise file_faults.WrongError(
            f"metrics of the steps {[record['step'] for record in records]}"
        )
    for record in records:
        for figure in FIGURES:
            if figure in record and record[figure] != want[record["step"]].get(figure):
                raise file_faults.WrongError(f"step {record['step']}: {figure} {record[figure]}")
    checkpoints = current / "checkpoint"
    for step in listing.saved_steps(checkpoints):
        checkpoint = listing.step_folder(checkpoints, step)
        if not (checkpoint / MANIFEST).exists():  # a folder of the user's
            continue
        manifest = integrity.inspect(checkpoint)
        if wrong := integrity.verify(checkpoint, manifest, sorted(manifest["files"])):
            raise file_faults.WrongError(f"{checkpoint} is damaged: {wrong}")
    compare = [sys.executable, "-W", "ignore", ROOT / "tests/helpers/compare_checkpoints.py"]
    last = [run / "checkpoint" / f"step-{steps}" for run in (current, reference)]
    if subprocess.run([*compare, *last], check=False).returncode:
        raise file_faults.WrongError("tensors of the last checkpoint differ")
    left = [entry.path.name for entry in listing.entries(checkpoints) if entry.nonce]
    left += [name for name in ("job.lock", "job.txt") if (checkpoints / name).exists()]
    if left:
        raise file_faults.WrongError(f"left over: {left}")


def _what_is_wrong(start: Start, code: int, kind: str, want: Records) -> str | None:
    """The first thing, if any."""
    if code not in {"kill": (0, 128 + signal.SIGKILL), "stop": (0, EXIT_STOPPED), "": (0,)}[kind]:
        return f"exit code {code}"
    console = start.console.read_text()
    resumed = re.search(r"resumed from \S+/step-(\d+) ", console)
    if resumed and int(resumed[1]) != start.newest:
        return f"resumed from {resumed[1]}, though {start.newest} was there"
    if start.has_begun and start.newest and not resumed:
        return f"started over, though {start.newest} was there"
    stopped = re.search(r"stopped after step (\d+) ", console)
    if stopped and int(stopped[1]) != _saved(start.folder):
        return f"stopped after step {stopped[1]}, but saved {_saved(start.folder)}"
    for number, record in enumerate(_records(start.folder), start=1):
        if record["step"] != number:
            return f"line {number} of the metrics is of step {record['step']}"
        for figure in FIGURES:
            # a validation that was given up is not made up for
            if figure in record and record[figure] != want[number].get(figure):
                return f"step {number}: {figure} {record[figure]}, not {want[number].get(figure)}"
    return None


def _records(folder: Path) -> list[dict[str, float]]:
    """Lines of the metrics, but for one that was cut short."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _saved(folder: Path) -> int:
    """Step of the newest checkpoint; 0: none."""
    return max(listing.saved_steps(folder / "checkpoint"), default=0)


if __name__ == "__main__":
    main()
