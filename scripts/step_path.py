"""Print the files of the package that one training step of the debug model passes, and their lines.

python -m scripts.step_path            # a minute: two ranks train ten steps, uncompiled
"""

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
steps, files = 0, set()

def record(frame, event, argument):
    """Note the file of each call of the package; write all of them after the last traced step."""
    global steps
    file = frame.f_code.co_filename
    if event != "call" or not file.startswith(os.environ["STEP_PATH_PACKAGE"]):
        return
    if file.endswith("train/trainer.py") and frame.f_code.co_name == "step":
        steps += 1
        if steps == {stop}:
            open(os.environ["STEP_PATH_OUTPUT"], "w").write("\\n".join(sorted(files)))
    if {start} <= steps < {stop}:
        files.add(file)

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
        files = [Path(line) for line in output.read_text().splitlines()]
    total = 0
    for file in files:
        lines = file.read_text("utf-8").count("\n")
        total += lines
        print(f"{lines:6,}  {file.relative_to(PACKAGE)}")
    print(f"{total:6,}  in {len(files)} files")


if __name__ == "__main__":
    main()
