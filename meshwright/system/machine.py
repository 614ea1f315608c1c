"""This machine's GPUs, cores, memory and place in the network; a job's ranks. Free of torch."""

import fcntl
import ipaddress
import os
import re
import resource
import socket
import struct
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from meshwright.system.errors import ConfigError, check
from meshwright.system.files import text_of
from meshwright.system.log import logger

CPU_RANKS = 2
"""On a machine without GPUs."""

LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a launcher gives to every rank."""

NVIDIA_SMI_S = 20.0
"""Limit of `nvidia-smi -L`, which takes seconds, and hangs if the driver is broken."""

REPAIR = "repair the driver (often: reboot), or train on the CPU with CUDA_VISIBLE_DEVICES="

DEVICES = Path("/dev")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
CPU_INFO = Path("/proc/cpuinfo")

BF16_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}
"""As the Linux kernel names them; the last is ARM's."""

GLOO = "GLOO_SOCKET_IFNAME"
"""gloo's environment variable: the interface whose address other nodes are told."""

LOOPBACK = "lo"
"""Linux's name of the interface that leads back to this machine."""

SIOCGIFADDR = 0x8915  # <linux/sockios.h>


@dataclass(frozen=True)
class Ranks:
    """The processes of a job."""

    per_machine: int
    machines: int
    gpus: int | None
    """GPUs of this machine that may be used; None: not counted."""

    @property
    def total(self) -> int:
        """Ranks over all nodes."""
        return self.per_machine * self.machines


def count_ranks(given: Namespace, *, start_here: bool = True) -> Ranks:
    """Return the ranks that the options --ngpu and --nnodes, or NGPU and NNODES, ask for.

    Args:
        start_here: otherwise GPUs are only counted if nothing names the ranks per node.

    Raises:
        ConfigError: if they are no positive numbers, or the driver fails.
    """
    key, text = _given(given.ngpu, "--ngpu", "NGPU")
    gpus = count_gpus() if start_here or not text else None
    per_machine = _positive(key, text, gpus or CPU_RANKS)
    machines = _positive(*_given(given.nnodes, "--nnodes", "NNODES"), 1)
    return Ranks(per_machine, machines, gpus)


def _given(option: str | None, name: str, variable: str) -> tuple[str, str]:
    """Return the option and its text; without it the variable and its text."""
    return (name, option) if option is not None else (variable, os.environ.get(variable, ""))


def _positive(key: str, text: str, default: int) -> int:
    if not text:
        return default
    is_positive = text.isdecimal() and int(text) > 0
    check(is_positive, key, text, "must be a positive number", f"write {key}={default}")
    return int(text)


def given_rank() -> int:
    """Return this process's number among the ranks, as its launcher gives it; 0 without one.

    Raises:
        ConfigError: if only some of the variables of a launcher are there, or are wrong.
    """
    env = os.environ
    if not any(name in env for name in LAUNCHERS[:2]):
        return 0
    fix = "start the ranks by meshwright train or torchrun, or unset RANK and WORLD_SIZE"
    for name in LAUNCHERS:
        check(name in env, name, "", "is not set, though other variables of a launcher are", fix)
        is_number = name == "MASTER_ADDR" or env[name].isdecimal()
        check(is_number, name, env[name], "must be a number", fix)
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    check(rank < size, "RANK", rank, f"WORLD_SIZE = {size}: must be less than that", fix)
    # torchrun has its store ready; the first rank's may be of a container that is yet to start
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and not _addresses(env["MASTER_ADDR"]):
        words = "MASTER_ADDR = %r: this machine does not know the name (yet), and asks again"
        logger.warning(words, env["MASTER_ADDR"])
    return rank


def check_machines() -> None:
    """Raise ConfigError if our launchers have started more ranks on one machine than on another:
    they have checked the job for as many on each."""
    names = ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "WORLD_SIZE")
    here, machines, ranks = (int(os.environ[name]) for name in names)
    rule = f"the {machines} nodes have {ranks} ranks in all"
    check(here * machines == ranks, "NGPU", here, rule, "set the same NGPU on all nodes")


