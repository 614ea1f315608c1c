"""Do as a new user does who follows README and docs: every command as printed, in a fresh clone.

python -m tests.campaigns.new_user [--folder FOLDER] [--skip 'hf download *']
    [--may-fail 'meshwright diverge *'] [PAGE ...]

It needs pip's index, for the set-up. The environment is empty but for PATH, the settings of pip and
a HOME of its own. After each page it shows which lines of output the page prints otherwise.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLAGS = re.MULTILINE | re.DOTALL
PART = re.compile(
    r"^```bash\n(?P<shell>.*?)^```|<!-- file: (?P<name>\S+) -->\n```\w*\n(?P<file>.*?)^```",
    FLAGS,
)


def commands(page: Path) -> Iterator[str]:
    """The lines of the page's shells, in order; a file that it prints is written."""
    for part in PART.finditer(page.read_text("utf-8")):
        if part["name"]:
            yield f"cat > {part['name']} <<'END'\n{part['file']}END"
        else:
            lines = part["shell"].replace("\\\n", " ").splitlines()
            yield from (" ".join(line.split()) for line in lines if line.strip())


def unseen(page: Path, output: str) -> Iterator[str]:
    """The lines of output on the page that have a word or number which `output` lacks.

    The page may wrap lines, and stands "..." for what it leaves out.
    """
    seen = {word.strip(",.:;") for word in output.split()}
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text("utf-8"), FLAGS):
        for line in block.splitlines() if language in ("", "text") else ():
            words = {word.strip(",.:;") for word in line.split() if "..." not in word}
            if words - seen:
                yield line


def example(name: str) -> str:
    """The module of docs/extending.md that is called so."""
    text = (ROOT / "docs/extending.md").read_text("utf-8")
    (code,) = re.findall(rf"<!-- test: {name} -->\n```python\n(.*?)```", text, re.DOTALL)
    return code


class Shell:
    """One bash in the clone."""

    def __init__(self, clone: Path, home: Path) -> None:
        """Start it with an empty environment."""
        kept = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        self._bash = subprocess.Popen(
            ["bash"], cwd=clone, env=kept | {"HOME": str(home), "PATH": os.environ["PATH"]},
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, command: str) -> tuple[str, int]:
        """Run a command, and return what it printed, which is shown as it comes, and its code."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        # commands read no input, which would be the next of them
        self._bash.stdin.write(f'{{ {command}\n}} < /dev/null; echo "=$?="\n')
        self._bash.stdin.flush()
        printed = ""
        for line in self._bash.stdout:
            if ended := re.fullmatch(r"(.*)=(\d+)=\n", line):
                return printed + ended[1], int(ended[2])
            printed += line
            print(f"    {line}", end="", flush=True)
        return printed, -1

    def close(self) -> None:
        """End it."""
        self._bash.communicate()


def matches(command: str, patterns: list[str]) -> bool:
    """Return whether one of the globs is the command's."""
    return any(fnmatchcase(command, pattern) for pattern in patterns)


def follow(page: Path, shell: Shell, skip: list[str], may_fail: list[str]) -> None:
    """Run the commands of a page, and print each with its seconds; stop at the first that fails."""
    output, begun = "", time.monotonic()
    for command in commands(page):
        if matches(command, skip):
            print(f"skipped: {command}", flush=True)
            continue
        print(f"$ {command}", flush=True)
        since = time.monotonic()
        printed, code = shell.run(command)
        output += f"{command}\n{printed}\n"
        print(f"[{time.monotonic() - since:.1f} s, exit code {code}]", flush=True)
        if code and not (code == 1 and matches(command, may_fail)):
            sys.exit(f"failed: {command}")
    print(f"{page.name}: {(time.monotonic() - begun) / 60:.1f} minutes")
    for line in unseen(page, output):
        print(f"{page.name}: printed otherwise: {line}")


def main() -> None:
    """Follow pages in one shell, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="of the clone (default: a temporary one)")
    parser.add_argument("--skip", action="append", default=[], help="commands to leave out, a glob")
    parser.add_argument("--may-fail", action="append", default=[], help="may exit with 1, a glob")
    parser.add_argument("pages", nargs="*", default=["docs/tutorial.md"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        clone = args.folder or Path(temporary) / "meshwright"
        if not clone.exists():
            subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        home = Path(temporary) / "home"
        home.mkdir()
        shell = Shell(clone, home)
        for page in args.pages:
            follow(clone / page, shell, args.skip, args.may_fail)
        shell.close()


if __name__ == "__main__":
    main()
