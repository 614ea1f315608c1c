"""The sections `parallelism`, `activation_checkpoint`, `compile`, `float8` and `comm` of a TOML."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveInt
from pydantic_core import PydanticCustomError

from meshwright.config.section import OrFilledIn, Section


class Parallelism(Section):
    """[parallelism] Degrees of the mesh; their product is the number of ranks."""

    data_parallel_replicate_degree: PositiveInt = 1
    """Replicas of the sharded model (HSDP when above 1)."""

    data_parallel_shard_degree: OrFilledIn = -1
    """Ranks that share one replica's parameters (FSDP2). -1: all other ranks."""

    tensor_parallel_degree: PositiveInt = 1
    """Ranks that share every matrix, and the sequence between matmuls; best within a node."""

    enable_async_tensor_parallel: bool = False
    """With tensor parallelism on GPUs that reach each other's memory, compiled by inductor: split
    collectives and their matmuls into pieces that overlap."""

    context_parallel_degree: PositiveInt = 1
    """Ranks that share each sequence; for sequences whose activations don't fit one device."""

    expert_parallel_degree: PositiveInt = 1
    """Ranks that share the experts of each layer; tokens travel to theirs and back. Not a factor of
    the number of ranks: it divides data_parallel_shard x context_parallel x tensor_parallel, and
    FSDP2 shards experts over the rest of these."""

    pipeline_parallel_degree: PositiveInt = 1
    """Ranks that share the layers; microbatches travel through them."""

    pipeline_parallel_schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """In which order a rank computes its microbatches, forward and backward. GPipe and the
    schedules with a split backward (InterleavedZeroBubble, ZBVZeroBubble, DualPipeV) keep the
    gradient of the output's weight for every microbatch in flight, 4 bytes x vocabulary x width
    each. The last three can't be compiled."""

    pipeline_parallel_stages_per_rank: OrFilledIn = -1
    """Pieces of the model on each rank of the pipeline. -1: the fewest that the schedule takes."""

    module_fqns_per_model_part: list[list[str]] = []
    """Modules of each stage, e.g. [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]].
    Absent: layers are dealt out so that stages are even in parameters."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free a block's gathered parameters between forward and backward. default: all but the last
    block, whose backward comes next; with a pipeline none, because every microbatch would gather
    them again. never: they are gathered once per step, and stay until its last microbatch."""

    fsdp_prefetch_layers: PositiveInt = 1
    """Layers whose parameters are gathered ahead of the layer that computes. More layers hide a
    slow network, and each costs its memory. 1: FSDP2's own prefetching."""

    fsdp_cpu_backend: Literal["auto", "gloo"] = "auto"
    """How CPU ranks exchange FSDP2's tensors. auto: through memory that they share, if they are on
    one machine; otherwise by gloo. Sums over three ranks or more may differ in the last bit."""

    fsdp_reduce_gradients: Literal["auto", "last_microbatch", "every_microbatch"] = "auto"
    """When gradients are reduce-scattered. last_microbatch: once per step. It is the fastest, and
    until then each rank keeps unsharded gradients in `mixed_precision_reduce`. every_microbatch:
    less memory, more communication; each rank keeps its shard's sum in `training.dtype`, so
    bfloat16 weights can't use it for several microbatches unless there are replicas (HSDP), which
    add up once per step, in `mixed_precision_reduce`. auto: every_microbatch if unsharded gradients
    would be summed in bfloat16, or need more than a quarter of the memory that weights and
    optimizer leave of a device (`job.device_memory_gib`, or 80 GiB). last_microbatch otherwise, and
    always with one microbatch, a pipeline, `optimizer.early_step_in_backward` or bfloat16
    weights."""

    @property
    def keeps_gathered(self) -> bool:
        """Whether blocks keep their gathered parameters from forward to backward."""
        policy = self.fsdp_reshard_after_forward
        return policy == "never" or (policy == "default" and self.pipeline_parallel_degree > 1)


SAVED_OPS = [
    "aten.mm",
    "aten._scaled_mm",
    "aten.amax",
    "aten.max",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "meshwright.cpu_attention",
    "meshwright.grouped_matmul",
    "meshwright.choose_experts",
    "meshwright.exchange_counts",
    "higher_order.flex_attention",
    "higher_order.inductor_compiled_code",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_to_all_single",
]