def allow_files(ranks: int) -> None:
    """Raise this process's limit of open files if it is low for one of `ranks`: gloo opens three to
    each other rank, so that 512 ranks need more than the usual 1024.

    Raises:
        ConfigError: if this user may not open as many: torchrun would retry in silence.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 48 + 3 * ranks
    if 0 <= limit < (wanted := needed + ranks):  # some in reserve
        limit = wanted if hard < 0 else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        rule, fix = f"{ranks} ranks need {needed}", f"have root raise it: ulimit -Hn {wanted}"
        check(limit >= needed, "ulimit -n", limit, rule, fix)


def count_gpus() -> int:
    """Return the number of GPUs that torch will see; NVIDIA's without importing it.

    Raises:
        ConfigError: if NVIDIA's driver doesn't answer, or answers with an error.
    """
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return _count_visible(visible)
    return _count_by_torch() if _is_torch_for_amd() else _count_nvidia_gpus()


def hide_gpus() -> None:
    """Have torch find no GPU, here and in processes to come: each would start a driver that it does
    not use, which takes it seconds. Call it before torch is imported."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _count_visible(devices: str) -> int:
    """Return how many devices a list names; as for CUDA, a word that names none ends it."""
    named = (re.match(r"\s*(\d+\s*$|GPU-|MIG-)", device) for device in devices.split(","))
    return sum(1 for _ in takewhile(bool, named))


def _count_nvidia_gpus() -> int:
    command, pipe = ["nvidia-smi", "-L"], subprocess.PIPE
    try:
        asked = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    except OSError:  # there is no driver; or its tool is its own package, as in Debian
        return sum(1 for _ in DEVICES.glob("nvidia[0-9]*"))
    fault = ""
    try:
        said, _ = asked.communicate(timeout=NVIDIA_SMI_S)
        if asked.returncode != 0 and "no devices" not in said.lower():  # this job is given none
            fault = f"failed with exit code {asked.returncode}: {' '.join(said.split())}"
    except subprocess.TimeoutExpired:
        asked.kill()  # not waited for: a process that hangs in the driver can't be killed
        fault = f"does not answer within {NVIDIA_SMI_S:g} s"
    if fault:
        raise ConfigError("", f"nvidia-smi -L: {fault}\n  fix: {REPAIR}")
    return sum(line.startswith("GPU") for line in said.splitlines())


def _is_torch_for_amd() -> bool:
    """Return whether the installed torch uses AMD's GPUs, and so none of NVIDIA's.

    Most laptops with an AMD processor have a GPU that torch can't use, listed as any other.
    """
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    version = text_of(Path(torch.origin).with_name("version.py"))  # if absent, the ranks say why
    return re.search(r"^hip\b.*=\s*['\"]", version, re.MULTILINE) is not None


def _count_by_torch() -> int:
    """Count in its own process: a launcher that has started a GPU's driver can't fork."""
    words = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    counted = subprocess.run(words, capture_output=True, text=True)
    if counted.returncode != 0:
        last = counted.stderr.strip().rpartition("\n")[2]
        raise ConfigError("", f"torch cannot count the GPUs: {last}\n  fix: {REPAIR}")
    return int(counted.stdout)


