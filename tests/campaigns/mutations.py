"""How many seeded mutations of the package do the tests catch?

`python -m tests.campaigns.mutations FOLDER --seed 38 tests/unit tests/distributed` draws mutations
from the code alone, 20 of each kind. It then does two things on copies of the repository in FOLDER:

1. It runs the given tests once, and notes which of them reach which mutated place, in any process.
2. For each mutation it runs the tests that reach the place, the quickest first, until one fails.

FOLDER/results.json has the outcome of each mutation. A second run with `--again` runs the test that
caught a mutation before; only where that test is gone or passes does it try the others.
"""

import argparse
import ast
import json
import mmap
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LEFT_OUT = ("__init__.py",)
PER_KIND = 20
KINDS = ("operator", "comparison", "constant", "dropped call", "swapped arguments", "removed guard")
SECONDS_PER_MUTATION = 30.0
"""Tests that reach a mutation are run up to this sum of their usual durations."""

OTHER = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//",
    ast.Pow: "*", ast.BitOr: "&", ast.BitAnd: "|", ast.LShift: ">>", ast.RShift: "<<",
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
QUIET = ("logger", "warnings", "print")
"""Calls of these are not dropped: nobody promises each message."""

HIT = """
import mmap as _mmap, os as _os, builtins as _builtins
_file = _os.open({path!r}, _os.O_RDWR)
_reached = _mmap.mmap(_file, 0)
_os.close(_file)
def _hit(number):
    _reached[number] = 1
_hit._dynamo_marked_constant = True  # called while a graph is traced, and not part of it
_builtins._hit = _hit
"""


@dataclass(frozen=True)
class Mutation:
    file: str
    line: int
    kind: str
    start: int
    end: int
    "Offsets in the UTF-8 bytes of the file."
    before: str
    after: str
    is_late: bool
    "Whether the place is in a function's body, so that tests that reach it can be told."

    def of(self, data: bytes) -> bytes:
        """The mutated file."""
        return data[: self.start] + f"({self.after})".encode() + data[self.end :]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind}: {self.before} -> {self.after}"


def skipped(node: ast.AST) -> set[ast.AST]:
    """Children whose text is no expression of its own, or whose value is no behaviour."""
    if isinstance(node, ast.JoinedStr):
        return set(ast.walk(node))
    parts = [getattr(node, name, None) for name in ("annotation", "returns", "pattern", "names")]
    if isinstance(node, ast.Subscript) and "Literal" in ast.unparse(node.value):
        parts.append(node.slice)
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        parts += [node.test, *node.body]
    return {inner for part in parts if isinstance(part, ast.AST) for inner in ast.walk(part)}


def places_in(file: str, text: str) -> Iterator[Mutation]:
    """Every mutation of a file."""
    tree, data = ast.parse(text), text.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    out = {inner for node in ast.walk(tree) for inner in skipped(node)}
    late = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.Lambda))
        for part in (node.body if isinstance(node.body, list) else [node.body])
        for inner in ast.walk(part)
    }
    for node in ast.walk(tree):
        if node in out or not hasattr(node, "lineno"):
            continue
        for kind, place, after in changes_of(node):
            start = starts[place.lineno - 1] + place.col_offset
            end = starts[place.end_lineno - 1] + place.end_col_offset
            before = ast.unparse(place)
            yield Mutation(file, place.lineno, kind, start, end, before, after, node in late)


