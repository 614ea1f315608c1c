"""Do as a new user does who follows README and docs: every command as printed, in a fresh clone.

python -m tests.campaigns.new_user [--folder FOLDER] [PAGE ...]

It needs pip's index, for the set-up. The environment is empty but for PATH and a HOME of its own.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PART = re.compile(
    r"^```bash\n(?P<shell>.*?)^```|<!-- file: (?P<name>\S+) -->\n```\w*\n(?P<file>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


def commands(page: Path) -> Iterator[str]:
    """The lines of the page's shells, in order; a file that it prints is written."""
    for part in PART.finditer(page.read_text("utf-8")):
        if part["name"]:
            yield f"cat > {part['name']} <<'END'\n{part['file']}END"
        else:
            lines = part["shell"].replace("\\\n", " ").splitlines()
            yield from (" ".join(line.split()) for line in lines if line.strip())


def example(name: str) -> str:
    """The module of docs/extending.md that is called so."""
    text = (ROOT / "docs/extending.md").read_text("utf-8")
    (code,) = re.findall(rf"<!-- test: {name} -->\n```python\n(.*?)```", text, re.DOTALL)
    return code


def main() -> None:
    """Print each command with its seconds; stop at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="of the clone (default: a temporary one)")
    parser.add_argument("pages", nargs="*", default=["docs/tutorial.md"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        clone = args.folder or Path(temporary) / "meshwright"
        home = Path(temporary) / "home"
        home.mkdir()
        begun = time.monotonic()
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        environment = {"HOME": str(home), "PATH": os.environ["PATH"]}
        shell = subprocess.Popen(
            ["bash"], cwd=clone, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert shell.stdin is not None
        assert shell.stdout is not None
        for command in (line for page in args.pages for line in commands(clone / page)):
            print(f"$ {command}", flush=True)
            since = time.monotonic()
            # commands read no input, which would be the next of them
            shell.stdin.write(f'{{ {command}\n}} < /dev/null; echo "=$?="\n')
            shell.stdin.flush()
            ended = None
            for line in shell.stdout:
                if ended := re.fullmatch(r"(.*)=(\d+)=\n", line):
                    break
                print(f"    {line}", end="", flush=True)
            code = int(ended[2]) if ended else -1
            print(f"[{time.monotonic() - since:.1f} s, exit code {code}]", flush=True)
            if code:
                sys.exit(f"failed: {command}")
        shell.stdin.close()
        shell.wait()
        print(f"{(time.monotonic() - begun) / 60:.1f} minutes in all")


if __name__ == "__main__":
    main()
