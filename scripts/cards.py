"""Figures that pages and presets print. Each has a card in benchmarks/cards: a file that says which
command measured it, of which config and commit, when, and on which machine.

    python -m scripts.cards                     # fill the pages from the cards
    python -m scripts.cards --record NAME ...   # run a card's command again, and keep its figures
    python -m scripts.cards --verify [NAME ...] # repeat what a CPU can repeat, and compare

--record makes the card of a preset that has none: its plan.
"""

import argparse
import datetime
import hashlib
import json
import platform
import re
import resource
import shlex
import string
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from pathlib import Path

import tomli_w

ROOT = Path(__file__).parents[1]
CARDS = ROOT / "benchmarks/cards"
SIZE = re.compile(r"^# .*, (\d+) GPUs? of 80 GB\.$", re.MULTILINE)
"""A preset's line that names its GPUs."""


@dataclass
class Card:
    """Figures of one command."""

    command: str
    """Run in the repository's folder; $FOLDER is a temporary one."""
    config: str = ""
    """File whose values the figures depend on, or empty."""
    on: str = "cpu"
    """What it needs: a "cpu" (any gives the same figures, so it is verified), a "clock", a "gpu",
    or a "network"."""
    within: float = 0.0
    """Relative difference that another machine may show."""
    config_hash: str = ""
    commit: str = ""
    machine: str = ""
    date: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    read: dict[str, str] = field(default_factory=dict)
    """The pattern of each figure in the command's output, with a group for the number."""
    printed: dict[str, list[str]] = field(default_factory=dict)
    """By page: pieces of text in which a field like {peak:.1f} stands for a figure."""


def read_cards() -> dict[str, Card]:
    """Return every card by its name."""
    files = sorted(CARDS.glob("*.toml"))
    return {path.stem: Card(**tomllib.loads(path.read_text("utf-8"))) for path in files}


def presets() -> Iterator[tuple[Path, int]]:
    """Yield the presets for GPUs of 80 GB, with the number of GPUs."""
    for path in sorted((ROOT / "train_configs").glob("*.toml")):
        if size := SIZE.search(path.read_text("utf-8")):
            yield path, int(size[1])


def hash_of(config: str) -> str:
    """Return a hash of a TOML file without its comments."""
    values = tomllib.loads((ROOT / config).read_text("utf-8"))
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def pieces(card: Card, page: str) -> Iterator[tuple[re.Pattern[str], str]]:
    """Yield where a page prints figures of a card, and the text that belongs there."""
    values = asdict(card) | card.figures
    for template in card.printed[page]:
        parts = list(string.Formatter().parse(template))
        found = "".join(
            re.escape(text) + r"[\w.,-]+" * (name is not None) for text, name, *_ in parts
        )
        yield re.compile(found), template.format(**values)


def filled(cards: Mapping[str, Card], page: str, text: str) -> str:
    """Return the text of a page with the figures of the cards.

    Raises:
        ValueError: if a piece isn't there.
    """
    for name, card in cards.items():
        for pattern, wanted in pieces(card, page) if page in card.printed else ():
            if not pattern.search(text):
                raise ValueError(f"{page} doesn't print what the card {name} has: {wanted}")
            text = pattern.sub(lambda _, wanted=wanted: wanted, text)
    return text


def fill() -> None:
    """Write the figures of all cards into their pages."""
    cards = read_cards()
    for page in sorted({page for card in cards.values() for page in card.printed}):
        path = ROOT / page
        before = path.read_text("utf-8")
        after = filled(cards, page, before)
        if after != before:
            path.write_text(after, "utf-8")
            print(f"{page}: filled")


def plan_of(path: Path, gpus: int) -> Card:
    """Return the card of a preset's plan, not yet measured."""
    config = path.relative_to(ROOT).as_posix()
    head = (
        "# Plan: {peak:.1f} GiB of tensors at the peak, not compiled; {date}, config {config_hash}"
    )
    return Card(
        f"meshwright plan {config} --world-size {gpus} --device h100",
        config=config,
        read={"peak": r"rank 0: ([\d.]+) GiB of tensors at the peak"},
        printed={config: [head]},
    )


