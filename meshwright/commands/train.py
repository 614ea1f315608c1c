"""`meshwright train`: check a config, tokenize its data, start the ranks."""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.commands.check import check_job
from meshwright.commands.options import add_ranks
from meshwright.config.command_line import Parser
from meshwright.config.loader import find_config
from meshwright.launch.restarts import check_progress
from meshwright.system import slurm
from meshwright.system.errors import ConfigError, check, numbered
from meshwright.system.files import text_of
from meshwright.system.log import logger
from meshwright.system.machine import (
    GLOO,
    NetworkPlace,
    Ranks,
    allow_files,
    count_cores,
    count_ranks,
    find_place,
    place_alone,
)
from meshwright.system.processes import (
    OTHER_MALLOC,
    STOP_SIGNALS,
    Launch,
    exit_when_asked,
    waiting,
)

if TYPE_CHECKING:
    from meshwright.datasets.stream import OpenSource
    from meshwright.train.resolve import ResolvedJob

MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}
"""glibc's: sizes in bytes from which it gives memory back."""

MEET_WITHIN_S = 600
"""Seconds that a machine waits for the others, plus the time for their data; torchrun's default."""

TOKENS_PER_CORE_S = 100_000
"""Another machine makes its tokens at least as fast: a tenth of the debug job's on a core of a Xeon
(`meshwright tokenize debug_model`: 1.1 million)."""

FIRST_MINUTE = "NGPU=1 CONFIG_FILE=train_configs/llama3_1b_sympy.toml ./run_llama_train.sh"
"""The preset of a GPU's size that needs neither a network nor a tokenizer of a release."""

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def add_options(parser: Parser) -> None:
    add_ranks(parser)
    parser.add_argument(
        "--log-rank", metavar="N[,N]", help="ranks whose log is shown (default: $LOG_RANK, or 0)"
    )
    parser.add_argument(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="address of the first node, the same on all (default: $RDZV_ENDPOINT)",
    )
    parser.add_argument(
        "--rdzv-id",
        metavar="NAME",
        help="ID of the job, the same on all nodes (default: $RDZV_ID, or meshwright)",
    )


def run(given: Namespace) -> None:
    """Become torchrun once everything is known to be right; return only by an exception.

    Raises:
        ConfigError: if the job can't run.
    """
    exit_when_asked()
    ranks = count_ranks(given)
    _check_gpus(ranks)
    allow_files(ranks.total)  # the launcher's as well
    _check_temporary_folder()
    if ranks.machines > 1:
        rendezvous = _rendezvous(given, ranks)
        place = find_place(_endpoint(given).rpartition(":")[0].strip("[]"), os.environ)
    else:
        place = place_alone(os.environ)
        rendezvous = _rendezvous_alone(place)
    log_ranks = _log_ranks(given, ranks)
    nodes_given = given.nnodes is not None or bool(os.environ.get("NNODES"))
    slurm.check_tasks(ranks.machines if nodes_given else None, os.environ)
    resolved = check_job(given, ranks, device_type="cuda" if ranks.gpus else "cpu")
    check_progress(Path(resolved.config.job.dump_folder), resolved.resume_step, os.environ)
    sources = _open_data(resolved)
    where = ""
    if ranks.machines > 1:
        where = f", of {ranks.machines} nodes that meet at {_endpoint(given)}"
    if ranks.gpus and Path(resolved.config.job.config_file).name == "debug_model.toml":
        logger.info("debug_model is for CPUs; for a minute on a GPU: %s", FIRST_MINUTE)
    logger.info("starting %s on this machine%s", numbered(ranks.per_machine, "rank"), where)
    os.environ.update(environment(ranks, os.environ, resolved.resume_step))
    if place.interface:
        os.environ[GLOO] = place.interface
        if ranks.machines > 1:
            logger.info("%s=%s: the way to where the nodes meet", GLOO, place.interface)
    sys.stdout.flush()
    torchrun = [
        *rendezvous,
        *_patience(ranks, sources, place),
        f"--nproc-per-node={ranks.per_machine}",
        f"--local-ranks-filter={log_ranks}",
        "--role=rank",
        "--tee=3",
        # ranks of a second attempt would meet the first attempt's in the store
        "--max-restarts=0",
        *_numa_binding(ranks),
        "--no-python",
    ]
    if place.address:
        torchrun.insert(0, f"--local-addr={place.address}")
    # -P: as it finds modules, not the folder
    # -u: torchrun doesn't flush the lines of ranks that it hands on: files got them in blocks
    python = [sys.executable, "-u", "-P", "-m"]
    words = ["--job.config_file", str(find_config(given.config)), *_overrides(given)]
    rank = [*python, "meshwright.train", *words]
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the launcher has its handlers
    os.execv(sys.executable, [*python, "meshwright.launch", *torchrun, *rank])


