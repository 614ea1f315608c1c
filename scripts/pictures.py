"""Make the pictures of README and docs anew from real runs on this machine's CPU, in Chromium.

    python -m scripts.pictures                  # all: about 10 minutes on two quiet cores
    python -m scripts.pictures plan.png ...     # some
    python -m scripts.pictures --runs FOLDER    # keep the runs there, or draw those that are there

docs/images/pictures.json has a hash of the code that drew each picture, and of the words that other
modules print into it, so that a test can tell which one shows what the code no longer prints.
`make docs` draws the other pictures of docs/images.
"""

import argparse
import ast
import hashlib
import inspect
import json
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs/images"
HASHES = IMAGES / "pictures.json"
CHROMIUM = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars"]
COLUMNS = 100
"""Of the terminal that a picture shows."""
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}

SMALL = (
    "meshwright train game_cpu --ngpu 2 --training.steps 80 --metrics.log_freq 2"
    " --validation.freq 20"
    " --job.description 'Llama of 1.3 M parameters on the source code of sympy'"
)
RUNS = {
    "adamw": f"{SMALL} --job.dump_folder adamw --training.local_batch_size 4",
    "muon": f"{SMALL} --job.dump_folder muon --training.local_batch_size 4 --optimizer.name muon",
    "tp": f"{SMALL} --job.dump_folder tp --training.local_batch_size 8"
    " --parallelism.tensor_parallel_degree 2",
    "proof": "meshwright train debug_model_2d --training.steps 2 --job.dump_folder proof",
    "proof/proof": "meshwright prove debug_model_2d --job.dump_folder proof",
}
"""What trains, by dump folder."""

FILES = {
    "bad.toml": """\
extends = "debug_model"

[training]
step = 1000
seq_len = "2k"
"""
}
"""What a command reads."""


@dataclass(frozen=True)
class Picture:
    """What a picture shows."""

    command: str
    """What draws it: its terminal is the picture, unless there is a page."""
    modules: tuple[str, ...]
    """Files that draw it."""
    texts: tuple[str, ...] = ()
    """Files whose text stands in it."""
    runs: tuple[str, ...] = ()
    """Of RUNS: what the command reads."""
    page: str = ""
    """An HTML file that the command writes."""
    headings: tuple[str, ...] | None = None
    """The sections of the page that the picture shows, "" for its top; None: all."""
    width: int = 1280
    """Pixels."""
    is_dark: bool = False
    exit_code: int = 0
    """Of the command."""


DOCUMENT = tuple(
    f"meshwright/metrics/report/{name}" for name in ("document.py", "page.css", "page.js")
)
REPORT = (*DOCUMENT, "meshwright/metrics/report/page.py")
TERMINAL = ("meshwright/system/log.py",)
PICTURES = {
    "console.png": Picture(
        "meshwright train game_cpu --training.steps 80 --training.local_batch_size 4",
        ("meshwright/metrics/console.py", *TERMINAL),
        (
            "meshwright/commands/train.py",
            "meshwright/train/announce.py",
            "meshwright/parallelisms/data_parallel.py",
        ),
        width=900,
    ),
    "report.png": Picture(
        "meshwright report adamw",
        REPORT,
        runs=("adamw",),
        page="adamw/report.html",
        headings=("", "Curves"),
    ),
    "report_phone.png": Picture(
        "meshwright report adamw",
        REPORT,
        runs=("adamw",),
        page="adamw/report.html",
        headings=("",),
        width=390,
        is_dark=True,
    ),
    "compare.png": Picture(
        "meshwright report adamw muon tp --output compare.html",
        REPORT,
        runs=("adamw", "muon", "tp"),
        page="compare.html",
        headings=("", "Curves", "Loss on equal batches"),
    ),
    "proof.png": Picture(
        "meshwright report proof",
        (*DOCUMENT, "meshwright/metrics/report/tables.py"),
        ("meshwright/commands/prove/cases.py", "meshwright/commands/prove/report.py"),
        runs=("proof", "proof/proof"),
        page="proof/report.html",
        headings=("Proof",),
        width=900,
    ),
    "plan.png": Picture(
        "meshwright plan llama3_8b --world-size 8 --device h100 --html plan.html",
        (*DOCUMENT, "meshwright/commands/plan/report.py"),
        (
            "meshwright/commands/plan/devices.py",
            "meshwright/commands/plan/figures.py",
            "meshwright/commands/plan/ledger.py",
            "meshwright/commands/plan/trace.py",
        ),
        page="plan.html",
    ),
    "error.png": Picture(
        "meshwright check bad.toml",
        ("meshwright/system/errors.py", *TERMINAL),
        ("meshwright/config/explain.py", "meshwright/config/loader.py"),
        width=900,
        exit_code=2,
    ),
    "meshes.svg": Picture(
        "python -m scripts.plot_meshes", ("scripts/plot_meshes.py", "scripts/svg.py")
    ),
}


def hash_of(picture: Picture) -> str:
    """Return a hash of what a picture shows, of the code that draws it, and of the texts in it."""
    shown = [repr(picture), *(RUNS[run] for run in picture.runs), *FILES.values()]
    shown += map(inspect.getsource, (page_of_terminal, keep, photograph))
    shown += ((ROOT / module).read_text("utf-8") for module in picture.modules)
    for module in picture.texts:
        shown += strings((ROOT / module).read_text("utf-8"))
    return hashlib.sha256("\0".join(shown).encode()).hexdigest()[:8]