def measure(card: Card) -> dict[str, float]:
    """Run a card's command, and return its figures.

    Raises:
        ValueError: if the command fails or its output lacks a figure.
    """
    with tempfile.TemporaryDirectory() as folder:
        program, *words = shlex.split(card.command.replace("$FOLDER", folder))
        start = {
            "meshwright": [sys.executable, "-m", "meshwright"],
            "python": [sys.executable],
        }.get(program, [program])
        done = subprocess.run([*start, *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{card.command} ended with {done.returncode}: {done.stderr[-500:]}")
    found = {}
    for name, pattern in card.read.items():
        match = re.search(pattern, done.stdout)
        if match is None:
            raise ValueError(f"{card.command} didn't print {pattern}")
        found[name] = float(match[1].replace(",", ""))
    return found


def record(names: list[str]) -> None:
    """Measure the figures of cards again, and write them."""
    cards = {path.stem: plan_of(path, gpus) for path, gpus in presets()} | read_cards()
    for name in names:
        card = cards[name]
        card.figures |= measure(card)
        card.config_hash = hash_of(card.config) if card.config else ""
        card.date, card.machine = datetime.date.today().isoformat(), machine()
        git = ["git", "rev-parse", "--short=8", "HEAD"]
        card.commit = subprocess.check_output(git, cwd=ROOT, text=True).strip()
        kept = {key: value for key, value in asdict(card).items() if value}
        (CARDS / f"{name}.toml").write_text(tomli_w.dumps(kept), "utf-8")
        print(name, *(f"{key} {value:g}" for key, value in card.figures.items()), flush=True)


def machine() -> str:
    """Return the processor's name and the number of its cores that may be used."""
    from meshwright.system.machine import count_cores

    cpus = Path("/proc/cpuinfo").read_text("utf-8")
    found = re.search(r"^model name\s*: (.*)$", cpus, re.MULTILINE)
    return f"{found[1] if found else platform.machine()}, {count_cores()} cores"


def agrees(found: float, was: float, within: float) -> bool:
    """Return whether a measured figure is the card's, to as many decimals as the card has.

    What lies between two of them agrees with both: 65.85 stands for 65.849 and for 65.851.
    """
    card = Decimal(str(was))
    half = Decimal("0.5").scaleb(int(card.as_tuple().exponent))
    return abs(Decimal(str(found)) - card) <= half + Decimal(within) * abs(card)


def verify(names: list[str]) -> int:
    """Repeat cards of CPUs, one per core at a time, and return how many figures differ."""
    from meshwright.system.machine import count_cores

    start, wrong, before = time.monotonic(), 0, cpu_seconds()
    cards = {
        name: card
        for name, card in read_cards().items()
        if card.on == "cpu" and (not names or name in names)
    }
    with ThreadPoolExecutor(count_cores()) as pool:
        runs = {name: pool.submit(measure, card) for name, card in cards.items()}
        for name, run in runs.items():
            try:
                found = run.result()
            except ValueError as error:
                wrong += 1
                print(f"{name}: {error} WRONG", flush=True)
                continue
            for key, was in cards[name].figures.items():
                is_equal = agrees(found[key], was, cards[name].within)
                wrong += not is_equal
                note = "" if is_equal else " WRONG"
                print(f"{name}: {key} {found[key]:g}, card {was:g}{note}", flush=True)
    seconds, of_cpu = time.monotonic() - start, cpu_seconds() - before
    print(f"{wrong} differ; {len(cards)} cards, {seconds:.0f} s ({of_cpu:.0f} s of the CPU)")
    return wrong


def cpu_seconds() -> float:
    """Return the seconds that the commands so far took of the CPU."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", nargs="+", metavar="NAME", default=[])
    parser.add_argument("--verify", nargs="*", metavar="NAME")
    given = parser.parse_args()
    if given.verify is not None:
        sys.exit(bool(verify(given.verify)))
    record(given.record)
    fill()


if __name__ == "__main__":
    main()