def changes_of(node: ast.AST) -> Iterator[tuple[str, ast.expr, str]]:
    """(kind, the expression that is replaced, its replacement) of one node."""
    text = ast.unparse
    if isinstance(node, ast.BinOp) and type(node.op) in OTHER and not is_text(node):
        sign = OTHER[type(node.op)]
        yield "operator", node, f"({text(node.left)}) {sign} ({text(node.right)})"
    elif isinstance(node, ast.BoolOp):
        sign = " or " if isinstance(node.op, ast.And) else " and "
        yield "operator", node, sign.join(f"({text(value)})" for value in node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield "operator", node, f"({text(node.operand)})"
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        sign = OTHER[type(node.ops[0])]
        yield "comparison", node, f"({text(node.left)}) {sign} ({text(node.comparators[0])})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield "constant", node, f"{node.value + 1!r}"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        if not text(node.value).startswith(QUIET):
            yield "dropped call", node.value, "None"
    elif isinstance(node, ast.If) and not node.orelse and is_exit(node.body):
        yield "removed guard", node.test, "False"
    if isinstance(node, ast.Call) and len(node.args) >= 2:
        first, second, *rest = node.args
        if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
            swapped = ast.Call(node.func, [second, first, *rest], node.keywords)
            yield "swapped arguments", node, text(swapped)


def is_exit(body: list[ast.stmt]) -> bool:
    return len(body) == 1 and isinstance(body[0], (ast.Raise, ast.Return, ast.Continue))


def is_text(node: ast.BinOp) -> bool:
    """A sum of strings, or a union of types: no other operator has a meaning there."""
    texts = (ast.JoinedStr, ast.Constant)
    sides = (node.left, node.right)
    return any(
        isinstance(side, texts) and (isinstance(side, ast.JoinedStr) or not is_number(side.value))
        for side in sides
    ) or (isinstance(node.op, ast.BitOr) and all(isinstance(s, ast.Name) for s in sides))


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def draw(seed: int) -> list[Mutation]:
    """`PER_KIND` mutations of each kind, without replacement, by the package alone."""
    package = REPOSITORY / "meshwright"
    places = [
        place
        for file in sorted(package.rglob("*.py"))
        if file.relative_to(package).parts[0] not in LEFT_OUT
        for place in places_in(file.relative_to(REPOSITORY).as_posix(), file.read_text("utf-8"))
    ]
    generator = random.Random(seed)
    drawn = []
    for kind in KINDS:
        drawn += generator.sample([place for place in places if place.kind == kind], PER_KIND)
    return drawn


def copied(folder: Path) -> Path:
    """A copy of the tracked files, and of new ones, in an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.check_output(listed, cwd=REPOSITORY, text=True).split("\0")
    for name in filter(None, files):
        if (REPOSITORY / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name, follow_symlinks=False)
    shutil.copytree(REPOSITORY / ".git", folder / ".git")  # tests ask git for tracked files
    return folder


def with_hits(text: str, inside: list[tuple[int, Mutation]]) -> str:
    """The file with a call of `_hit` before each mutated place is evaluated."""
    data = text.encode()
    marks = [(m.start, 1, -m.end, f"(_hit({number}) or (".encode()) for number, m in inside]
    marks += [(m.end, 0, -m.start, b"))") for _, m in inside]
    for at, _, _, mark in sorted(marks, reverse=True):
        data = data[:at] + mark + data[at:]
    return data.decode()


class Reach:
    """The plugin that notes, for every test, its duration and the places it reached."""

    def __init__(self, path: Path, output: Path) -> None:
        with open(path, "r+b") as file:
            self.reached, self.output = mmap.mmap(file.fileno(), 0), output
        self.tests: dict[str, dict] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        begin = time.monotonic()
        result = yield
        numbers = [i for i, byte in enumerate(self.reached[:]) if byte]
        self.reached[:] = bytes(len(self.reached))
        if item.nodeid not in self.failed:  # such a test would catch everything
            self.tests[item.nodeid] = {"s": time.monotonic() - begin, "reached": numbers}
        return result

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self):
        self.output.write_text(json.dumps(self.tests))


def in_process(tree: Path, arguments: list[str], plugins: list, output: Path) -> int:
    """Run pytest on a tree in a fork of this process, which has torch; give its process number."""
    process = os.fork()
    if process:
        return process
    os.setsid()
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    for name in [name for name in sys.modules if name.split(".")[0] in ("meshwright", "tests")]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(REPOSITORY)))]
    os.environ["PYTHONPATH"] = str(tree)
    code = 1
    try:
        code = pytest.main(["-q", "-p", "no:cacheprovider", "-n", "0", *arguments], plugins=plugins)
    finally:
        os._exit(int(code))


def waited(process: int, limit_s: float) -> int | None:
    """The exit code, or None after the limit. Nothing of the process group is left."""
    end, code = time.monotonic() + limit_s, None
    while time.monotonic() < end and code is None:
        found, status = os.waitpid(process, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if found else None
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(process, 9)
    if code is None:
        os.waitpid(process, 0)
    return code


def find_reach(folder: Path, mutations: list[Mutation], paths: list[str], name: str) -> dict:
    """Which tests reach which mutations: {test: {"s": seconds, "reached": numbers}}."""
    output = folder / f"reach_{name}.json"
    if not output.exists():
        tree, counts = copied(folder / f"reach_{name}"), folder / f"reach_{name}.bytes"
        counts.write_bytes(bytes(len(mutations)))
        for file in {mutation.file for mutation in mutations}:
            inside = [(i, m) for i, m in enumerate(mutations) if m.file == file and m.is_late]
            (tree / file).write_text(with_hits((tree / file).read_text("utf-8"), inside))
        with open(tree / "meshwright/__init__.py", "a") as file:
            file.write(HIT.format(path=str(counts)))
        plugin = Reach(counts, output)
        waited(in_process(tree, paths, [plugin], folder / f"reach_{name}.log"), 3600)
    return json.loads(output.read_text())


def tests_for(number: int, mutation: Mutation, reach: dict, first: str | None) -> list[str]:
    """The tests to run, the quickest first; before them the one that caught it the last time."""
    chosen = {test for test, found in reach.items() if number in found["reached"]}
    if not mutation.is_late:  # made at import: any test may see it, most likely one that names it
        names = {Path(mutation.file).stem, Path(mutation.file).parent.name}
        chosen = {t for t in reach if any(name in Path(t.split("::")[0]).stem for name in names)}
        chosen |= {t for t in reach if t.startswith("tests/unit/")}
        ranks = {t: not any(name in t for name in names) for t in chosen}
    else:
        ranks = dict.fromkeys(chosen, False)
    order = sorted(chosen, key=lambda test: (ranks[test], reach[test]["s"]))
    seconds, tests = 0.0, [first] if first in reach else []
    for test in order:
        seconds += reach[test]["s"]
        if seconds > SECONDS_PER_MUTATION and tests:
            break
        tests.append(test)
    return list(dict.fromkeys(tests))


def judge(tree: Path, mutation: Mutation, tests: list[str], log: Path) -> str | None:
    """The test that fails under a mutation, or None."""
    file = tree / mutation.file
    original = file.read_bytes()
    listed = log.with_suffix(".tests")
    listed.write_text("\n".join(tests))
    limit_s = 60 + 3 * SECONDS_PER_MUTATION
    try:
        file.write_bytes(mutation.of(original))
        os.utime(file, (time.time(), time.time() + random.randrange(10**6)))  # no old bytecode
        code = waited(in_process(tree, ["-x", f"@{listed}"], [], log), limit_s)
        if code == pytest.ExitCode.USAGE_ERROR:  # it changes names of cases, or an import
            files = dict.fromkeys(test.partition("::")[0] for test in tests)
            code = waited(in_process(tree, ["-x", *files], [], log), limit_s)
    finally:
        file.write_bytes(original)
    if code is None:
        return "(the tests' time limit)"
    said = log.read_text(errors="replace")
    failed = [
        line.split()[1] for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))
    ]
    return None if code == 0 else [*failed, f"(exit code {code})"][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("paths", nargs="*", default=["tests/unit", "tests/distributed"])
    parser.add_argument("--seed", type=int, default=38)
    parser.add_argument("--again", action="store_true", help="begin with the tests of results.json")
    parser.add_argument("--list", action="store_true", help="print the mutations alone")
    given = parser.parse_intermixed_args()
    mutations = draw(given.seed)
    print(f"seed {given.seed}: {len(mutations)} mutations")
    if given.list:
        print(*(f"{i} {mutation}" for i, mutation in enumerate(mutations)), sep="\n")
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    reach: dict = {}
    for path in given.paths:
        reach |= find_reach(given.folder, mutations, [path], Path(path).name)
    results_file = given.folder / "results.json"
    old = json.loads(results_file.read_text()) if results_file.exists() else []
    caught_by = {entry["number"]: entry["caught_by"] for entry in old}
    tree, results = copied(given.folder / "mutated"), [] if given.again else old
    for number, mutation in enumerate(mutations):
        if not given.again and number in caught_by:
            continue
        tests = tests_for(number, mutation, reach, caught_by.get(number))
        log = given.folder / "last.log"
        caught = judge(tree, mutation, tests, log) if tests else None
        print(f"{number} {mutation}\n    {len(tests)} tests: {caught or 'SURVIVED'}", flush=True)
        results.append({"number": number, **asdict(mutation), "caught_by": caught})
        results_file.write_text(json.dumps(results, indent=1))
    print(f"{sum(bool(entry['caught_by']) for entry in results)} of {len(results)} caught")


if __name__ == "__main__":
    # once, before the forks, and as tests/conftest.py wants them
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    import torch  # noqa: F401
    import transformers  # noqa: F401

    main()
