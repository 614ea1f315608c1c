"""Meshes and modes that a search tries, and the TOML that one of them is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import tomli_w

from meshwright.commands.plan.devices import Device
from meshwright.commands.plan.simulate import plan_job
from meshwright.config.job_config import JobConfig, Update, changed, is_compiled
from meshwright.parallelisms.rules.compile_choice import resolve_compile
from meshwright.parallelisms.rules.stages import SCHEDULES
from meshwright.system.errors import ConfigError
from meshwright.train.preflight import Plan

MODES = ("none", "selective", "full")
"""Of recomputation, the fastest first; each keeps less than the one before it."""


LONG = 16384
"""Tokens of a sequence from which context parallelism is tried."""


RANKS_OF_A_COPY = 64
"""With more ranks, copies of so many are tried (HSDP)."""


CHOSEN = {
    "parallelism": (
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "tensor_parallel_degree",
        "context_parallel_degree",
        "pipeline_parallel_degree",
        "pipeline_parallel_schedule",
        "pipeline_parallel_stages_per_rank",
        "module_fqns_per_model_part",
        "fsdp_reshard_after_forward",
    ),
    "activation_checkpoint": ("mode",),
    "training": ("local_batch_size", "global_batch_size"),
}
"""Keys that a search sets."""


@dataclass(frozen=True)
class Mesh:
    """Degrees, and how a pipeline and its microbatches run."""

    tensor: int
    context: int
    pipeline: int
    copies: int
    schedule: str
    """Empty without a pipeline."""
    local_batch_size: int


@dataclass(frozen=True)
class Choice:
    """A mesh with its modes."""

    mesh: Mesh
    mode: str
    """Of recomputation."""
    keeps_gathered: bool
    """Gathered parameters stay from forward to backward."""

    @property
    def speed(self) -> tuple[int, int]:
        """Rank in each mode, the fastest first: of two choices of one mesh, the one that is not
        later in either takes at most as much time, and at least as much memory."""
        return MODES.index(self.mode), int(not self.keeps_gathered)

    def is_slower(self, other: Choice) -> bool:
        """Return whether `other`, on the same mesh, does the same with less work."""
        mine, theirs = self.speed, other.speed
        return mine != theirs and mine[0] >= theirs[0] and mine[1] >= theirs[1]

    def update(self, global_batch_size: int) -> Update:
        """Return the keys to change."""
        mesh = self.mesh
        parallelism: dict[str, Any] = {
            "tensor_parallel_degree": mesh.tensor,
            "context_parallel_degree": mesh.context,
            "pipeline_parallel_degree": mesh.pipeline,
            "data_parallel_replicate_degree": mesh.copies,
            "data_parallel_shard_degree": -1,
            "pipeline_parallel_stages_per_rank": -1,
            "module_fqns_per_model_part": [],
            "fsdp_reshard_after_forward": self._policy(),
        }
        if mesh.schedule:
            parallelism["pipeline_parallel_schedule"] = mesh.schedule
        sizes = {"local_batch_size": mesh.local_batch_size, "global_batch_size": global_batch_size}
        return {
            "parallelism": parallelism,
            "activation_checkpoint": {"mode": self.mode},
            "training": sizes,
        }

    def _policy(self) -> str:
        """ "default" keeps gathered parameters in a pipeline, and frees them without one."""
        if self.keeps_gathered == (self.mesh.pipeline > 1):
            return "default"
        return "never" if self.keeps_gathered else "always"

    @property
    def words(self) -> str:
        """It in short."""
        mesh = self.mesh
        axes = {"tp": mesh.tensor, "cp": mesh.context, "pp": mesh.pipeline, "copies": mesh.copies}
        names = [f"{axis} {size}" for axis, size in axes.items() if size > 1] or ["FSDP alone"]
        if mesh.schedule:
            names.append(mesh.schedule)
        kept = ", gathered parameters kept" * self.keeps_gathered
        return (
            f"{', '.join(names)}; microbatch {mesh.local_batch_size}; "
            f"recomputation {self.mode}{kept}"
        )


def legal(config: JobConfig, ranks: int, device: Device) -> Iterator[tuple[Choice, Plan]]:
    """Yield every choice that preflight's checks let pass, with its plan.

    The global batch stays the config's, so more tokens per second are a shorter step.
    """
    plan = plan_job(config, ranks, is_gpu=device.is_gpu)
    batch = plan.config.training.global_batch_size
    whole = changed(config, {"training": {"global_batch_size": batch}})
    config, _ = resolve_compile(whole, plan.model_args, plan.fp32_modules, is_gpu=device.is_gpu)
    for mesh in _meshes(config, ranks, device):
        for mode, keeps in product(MODES, (True, False)):
            choice = Choice(mesh, mode, keeps)
            try:
                candidate = changed(config, choice.update(batch))
                yield choice, plan_job(candidate, ranks, is_gpu=device.is_gpu)
            except ConfigError:
                continue


def _meshes(config: JobConfig, ranks: int, device: Device) -> Iterator[Mesh]:
    """Yield powers of two: tensor parallelism within a node, pipelines of up to 16 ranks."""
    powers = [1 << i for i in range(ranks.bit_length())]
    tensor = [n for n in powers if n <= min(device.per_node, ranks, 8)]
    context = [n for n in powers if n <= 8] if config.training.seq_len >= LONG else [1]
    pipeline = [n for n in powers if n <= 16]
    copies = sorted({1, max(1, ranks // RANKS_OF_A_COPY)})
    local = sorted({1, 2, 4, config.training.local_batch_size})
    for tp, cp, pp, replicas, size in product(tensor, context, pipeline, copies, local):
        if ranks % (tp * cp * pp * replicas) == 0:
            for schedule in _schedules(config) if pp > 1 else [""]:
                yield Mesh(tp, cp, pp, replicas, schedule, size)


def _schedules(config: JobConfig) -> list[str]:
    """Return the schedules to try. GPipe waits as long as 1F1B and keeps more. A plan leaves
    compilation out, which schedules that split backward do not allow."""
    names = ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
    is_split_refused = is_compiled(config.compile)
    return [name for name in names if not (is_split_refused and SCHEDULES[name].splits_backward)]


def difference(old: JobConfig, new: JobConfig) -> str:
    """Return the chosen keys in which `new` differs from `old`, as TOML."""
    sections: dict[str, dict[str, Any]] = {}
    for name, keys in CHOSEN.items():
        before, after = getattr(old, name), getattr(new, name)
        for key in keys:
            if getattr(before, key) != getattr(after, key):
                sections.setdefault(name, {})[key] = getattr(after, key)
    return tomli_w.dumps(sections)