def _open_data(resolved: "ResolvedJob") -> "list[OpenSource]":
    """Open the sources of every stage, which tokenizes them before ranks wait for that; warn of
    what only their length tells.

    Raises:
        ConfigError: if a checkpoint has other data, or `training.exclude` names nothing of it.
    """
    # not at the top: numpy takes as long as all checks, which come first
    from meshwright.datasets.excluded import find_excluded
    from meshwright.datasets.opening import open_data
    from meshwright.datasets.stream import Cursor, steps_of_data
    from meshwright.train.resume import place_in_data

    config, saved, cursor = resolved.config, resolved.facts.saved, Cursor()
    sources = open_data("training", config)
    find_excluded(config.training.exclude, sources, are_all=resolved.is_only_stage)
    if saved is not None and resolved.resume_step < config.training.steps:
        cursor = place_in_data(resolved, saved.manifest, sources)
    data_steps = steps_of_data(config, sources, resolved.resume_step, cursor)
    for text in replace(resolved, data_steps=data_steps).notes:
        if text not in resolved.notes:
            logger.warning("%s", text)
    for stage in resolved.training_stages[1:]:
        sources += open_data("training", stage.config)
    for stage in resolved.training_stages:
        # with a fraction, a stage is validated on a part of its own data
        if stage is resolved or stage.config.training.validation_fraction:
            sources += open_data("validation", stage.config)
    return sources


def environment(ranks: Ranks, inherited: Mapping[str, str], resume_step: int = 0) -> dict[str, str]:
    """Return the variables that the ranks need in addition to the inherited ones."""
    chosen = host_settings(ranks, inherited)
    launch = Launch(
        is_checked=True,  # the check's notes aren't repeated
        checked_step=resume_step,
        num_gpus=ranks.gpus or 0,  # ranks compare it with the number that torch can use
        host_settings=" ".join(f"{name}={value}" for name, value in chosen.items()),
    )
    return chosen | launch.as_variable()


