"""Planned bytes beside those of torch's allocator, for many jobs.

python -m tests.helpers.planning [CASE ...]      prints a line of JSON for each: [case, figures]

The real run is one process with real tensors under the fake process group, and without the ledger.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.commands.plan import torch_names
from meshwright.commands.plan.figures import Memory, flops, traffic
from meshwright.commands.plan.simulate import (
    Simulation,
    eager_trainer,
    make_batches,
    plan_job,
    simulate,
)
from meshwright.config.loader import load_config
from meshwright.parallelisms.meshes import build_meshes
from meshwright.parallelisms.rules.degrees import KEYS
from meshwright.system.processes import in_processes
from meshwright.train.bad_steps import BadStepDetector
from meshwright.train.resolve import ResolvedJob

BASE = {
    "job.config_file": "train_configs/debug_model.toml",
    "training.mixed_precision_param": "bfloat16",
    "training.local_batch_size": 2,
    "training.seq_len": 128,
    "model.args.n_layers": 4,
    "model.args.dim": 128,
    "model.args.vocab_size": 1024,
    "parallelism.fsdp_cpu_backend": "gloo",  # shared memory is not of torch's allocator
}
STEPS = "steps 1 and 2"


@dataclass(frozen=True)
class Case:
    """One rank of a job."""

    mesh: str = ""
    """Axes above 1, e.g. "dp_shard 2, tp 2"."""
    options: str = ""
    """Command line."""
    rank: int = 0
    microbatches: int = 1
    imbalance: float = 1.0

    @property
    def sizes(self) -> dict[str, int]:
        """Degree of each axis."""
        pairs = (part.split() for part in self.mesh.split(", ") if part)
        return {"dp_shard": 1, "pp": 1} | {axis: int(size) for axis, size in pairs}

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return math.prod(self.sizes.values())

    def plan(self) -> ResolvedJob:
        """The job, checked."""
        values: dict[str, object] = dict(BASE)
        values |= {f"parallelism.{KEYS[axis]}": size for axis, size in self.sizes.items()}
        values |= (word.removeprefix("--").split("=", 1) for word in self.options.split())
        dp = self.sizes["dp_shard"] * self.sizes.get("dp_replicate", 1)
        batch = int(str(values["training.local_batch_size"])) * dp * self.microbatches
        values["training.global_batch_size"] = batch
        config = load_config([f"--{key}={value}" for key, value in values.items()])
        return plan_job(config, self.world_size, is_gpu=False)


AC = "--activation_checkpoint.mode="
REDUCE = "--parallelism.fsdp_reduce_gradients="
SCHEDULE = "--parallelism.pipeline_parallel_schedule="
CASES = {
    "one rank": Case(),
    "one rank, fp32": Case("", "--training.mixed_precision_param=float32"),
    "FSDP 2": Case("dp_shard 2"),
    "FSDP 4": Case("dp_shard 4"),
    "FSDP 4, last rank": Case("dp_shard 4", rank=3),
    "HSDP 2 x 2": Case("dp_replicate 2, dp_shard 2"),
    "TP 2": Case("tp 2"),
    "FSDP 2 x TP 2": Case("dp_shard 2, tp 2"),
    "CP 2": Case("cp 2", rank=1),
    "full": Case("dp_shard 2", f"{AC}full"),
    "selective by op": Case("dp_shard 2", f"{AC}selective"),
    "selective, every 2nd": Case(
        "dp_shard 2", f"{AC}selective --activation_checkpoint.selective_ac_option=2"
    ),
    "tied": Case("dp_shard 2", "--model.args.tie_embeddings=true"),
    "frozen": Case("dp_shard 2", '--model.frozen=["tok_embeddings.*","layers.0.*"]'),
    "early step": Case(
        "dp_shard 2", "--optimizer.early_step_in_backward=true --training.max_norm=inf"
    ),
    "muon and a mean": Case(
        "dp_shard 2, tp 2",
        "--optimizer.name=muon --checkpoint.enable=true --checkpoint.average.decay=0.9",
    ),
    "fp32 modules": Case("dp_shard 2", '--training.fp32_modules=["output","layers.*.ffn_norm"]'),
    "uneven": Case("dp_shard 4", "--model.args.hidden_dim=330"),
    "documents": Case("dp_shard 2", "--training.mask_documents=true"),
    "accumulation, reduced once": Case("dp_shard 2", f"{REDUCE}last_microbatch", microbatches=5),
    "accumulation, reduced each": Case("dp_shard 2", f"{REDUCE}every_microbatch", microbatches=5),
    "reshard never": Case(
        "dp_shard 2", "--parallelism.fsdp_reshard_after_forward=never", microbatches=3
    ),
    "3D": Case("pp 2, dp_shard 2, tp 2", microbatches=4),
    "1F1B, first stage": Case("pp 2, dp_shard 2", microbatches=4),
    "1F1B, last stage": Case("pp 2, dp_shard 2", rank=2, microbatches=4),
    "1F1B, a long step": Case("pp 2, dp_shard 2", microbatches=9),
    "1F1B of 4, a long step": Case("pp 4", microbatches=12),
    "GPipe": Case("pp 2, dp_shard 2", f"{SCHEDULE}GPipe", microbatches=4),
    "Interleaved1F1B": Case("pp 2, dp_shard 2", f"{SCHEDULE}Interleaved1F1B", microbatches=4),
    "Interleaved1F1B, a long step": Case(
        "pp 2, dp_shard 2", f"{SCHEDULE}Interleaved1F1B", microbatches=10
    ),
    "InterleavedZeroBubble": Case(
        "pp 2, dp_shard 2", f"{SCHEDULE}InterleavedZeroBubble", microbatches=4
    ),
    "ZBVZeroBubble": Case("pp 2, dp_shard 2", f"{SCHEDULE}ZBVZeroBubble", microbatches=4),
    "DualPipeV": Case("pp 2, dp_shard 2", f"{SCHEDULE}DualPipeV", microbatches=4),
}

OF_EXPERTS = "--model.name=qwen3_moe --parallelism.expert_parallel_degree=2"
"""Of 16 experts each token takes 4: all of them on one of two ranks, if it is unlucky."""


def allocated(case: Case) -> int:
    """Return the most bytes that torch's allocator has given at once, in steps 1 and 2."""
    plan = case.plan()
    torch_names.start_fake_process_group(case.rank, case.world_size)
    meshes = build_meshes(plan.dims, "cpu")
    with (
        torch_names.static_pipelines(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        trainer = eager_trainer(plan, meshes, nullcontext())
        batches = make_batches(plan, plan.config.num_microbatches)
        detector = BadStepDetector(torch.device("cpu"), plan.config.bad_steps)
        with record_function(STEPS):
            for step in (1, 2):
                trainer.step(step, batches, detector)
    dist.destroy_process_group()
    events = profiler.profiler.kineto_results.events()
    begin = next(event.start_ns() for event in events if event.name() == STEPS)
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    total = peak = 0
    for at, num_bytes in changes:
        total += num_bytes
        if at >= begin:
            peak = max(peak, total)
    return peak


def planned(case: Case) -> dict[str, object]:
    """Return the plan's peak and its ledger."""
    plan = case.plan()
    found = simulate(plan, case.rank, is_gpu=False, imbalance=case.imbalance)
    peak = Memory(found.record).peak
    return {
        "planned": peak.num_bytes,
        "by_purpose": peak.by_purpose,
        "module": peak.module,
        "traffic": [asdict(row) for row in traffic(found, ranks_per_node=8)],
        "flops": flops(found),
        "operators": operators(found),
    }


def operators(found: Simulation) -> dict[str, int]:
    """Return how many there are of each kind."""
    kinds = (f"{one.name} {one.dtype}" for one in found.entries if not one.axis)
    return dict(Counter(kinds))


def figures(name: str, what: str) -> dict[str, object]:
    """Return one of the two, in a process of its own."""
    torch.set_num_threads(1)
    try:
        if what == "planned":
            return planned(CASES[name])
        return {"allocated": allocated(CASES[name])}
    except Exception:
        return {"error": traceback.format_exc()}


def main() -> None:
    """Print the figures of all cases, or of those that the command line names."""
    names = sys.argv[1:] or list(CASES)
    tasks = [(name, what) for name in names for what in ("planned", "allocated")]
    found: dict[str, dict[str, object]] = {name: {} for name in names}
    for (name, _), result in zip(tasks, in_processes(tasks, figures, 2), strict=True):
        found[name] |= result
    for pair in found.items():
        print(json.dumps(pair), flush=True)


if __name__ == "__main__":
    main()
