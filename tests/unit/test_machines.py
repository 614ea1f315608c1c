"""Several machines make one cache in a shared folder without locks; some of them are killed.

A machine is a group of processes with a host name and process numbers of its own (`unshare`).
"""

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.datasets.token_cache.tokenizing import open_cache
from tests.helpers.files import contents
from tests.helpers.slow import slow
from tests.helpers.texts import TextsRecipe

UNSHARE = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]


def can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run([*UNSHARE, "hostname", "node0"], capture_output=True, check=False)
    return tried.returncode == 0


pytestmark = pytest.mark.skipif(not can_unshare(), reason="no machines can be made: needs root")

TEXTS = tuple(f"document {i} " * (i % 7) for i in range(400))

MACHINE = """
import fcntl, os, subprocess, sys, time
from pathlib import Path
from meshwright.datasets.encoding import Encoder
from meshwright.datasets.token_cache.tokenizing import open_cache
from meshwright.system import lease
from tests.helpers.texts import TextsRecipe
from tests.unit.test_machines import TEXTS

def no_flock(*of_call):
    raise OSError(37, "No locks available")

def slow(self, document):
    time.sleep(0.004)
    return encode(self, document)

encode, Encoder.encode = Encoder.encode, slow
fcntl.flock = no_flock
lease.BEAT_S, lease.LEASE_S = 0.2, 2.0
name, folder = sys.argv[1:]
subprocess.run(["hostname", name], check=True)
assert os.getpid() < 10  # as in every other machine
print(open_cache(TextsRecipe(TEXTS), Path(folder), num_workers=1).content)
"""


def start(name: str, folder: Path) -> subprocess.Popen[str]:
    command = [*UNSHARE, sys.executable, "-c", MACHINE, name, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("num_machines", "num_killed"), [(2, 1), *slow((2, 0), (4, 2))])
def test_machines_make_one_cache_equal_to_the_bit(num_machines, num_killed, tmp_path) -> None:
    rng = random.Random(num_machines)
    alone = open_cache(TextsRecipe(TEXTS), tmp_path / "alone", num_workers=1)
    shared = tmp_path / "shared" / alone.folder.name
    machines = [start(f"node{n}", tmp_path / "shared") for n in range(num_machines)]
    for killed in machines[:num_killed]:
        end = time.monotonic() + 60
        while not list(shared.glob("*.lease")):  # it, or another, is at work
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.5))
        killed.kill()
        killed.wait()
    for machine in machines[num_killed:]:
        out, errors = machine.communicate(timeout=120)
        assert machine.returncode == 0, errors
        assert out.strip() == alone.content
    found = contents(shared)
    # a killed machine's unfinished file stays: of another machine, it is removed by its age
    left = {name for name in found if ".unfinished" in name}
    assert len(left) <= num_killed
    assert {name: found[name] for name in found.keys() - left} == contents(alone.folder)