class ActivationCheckpoint(Section):
    """[activation_checkpoint] Activations that backward recomputes instead of keeping them."""

    mode: Literal["none", "full", "selective", "memory_budget"] = "none"
    """Activations that backward computes again. none: none, the fastest. full: every block, the
    least memory. selective: between the two (`selective_ac_option`). memory_budget: the compiler
    chooses the cheapest. It needs compilation, so not with `compile.enable` = false."""

    selective_ac_option: Annotated[str, Field(pattern=r"^(op|[1-9][0-9]*)$")] = "op"
    """With mode = selective: "op" keeps the outputs of `saved_ops` and recomputes the rest; a
    number n recomputes every n-th block whole."""

    saved_ops: list[Annotated[str, Field(pattern=r"^\w+\.\w+$")]] = SAVED_OPS
    """Operators of torch.ops whose outputs selective "op" keeps, because they take long for the
    memory that they need. Norms and pointwise steps are cheap. "aten.amax" and "aten.max" give the
    scales of float8. "higher_order" holds flex attention, of compiled and of eager blocks;
    "_c10d_functional" holds collectives."""

    memory_budget: Annotated[float, Field(ge=0, le=1)] = 0.5
    """With mode = memory_budget: the share kept of a compiled block's usual activations.
    1: as without recomputation; 0: as with full."""

    @property
    def saves_by_op(self) -> bool:
        """Whether the outputs of `saved_ops` are kept."""
        return self.mode == "selective" and self.selective_ac_option == "op"


def _check_bool_or_auto(value: object) -> object:
    """Reject other values with one error: pydantic would give one for each type of the union."""
    if not (isinstance(value, bool) or value == "auto"):
        raise PydanticCustomError("bool_or_auto", 'must be true, false or "auto"')
    return value


class Compile(Section):
    """[compile] torch.compile, block by block."""

    enable: Annotated[bool | Literal["auto"], BeforeValidator(_check_bool_or_auto)] = "auto"
    """Compile every block, for faster steps; one graph serves all of them. The first step then
    takes longer. auto: if an option needs it, on GPUs, and on CPUs from 500 steps on, if a C++
    compiler is there and no option is incompatible; the log says why."""

    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """Backend of torch.compile; all but inductor are for finding faults."""

    cpu_attention: Literal["auto", "torch"] = "auto"
    """Causal attention on CPUs. auto: our kernel in C++, if the job is compiled, attention has no
    masks, and every rank has a C++ compiler and AMX or AVX512-BF16 (for float32: AVX2); otherwise
    torch's. torch: torch's."""

    @property
    def is_on(self) -> bool:
        """Whether blocks are compiled; of a config that `resolve` has resolved."""
        assert isinstance(self.enable, bool), "compile.enable is not resolved"  # "auto" is truthy
        return self.enable


class Float8(Section):
    """[float8] Matrix products of the blocks in 8 bits, forward and backward, by torchao (pip
    install 'meshwright[float8]'). On GPUs of compute capability 8.9 or newer; best compiled."""

    enable: bool = False
    """Multiply in float8. Weights, gradients, optimizer and all other layers, the output among
    them, stay as they are."""

    recipe_name: Literal["rowwise", "tensorwise"] = "rowwise"
    """rowwise: each row and column that is multiplied has a scale, a power of two, so that the
    model doesn't depend on the mesh beyond rounding. tensorwise: one scale for a tensor, and FSDP2
    gathers weights in float8. It is faster. A weight's scale is of the full weight on every mesh,
    but a token's result depends on the other tokens of its microbatch, so on the mesh and on
    `training.local_batch_size`."""

    filter_fqns: list[str] = ["attention.wk", "attention.wv"]
    """Parts of names of layers that stay in `training.mixed_precision_param`. The default ones, the
    projections of keys and values, are small in models with grouped heads: casts would cost more
    than they gain."""

    emulate: bool = False
    """Round to float8, but multiply in fp32: on any device, and slow. For tests and proofs."""


class Comm(Section):
    """[comm] Limits on collectives."""

    init_timeout_seconds: PositiveInt = 300
    """Seconds that a collective may take, up to the end of the first step, compilation included."""

    train_timeout_seconds: PositiveInt = 100
    """Seconds that a collective may take after that, or that a rank may be stopped. Then the job
    ends with exit code 6, and reports the rank that the others wait for."""