def strings(code: str) -> list[str]:
    """Return the strings of a module, without its docstrings."""
    nodes = [*ast.walk(ast.parse(code))]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    ]


def words_of(command: str) -> list[str]:
    """Return the words that start a command of the docs from this checkout."""
    program, *words = shlex.split(command)
    return [sys.executable, *(["-m", "meshwright"] if program == "meshwright" else []), *words]


def run_quietly(command: str, folder: Path) -> bytes:
    """Run a command, and return what it printed."""
    words = words_of(command)
    return subprocess.run(
        words, cwd=folder, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE
    ).stdout


def in_terminal(command: str, folder: Path) -> tuple[str, int]:
    """Run a command in a new terminal, and return what it wrote there, and its exit code."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, COLUMNS))
    process = subprocess.Popen(
        words_of(command), cwd=folder, env=ENVIRONMENT, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    written = b""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:  # Linux's end of a terminal that nobody holds any more
            break
        written += part
    os.close(master)
    return written.decode(), process.wait()


def page_of_terminal(command: str, written: str) -> str:
    """Return a page with a terminal after a command, in its colors."""
    names = {"1": "bold", "2": "dim", "31": "red", "33": "yellow", "36": "cyan"}
    text = f"$ {command}\n"
    # what a progress bar wrote into a line goes when the line is written again
    text += "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in written.split("\n"))
    *parts, last = re.split(r"\x1b\[([\d;]*)m", re.sub(r"\x1b\[\??\d*[A-HJKhl]", "", text.rstrip()))
    body, style = "", "plain"
    for part, code in zip(parts[::2], parts[1::2], strict=True):
        body += f'<span class="{style}">{escape(part)}</span>'
        style = names.get(code, "plain")
    return f"""<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: #0d1117; color: #e6edf3 }}
main {{ padding: 14px 18px }}
pre {{ margin: 0; font: 14px/1.45 "DejaVu Sans Mono", monospace }}
.bold {{ font-weight: bold; color: #fff }} .dim {{ color: #8b949e }} .red {{ color: #ff7b72 }}
.yellow {{ color: #e3b341 }} .cyan {{ color: #56d4dd }}
</style><main><pre>{body}<span class="{style}">{escape(last)}</span></pre></main>"""


def keep(page: str, headings: Iterable[str]) -> str:
    """Return a page with some of its sections, and nothing in them folded."""
    head, top, *sections = re.split("(?<=<main>)|(?=<h2>)", page)
    found = {section[4 : section.index("</h2>")]: section for section in sections} | {"": top}
    body = "".join(found[heading] for heading in headings)
    return head + body.replace("<details>", "<details open>")


def photograph(page: str, output: Path, width: int, *, is_dark: bool) -> None:
    """Write a PNG of the whole page; `width` in pixels."""
    measure = f"""<script>document.body.style.width = "{width}px"  // a window may not be as narrow
document.title = Math.ceil(document.querySelector("main").scrollHeight)</script>"""
    scheme = f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "page.html")
        file.write_text(page + measure, "utf-8")

        def chromium(height: int, *words: str) -> str:
            window = [*CHROMIUM, scheme, f"--window-size={width},{height}", *words, file.as_uri()]
            return subprocess.run(window, capture_output=True, text=True, check=True).stdout

        (height,) = re.findall(r"<title>(\d+)", chromium(100, "--dump-dom"))
        chromium(int(height), f"--screenshot={output.absolute()}")


def make(name: str, runs: Path) -> None:
    """Make a picture, and what it needs that `runs` lacks."""
    picture = PICTURES[name]
    for run in picture.runs:
        if not (runs / run).exists():
            print(RUNS[run], flush=True)
            run_quietly(RUNS[run], runs)
    print(picture.command, flush=True)
    if name.endswith(".svg"):
        (IMAGES / name).write_bytes(run_quietly(picture.command, ROOT))
        return
    with tempfile.TemporaryDirectory() as fresh:
        folder = runs if picture.page else Path(fresh)
        for file, text in FILES.items():
            (folder / file).write_text(text, "utf-8")
        written, exit_code = in_terminal(picture.command, folder)
    if exit_code != picture.exit_code:
        sys.exit(f"{picture.command} ended with {exit_code}:\n{written}")
    page = page_of_terminal(picture.command, written)
    if picture.page:
        page = (runs / picture.page).read_text("utf-8")
    if picture.headings is not None:
        page = keep(page, picture.headings)
    photograph(page, IMAGES / name, picture.width, is_dark=picture.is_dark)


def main() -> None:
    """Make the pictures that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pictures", nargs="*", metavar="NAME")
    parser.add_argument("--runs", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    if unknown := {*given.pictures} - PICTURES.keys():
        parser.error(f"no picture: {', '.join(unknown)}; choose from {', '.join(PICTURES)}")
    with tempfile.TemporaryDirectory() as temporary:
        runs = (given.runs or Path(temporary)).absolute()
        runs.mkdir(parents=True, exist_ok=True)
        for name in given.pictures or PICTURES:
            make(name, runs)
            hashes = json.loads(HASHES.read_text("utf-8")) if HASHES.exists() else {}
            hashes[name] = hash_of(PICTURES[name])
            HASHES.write_text(json.dumps(hashes, indent=2, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main()