def host_settings(ranks: Ranks, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make ranks faster on this machine, and that the user hasn't set.

    They can't be set later, from within a process. Their gains: benchmarks/results/speed.md.
    """
    new = {}
    if ranks.gpus and not any(name in inherited for name in ALLOCATOR):
        new["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # less memory lost between blocks
    if "OMP_NUM_THREADS" not in inherited:
        # torchrun would give each rank a single thread, however many cores there are
        new["OMP_NUM_THREADS"] = str(max(count_cores() // ranks.per_machine, 1))
    new |= waiting(inherited)
    if not ranks.gpus and not any(inherited.get(name) for name in OTHER_MALLOC):
        # glibc gives large blocks back to the kernel when they are freed, and every step gets them
        # anew, page by page
        new |= {name: value for name, value in MALLOC.items() if name not in inherited}
    return new


def _check_gpus(ranks: Ranks) -> None:
    fix = "lower it, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
    is_enough = not ranks.gpus or ranks.per_machine <= ranks.gpus
    check(is_enough, "NGPU", ranks.per_machine, f"there are {ranks.gpus} GPUs", fix)


def _check_temporary_folder() -> None:
    try:
        tempfile.gettempdir()  # torch and torchrun need one
    except FileNotFoundError as error:
        what = f"TMPDIR = {os.environ.get('TMPDIR', '')!r}: {error.strerror}"
        raise ConfigError("", f"{what}\n  fix: export TMPDIR=FOLDER, a folder with room") from None


def _endpoint(given: Namespace) -> str:
    return given.rdzv_endpoint or os.environ.get("RDZV_ENDPOINT") or ""


def _rendezvous_alone(place: NetworkPlace) -> list[str]:
    """torchrun's options for a machine that trains without others. Its own `--standalone` looks up
    `localhost`, which /etc/hosts may lack."""
    host = f"[{place.address}]" if ":" in place.address else place.address
    return [
        "--nnodes=1",  # PET_NNODES of Kubeflow may say otherwise
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={host}:0",
        "--rdzv-id=meshwright",
    ]


def _rendezvous(given: Namespace, ranks: Ranks) -> list[str]:
    """torchrun's options for how the nodes of a job meet."""
    endpoint = _endpoint(given)
    host, _, port = endpoint.rpartition(":")
    check(
        bool(host) and port.isdecimal() and 0 < int(port) < 2**16,
        "RDZV_ENDPOINT",
        endpoint,
        f"must be host:port of one of the {ranks.machines} nodes",
        f"write {host or endpoint.strip(':') or 'node1'}:29500, the same on all",
    )
    name = given.rdzv_id or os.environ.get("RDZV_ID") or "meshwright"
    return [
        f"--nnodes={ranks.machines}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={name}",
    ]


def _patience(ranks: Ranks, sources: "Sequence[OpenSource]", place: NetworkPlace) -> list[str]:
    """torchrun's options for how long this machine waits: others may have no tokens yet, and the
    one that they meet at as well. torchrun would give up after 60 s where that one is late. And
    whether the others meet here, if torchrun wouldn't see it."""
    if ranks.machines == 1:
        return []
    from meshwright.datasets.cached_source import CachedSource  # not at the top: see `run`

    tokens = sum(source.cache.num_tokens for source in sources if isinstance(source, CachedSource))
    seconds = MEET_WITHIN_S + math.ceil(tokens / (TOKENS_PER_CORE_S * count_cores()))
    here = ",is_host=1" if place.is_host else ""
    return ["--rdzv-conf", f"join_timeout={seconds},read_timeout={seconds}{here}"]


NUMA_NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")
FACTS = ("vendor", "class", "numa_node")
GPU = re.compile(r"0x(10de|1002)\s+0x(03|12)")
"""Vendor and class of a PCI device: a display or an accelerator, of NVIDIA or AMD."""


def _numa_binding(ranks: Ranks) -> list[str]:
    """Return torchrun's option that keeps each rank on the cores next to its GPU.

    It needs numactl, and ends a job whose cores it may not use: so only on a whole machine.
    """
    has_nodes = len(list(NUMA_NODES.glob("node[0-9]*"))) > 1
    is_whole = len(os.sched_getaffinity(0)) == os.cpu_count()
    numactl = shutil.which("numactl")
    # virtual nodes say -1, which torch takes for the first node, for all ranks (2.13)
    devices = [[text_of(path / name) for name in FACTS] for path in PCI_DEVICES.glob("*")]
    gpus = [node for vendor, kind, node in devices if GPU.match(f"{vendor} {kind}")]
    is_known = bool(gpus) and all(node.strip().isdecimal() for node in gpus)
    if not (ranks.gpus and has_nodes and is_known and is_whole and numactl):
        return []
    # a container may not let it bind
    tried = subprocess.run([numactl, "--physcpubind=0", "true"], capture_output=True, check=False)
    return ["--numa-binding", "node"] if tried.returncode == 0 else []


def _log_ranks(given: Namespace, ranks: Ranks) -> str:
    """Return the ranks of this machine whose log the console shows."""
    shown: str = given.log_rank or os.environ.get("LOG_RANK") or "0"
    chosen = shown.replace(",", " ").split()
    if not chosen or not all(r.isdecimal() and int(r) < ranks.per_machine for r in chosen):
        last = ranks.per_machine - 1
        raise ConfigError("", f"LOG_RANK = {shown}: must be ranks from 0 to {last}")
    return ",".join(chosen)


def _overrides(given: Namespace) -> list[str]:
    words = []
    for key, value in given.overrides.items():
        name = f"--{'.'.join(key)}"
        words += [f"{name}={value}"] if value.startswith("-") else [name, value]
    return words