def count_cores() -> int:
    """Return the cores that this process may use at a time: of its affinity, within the quota of
    its container or job."""
    quotas = (int(quota) // int(period) for quota, period in _limits("cpu.max"))
    return max(1, min([len(os.sched_getaffinity(0)), *quotas]))


def machine_bytes() -> int:
    """Return the memory that processes of this machine may use together, within the limit of a
    container or a job."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *(int(limit) for (limit,) in _limits("memory.max"))])


def _limits(file: str) -> Iterator[list[str]]:
    """Yield the words of `file` in each control group (version 2) around this process that sets a
    limit there."""
    lines = text_of(OWN_CGROUP).splitlines()  # none in kernels of sandboxes, as gVisor
    own = next((line[4:] for line in lines if line.startswith("0::/")), "")
    for folder in (CGROUPS / own, *(CGROUPS / own).parents):
        with suppress(OSError):  # as at the root: it has none
            words = (folder / file).read_text().split()
            if words[0] != "max":
                yield words


def why_bf16_is_slow() -> str:
    """Return why this machine's CPU multiplies slower in bfloat16 than in float32; empty: it does
    not, or the system doesn't say."""
    lines = [line.partition(":") for line in CPU_INFO.read_text().splitlines()]
    found = {name.strip(): value.split() for name, _, value in reversed(lines)}
    flags = {*found.get("flags", []), *found.get("Features", [])}
    if flags and not BF16_INSTRUCTIONS & flags:
        # debug_model, 2 cores held to AVX2 (ONEDNN_MAX_CPU_ISA, ATEN_CPU_CAPABILITY), steps of 512
        # tokens: eager 13.7 to 18.5 s, in float32 2.1 to 3.5; compiled 17.6 to 18.6, and 0.9 to 1.1
        slow = "a step takes 5 times as long in it as in float32, 17 times if compiled"
        return f"this CPU has no instructions for bfloat16: {slow}"
    is_intel = found.get("vendor_id") == ["GenuineIntel"]
    if is_intel and "avx512_bf16" in flags and "amx_bf16" not in flags:
        # a Xeon of model 207: 88 GFLOP/s within a core's cache, against 175 in float32
        return "this CPU has no AMX for bfloat16, and multiplies up to twice as fast in float32"
    return ""


@dataclass(frozen=True)
class NetworkPlace:
    """How the others reach this machine, where torch wouldn't find it out."""

    is_host: bool = False
    """They meet here, at an address that the host name doesn't lead to. torchrun looks at no
    other, and each node would wait for a different one to start."""
    address: str = ""
    """torchrun and the ranks would tell the host name; "": others know it."""
    interface: str = ""
    """gloo would tell the address that the host name leads to here; "": that one is right."""


def place_alone(inherited: Mapping[str, str]) -> NetworkPlace:
    """Return the place of a machine that trains without others. Its ranks meet at a numeric address
    of the loopback interface, so nobody looks up a name: the machine's own may be unknown, or lead
    to an address that it had elsewhere, and then torch tries for minutes.

    Args:
        inherited: environment variables.

    Raises:
        ConfigError: if the loopback interface is down.
    """
    address = next(filter(_way_to, ("127.0.0.1", "::1")), "")
    if not address:
        rule = "the loopback interface is down, by which the ranks of a machine meet"
        fix = f"have root run: ip link set {LOOPBACK} up"
        raise ConfigError("", f"{LOOPBACK}: {rule}\n  fix: {fix}")
    return NetworkPlace(address=address, interface="" if GLOO in inherited else LOOPBACK)


def find_place(host: str, inherited: Mapping[str, str]) -> NetworkPlace:
    """Return the place of this machine in the network where all nodes meet.

    Args:
        host: a name or an address, at which they meet.
        inherited: environment variables.

    Raises:
        ConfigError: if the host name leads nowhere, or only to this machine, and there is no other
            address: the others would try for minutes.
    """
    own = _addresses(name := socket.getfqdn())
    if not own:
        raise ConfigError(
            "",
            f"host name = {name}: this machine cannot look up its own name, so that others cannot "
            "reach it\n  fix: add a line with the machine's address and that name to /etc/hosts",
        )
    if host == "localhost" or _is_loopback(host):  # the nodes are one
        return NetworkPlace()
    own = _addresses(name := socket.gethostname()) or own
    there = next(iter(_addresses(host)), "")
    way = _way_to(there)
    way = "" if _is_loopback(way) else way
    interface = _interface(way) if way != own[0] else ""
    if _is_loopback(own[0]) and not interface and GLOO not in inherited:
        others = [each for _, each in socket.if_nameindex() if each != "lo"]
        raise ConfigError(
            "",
            f"host name = {name}: leads to {own[0]}, where other nodes find themselves\n"
            f"  fix: export {GLOO}={' or '.join(others)}, by which they reach it",
        )
    return NetworkPlace(
        is_host=way == there != "" and way not in own,
        # who writes an address may have no names
        address=way if way != own[0] or host == there else "",
        interface="" if GLOO in inherited else interface,
    )


def _addresses(host: str) -> list[str]:
    """Return where a name leads to, in the order in which gloo tries it; [] if it isn't known."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in found]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return False


def _way_to(address: str) -> str:
    """Return this machine's address in the network of `address`; "" if there is no way."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))  # sends nothing
        return str(probe.getsockname()[0])
    return ""


def _interface(address: str) -> str:
    """Return the interface of an address of IPv4; "" if none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                request = struct.pack("256s", name.encode())
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24]
                if socket.inet_ntoa(found) == address:
                    return name
    return ""
