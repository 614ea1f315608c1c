"""The jobs that are simulated: meshes, and what a config can switch on."""

import math
import tempfile
from dataclasses import dataclass

from meshwright.parallelisms.rules.degrees import KEYS


@dataclass(frozen=True)
class Case:
    """One rank of a job."""

    mesh: dict[str, int]
    """Degrees of the axes above 1."""
    options: tuple[str, ...] = ()
    """Command line."""
    rank: int = 0
    microbatches: int = 1
    is_saved: bool = False
    """Copied for an asynchronous checkpoint before the step that is looked at."""
    is_faulty: bool = False
    """With faults that have to be noticed."""

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def words(self) -> list[str]:
        """Command line of the job."""
        degrees = {"dp_shard": 1} | self.mesh
        axes = [f"--parallelism.{KEYS[axis]}={degree}" for axis, degree in degrees.items()]
        dp = degrees["dp_shard"] * degrees.get("dp_replicate", 1)
        batch = LOCAL_BATCH * dp * self.microbatches
        is_bf16 = not any(option.startswith(PRECISION) for option in self.options)
        return [
            *(*BASE, *axes, f"--training.global_batch_size={batch}"),
            *([f"{PRECISION}=bfloat16"] * is_bf16),
            *self.options,
        ]


LOCAL_BATCH, SEQ_LEN = 2, 2048
PRECISION = "--training.mixed_precision_param"
BASE = (
    f"--job.dump_folder={tempfile.gettempdir()}",  # the checkout may be read-only
    *("--job.config_file=train_configs/debug_model.toml", "--checkpoint.enable=false"),
    *(f"--training.local_batch_size={LOCAL_BATCH}", f"--training.seq_len={SEQ_LEN}"),
    *("--validation.enable=false", "--compile.enable=false"),
    "--model.args.n_layers=2",
)


def _checkpointed(mode: str, option: str = "op") -> tuple[str, ...]:
    return (
        f"--activation_checkpoint.mode={mode}",
        f"--activation_checkpoint.selective_ac_option={option}",
    )


FP32 = (f"{PRECISION}=float32",)
DOCUMENTS = ("--training.mask_documents=true",)
EXPERTS = ("--model.name=qwen3_moe",)
EP = ("--parallelism.expert_parallel_degree=4",)
TENSORWISE = ("--float8.enable=true", "--float8.recipe_name=tensorwise")
SINKS = ("--model.name=gpt_oss",)
"""And windows; both are flex attention's on GPUs."""

ONE_GPU = {
    "one GPU": Case({}),
    "one GPU, fp32": Case({}, FP32),
    "one GPU, full recomputation": Case({}, _checkpointed("full")),
}
"""Whose memory `tests/gpu` compares with a real GPU's."""

CASES = ONE_GPU | {
    "FSDP 8": Case({"dp_shard": 8}),
    "one GPU, float8 tensorwise": Case({}, TENSORWISE),
    "FSDP 8, float8 tensorwise": Case({"dp_shard": 8}, TENSORWISE),
    "FSDP 4 x TP 2, float8 tensorwise": Case({"dp_shard": 4, "tp": 2}, TENSORWISE),
    "FSDP 8, accumulation": Case({"dp_shard": 8}, microbatches=2),
    "FSDP 8, every microbatch reduced": Case(
        {"dp_shard": 8}, ("--parallelism.fsdp_reduce_gradients=every_microbatch",), microbatches=2
    ),
    "FSDP 8, selective by op": Case({"dp_shard": 8}, _checkpointed("selective")),
    "FSDP 8, CPU offload": Case({"dp_shard": 8}, ("--training.enable_cpu_offload=true",)),
    "FSDP 8, documents": Case({"dp_shard": 8}, DOCUMENTS),
    "FSDP 8, documents, selective by op": Case(
        {"dp_shard": 8}, (*DOCUMENTS, *_checkpointed("selective"))
    ),
    "FSDP 8, saved in the background": Case({"dp_shard": 8}, is_saved=True),
    "FSDP 8, optimizer in backward, saved": Case(
        {"dp_shard": 8},
        ("--optimizer.early_step_in_backward=true", "--training.max_norm=inf"),
        is_saved=True,
    ),
    "HSDP 2 x 4": Case({"dp_replicate": 2, "dp_shard": 4}),
    "FSDP 4 x TP 2": Case({"dp_shard": 4, "tp": 2}),
    "FSDP 4 x TP 2, full recomputation": Case({"dp_shard": 4, "tp": 2}, _checkpointed("full")),
    "FSDP 4 x TP 2, selective by op": Case({"dp_shard": 4, "tp": 2}, _checkpointed("selective")),
    "CP 4": Case({"dp_shard": 2, "cp": 4}, rank=1),
    "CP 4, fp32": Case({"dp_shard": 2, "cp": 4}, FP32, rank=1),
    "CP 4, heads of 30": Case({"dp_shard": 2, "cp": 4}, ("--model.args.dim=240",), rank=1),
    "CP 4, documents": Case({"dp_shard": 2, "cp": 4}, DOCUMENTS, rank=1),
    "PP 2 x FSDP 2, first rank": Case({"pp": 2, "dp_shard": 2}, microbatches=4),
    "one GPU, experts": Case({}, EXPERTS),
    "FSDP 8, EP 4": Case({"dp_shard": 8}, (*EXPERTS, *EP)),
    "FSDP 8, EP 4, full recomputation": Case(
        {"dp_shard": 8}, (*EXPERTS, *EP, *_checkpointed("full"))
    ),
    "FSDP 8, EP 4, selective by op": Case(
        {"dp_shard": 8}, (*EXPERTS, *EP, *_checkpointed("selective"))
    ),
    "one GPU, sinks": Case({}, SINKS),
    "FSDP 4 x TP 2, sinks and documents": Case({"dp_shard": 4, "tp": 2}, (*SINKS, *DOCUMENTS)),
    "CP 4, sinks": Case({"dp_shard": 2, "cp": 4}, SINKS, rank=1),
    "one GPU, with faults": Case({}, is_faulty=True),
    "PP 2 x FSDP 2 x TP 2, last rank": Case(
        {"pp": 2, "dp_shard": 2, "tp": 2}, rank=7, microbatches=4
    ),
}

COMPILED = {
    name: CASES[name]
    for name in (
        *("one GPU", "one GPU, fp32", "one GPU, full recomputation", "one GPU, experts"),
        *("FSDP 8, documents, selective by op", "FSDP 4 x TP 2, full recomputation"),
        *("CP 4", "CP 4, documents", "FSDP 8, EP 4"),
        *("one GPU, sinks", "FSDP 4 x TP 2, sinks and documents", "CP 4, sinks"),
        *("one GPU, float8 tensorwise", "FSDP 8, float8 tensorwise"),
    )
} | {
    "FSDP 8, memory budget": Case({"dp_shard": 8}, _checkpointed("memory_budget")),
    "FSDP 8, float8": Case({"dp_shard": 8}, ("--float8.enable=true",)),
    "one GPU, float8": Case({}, ("--float8.enable=true",)),
}
"""Whose blocks are compiled for an H100."""
