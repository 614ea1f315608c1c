"""What a machine asks of names and networks: of several, and of none."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.helpers.jobs import CONFIG, environment

UNSHARE = ["unshare", "--net", "--uts", "--mount"]

MACHINE = """
set -e
ip link set lo up
for n in 8 9; do
    ip link add net$n type bridge
    ip addr add 10.7$n.0.1/24 dev net$n
    ip link set net$n up
done
mount --bind "$1" /etc/hosts
hostname node0
"$2" -c "$3" "$4"
"""

PROGRAM = """
import json, sys
from meshwright.system.machine import find_place
from meshwright.system.errors import ConfigError
for own, host, given in json.loads(sys.argv[1]):
    hosts = f"127.0.0.1 localhost\\n{own} node0\\n10.78.0.2 node1\\n"
    open("/etc/hosts", "w").write(hosts)
    try:
        place = find_place(host, given)
        print(place.is_host, place.address, place.interface)
    except ConfigError as error:
        print(repr(str(error)))
"""


def can_unshare() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    link = ["ip", "link", "add", "net8", "type", "bridge"]
    return subprocess.run([*UNSHARE, *link], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="no networks can be made: needs root")
def test_others_are_told_an_address_of_the_network_in_which_all_meet(tmp_path) -> None:
    gloo = {"GLOO_SOCKET_IFNAME": "net8"}
    nowhere = (
        "'host name = node0: leads to 127.0.1.1, where other nodes find themselves\\n"
        "  fix: export GLOO_SOCKET_IFNAME=net8 or net9, by which they reach it'"
    )
    cases = {
        # the own address by the host name, where they meet: what torch is told
        ("10.78.0.1", "node1"): "False  ",
        ("10.78.0.1", "node0"): "False  ",  # torchrun sees that it is here
        ("10.78.0.1", "10.78.0.2"): "False 10.78.0.1 ",
        ("10.78.0.1", "10.79.0.2"): "False 10.79.0.1 net9",
        ("10.78.0.1", "10.79.0.1"): "True 10.79.0.1 net9",
        ("10.78.0.1", "node9"): "False  ",  # which is not known yet
        ("127.0.1.1", "node9"): nowhere,
        ("127.0.1.1", "node0"): nowhere,  # as Debian's installer has it
        ("127.0.1.1", "node1"): "False 10.78.0.1 net8",
        ("127.0.1.1", "10.78.0.1"): "True 10.78.0.1 net8",
        ("127.0.1.1", "localhost"): "False  ",
    }
    asked = [[*case, {}] for case in cases]
    asked += [["127.0.1.1", "node0", gloo], ["10.78.0.1", "10.79.0.1", gloo]]
    (tmp_path / "hosts").touch()
    words = [tmp_path / "hosts", sys.executable, PROGRAM, json.dumps(asked)]
    done = subprocess.run(
        [*UNSHARE, "sh", "-c", MACHINE, "sh", *words], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [*cases.values(), "False  ", "True 10.79.0.1 "], done.stderr


ALONE = """
from meshwright.system.machine import place_alone
from meshwright.system.errors import ConfigError
for given in ({}, {"GLOO_SOCKET_IFNAME": "net8"}):
    try:
        place = place_alone(given)
        print(place.address, place.interface)
    except ConfigError as error:
        print(repr(str(error)))
"""

DOWN = (
    "'lo: the loopback interface is down, by which the ranks of a machine meet\\n  fix: have root"
)


@pytest.mark.skipif(not can_unshare(), reason="no networks can be made: needs root")
def test_ranks_of_one_machine_meet_at_a_numeric_address(tmp_path) -> None:
    for set_up, found in (
        ("ip link set lo up", ["127.0.0.1 lo", "127.0.0.1 "]),
        ("ip link set lo up; ip addr del 127.0.0.1/8 dev lo", ["::1 lo", "::1 "]),
        ("true", [DOWN, DOWN]),
    ):
        words = [*UNSHARE, "sh", "-c", f'{set_up}; "$1" -c "$2"', "sh", sys.executable, ALONE]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        for line, begin in zip(done.stdout.splitlines(), found, strict=True):
            assert line.startswith(begin)


NO_NAMES = """
ip link set lo up
hostname nowhere-7f3a
mount --bind "$1" /etc/hosts
mount --bind "$2" /etc/resolv.conf
shift 2
"$@"
"""

POOL = """
import torch, torch.distributed as dist
from meshwright.commands.prove.ranks import RankPool

def add() -> float:
    dist.all_reduce(one := torch.ones(()))
    return float(one)

if __name__ == "__main__":
    pool = RankPool(2)
    print("sums:", pool.run(add))
    pool.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(not can_unshare(), reason="no networks can be made: needs root")
@pytest.mark.parametrize("hosts", ["", "192.0.2.55 nowhere-7f3a", "::1 localhost"])
@pytest.mark.parametrize(
    ("program", "says"),
    [
        (f"-m meshwright train {CONFIG} --ngpu 2", "finished: "),
        (f"-m meshwright.train --job.config_file {CONFIG}", "finished: "),
        ("pool.py", "sums: [2.0, 2.0]"),
    ],
)
def test_a_machine_whose_name_leads_nowhere_runs_ranks(hosts, program, says, tmp_path) -> None:
    """Its resolver is gone, too: nothing listens at the port of its name server."""
    (tmp_path / "hosts").write_text(hosts)
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1")
    (tmp_path / "pool.py").write_text(POOL)
    small = ["--training.steps=1", f"--job.dump_folder={tmp_path / 'out'}"]
    command = [sys.executable, *program.split(), *(small if CONFIG.name in program else [])]
    done = subprocess.run(
        [*UNSHARE, "sh", "-e", "-c", NO_NAMES, "sh", "hosts", "resolv.conf", *command],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    assert "Unable to resolve hostname" not in done.stdout + done.stderr
