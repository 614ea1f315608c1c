"""Where a machine of several networks says that others reach it."""

import json
import shutil
import subprocess
import sys

import pytest

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
        "'host name = node0: leads to 127.0.1.1, where other machines find themselves\\n"
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
