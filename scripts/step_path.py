"""Print what one training step of the debug model passes: the files of the package with their
lines, and the lines of those functions that run.

python -m scripts.step_path            # a minute: two ranks train ten steps, uncompiled
"""

import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "meshwright"
TRACED = range(5, 8)
"""Steps of which calls are recorded: after the first ones, before validation and checkpoints."""
OBSERVER = '''
import os, sys, threading
steps, places = 0, set()

def record(frame, event, argument):
    """Note where each function is that is called; write it all after the last traced step."""
    global steps
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(os.environ["STEP_PATH_PACKAGE"]):
        return
    if code.co_filename.endswith("train/trainer.py") and code.co_name == "step":
        steps += 1
        if steps == {stop}:
            open(os.environ["STEP_PATH_OUTPUT"], "w").write("\\n".join(sorted(places)))
    if {start} <= steps < {stop}:
        places.add(f"{code.co_filename}:{code.co_firstlineno}")

sys.setprofile(record)
threading.setprofile(record)
'''.replace("{start}", str(TRACED.start)).replace("{stop}", str(TRACED.stop))


def main() -> None:
    """Train, then print each file with its number of lines."""
    with tempfile.TemporaryDirectory() as folder:
        observer, output = Path(folder) / "observer.py", Path(folder) / "files"
        observer.write_text(OBSERVER)
        options = {
            "job.dump_folder": folder + "/run",
            "training.steps": TRACED.stop + 2,
            "lr_scheduler.warmup_steps": 2,
            "compile.enable": "false",
            "validation.enable": "false",
            "experimental.custom_import": observer,
        }
        words = [f"--{key}={value}" for key, value in options.items()]
        subprocess.run(
            [sys.executable, "-m", "meshwright", "train", "debug_model", "--ngpu", "2", *words],
            env=os.environ | {"STEP_PATH_PACKAGE": str(PACKAGE), "STEP_PATH_OUTPUT": str(output)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        places = [line.rpartition(":") for line in output.read_text().splitlines()]
    called: dict[str, set[int]] = {}
    for file, _, line in places:
        called.setdefault(file, set()).add(int(line))
    of_files = of_functions = 0
    print(" lines    run")
    for file, starts in called.items():
        text = Path(file).read_text("utf-8")
        lines, run = text.count("\n"), lines_of_functions(text, starts)
        of_files, of_functions = of_files + lines, of_functions + run
        print(f"{lines:6,} {run:6,}  {Path(file).relative_to(PACKAGE)}")
    print(f"{of_files:6,} {of_functions:6,}  in {len(called)} files")


def lines_of_functions(text: str, starts: set[int]) -> int:
    """Count the lines of the functions that start there, with their decorators and docstrings."""
    lines = set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            start = min(part.lineno for part in (node, *node.decorator_list))
            if start in starts:
                lines.update(range(start, (node.end_lineno or start) + 1))
    return len(lines)


if __name__ == "__main__":
    main()
