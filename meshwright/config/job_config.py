"""Every key of the TOML: its type, bounds, default and documentation. Nothing else lives here.

Sections and keys have torchtitan 0.2's names wherever the meaning is the same.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)
from pydantic_core import PydanticCustomError

from meshwright.families import FIRST

ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def check_is_path(value: str) -> str:
    """Refuse an address: taken for a path, "s3://bucket" is a folder called "s3:"."""
    if match := ADDRESS.match(value):
        raise ValueError(
            f"{match[0]} begins an address, and a path of this machine's file systems is needed"
            "\n  fix: "
            + (
                "leave out file://"
                if match[1].lower() == "file"
                else "mount it as a file system, or copy it, and name the path"
            )
        )
    return value


LOCAL_PATH = "local path"
LocalPath = Annotated[str, AfterValidator(check_is_path), LOCAL_PATH]

INPUT_PATH = "input path"
InputPath = Annotated[LocalPath, INPUT_PATH]
"""A path that the job reads. Relative in a TOML: to that TOML's folder; on the command line: to
the working directory. The loader makes it absolute."""

BYTES = "bytes"
"""Stands where a tokenizer's path would, for the one that has no file."""

MODULE_OBJECT = re.compile(r"[A-Za-z_][\w.]*(?<!\.py):\w+")
"""`package.module:function` stands where a path to a Python file and its function would."""

PATH_OR_NAME = "path or name"
"""Marks an `InputPath` that may be a name instead: without a slash, and without .py at its end."""

OUTPUT_PATH = "output path"

OrFilledIn = Annotated[int, Field(ge=-1)]
"""A positive number, or -1 for the one that follows from the rest of the config (0 is refused
where it is filled in)."""


class Section(BaseModel):
    """A TOML table: no key is ignored, no type is guessed, nothing changes after it is read."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_fits(cls, value: object) -> object:
        """Refuse a number that TOML has not: tensors and files hold 64 bits."""
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError("must be a number of 64 bits, so below 2^63")
        return value


class Job(Section):
    """[job] This run, and where its output goes."""

    config_file: InputPath = ""
    """TOML to read (command line only)."""

    dump_folder: Annotated[LocalPath, Field(min_length=1), OUTPUT_PATH] = "./outputs"
    """Folder for checkpoints, logs, metrics and the resolved config; relative to the working
    directory. Starting again in the same folder resumes if `checkpoint.enable`; otherwise it starts
    over, and metrics.jsonl with it."""

    description: str = ""
    """Free text, repeated in the log."""

    device_memory_gib: NonNegativeFloat = 0
    """Memory of one GPU in GiB. With it, a job that surely does not fit is refused before it
    starts, and `parallelism.fsdp_reduce_gradients` = auto takes it into account. 0: not known; each
    rank then compares the GPU that it finds."""

    max_run_seconds: NonNegativeInt = 0
    """Seconds from the first step after which the job saves and exits with code 75; started again,
    it resumes. Leave time for the save. 0: no limit."""


class Model(Section):
    """[model] Which model, how large, and its tokenizer."""

    name: str = FIRST
    """Model family; a wrong name lists them all. `experimental.custom_import` may add one."""

    flavor: Annotated[InputPath, PATH_OR_NAME] = "debugmodel"
    """Size, from the family's table (a wrong one lists them all). Or a model folder of Hugging
    Face, as a path with a slash in it: its config.json gives the dimensions and, if `name` is
    absent, the family; its tokenizer is taken unless `tokenizer_path` is given, and its weights if
    `checkpoint.initial_load_in_hf`."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Dimensions that differ from the flavor's: dim, n_layers, n_heads, n_kv_heads, head_dim,
    hidden_dim, vocab_size, norm_eps, rope_theta, tie_embeddings, and those of the family. On the
    command line: --model.args.n_layers 4."""

    frozen: list[str] = []
    """Parameters that are not trained, as glob patterns of their names: "tok_embeddings.*",
    "layers.[01].*", "*norm.weight"."""

    tokenizer_path: InputPath = ""
    """Hugging Face's `tokenizer.json`, a `tokenizer.model` of sentencepiece or tiktoken, or a
    folder with one; or "bytes" for UTF-8 bytes as tokens (vocabulary 258), which needs no file."""

    chat_template_path: InputPath = ""
    """Jinja file that makes text of conversations. Absent: the tokenizer's own."""


class Source(Section):
    """Where text comes from: the same keys for training, for validation, and in a mixture."""

    dataset: str = "python_stdlib"
    """text, json, parquet, arrow: local files of texts. megatron, tokens: local files of token ids
    (.bin with .idx of Megatron-LM; .npy or .bin of OLMo, nanoGPT or llm.c). c4, fineweb,
    fineweb-edu, slimpajama, or any "owner/name": of the Hugging Face hub. python_stdlib: the
    library of the running Python, for trying."""

    dataset_path: InputPath = ""
    """File, folder or glob for local data; for a named dataset a local copy of it."""

    dataset_subset: str = ""
    """Configuration of a dataset of the hub, e.g. "en" or "sample-10BT". Absent: the usual one."""

    dataset_revision: str = ""
    """Commit, tag or branch of a dataset of the hub. Absent: the newest when the job starts; the
    log and its checkpoints name the commit."""

    dataset_split: str = "train"
    """Part of a dataset of the hub; of python_stdlib "train", or "validation": every 20th file."""

    dataset_column: str = "text"
    """Column that holds the text, or a conversation: a list of {role, content}, of which only the
    assistant's tokens count in the loss."""

    dataset_format: Annotated[InputPath, PATH_OR_NAME] = ""
    """How a row becomes a conversation or a text, instead of a column: "alpaca", "sharegpt",
    "messages"; or a function of yours from a row (a dict), "package.module:function" or
    "path/to/file.py:function"."""

    dataset_mode: Literal["auto", "cached", "streamed"] = "auto"
    """cached: tokenised once, into files that every later job maps into memory; any sample can be
    read, and all are shuffled. streamed: tokenised as it is read, for data too large to be
    tokenised first. auto: streamed for datasets of the hub, otherwise cached."""


class NamedSource(Source):
    """[[validation.datasets]] One of several."""

    name: str = ""
    """Its name in figures. Absent: the dataset's name."""


class WeightedSource(NamedSource):
    """[[training.datasets]] One part of a mixture."""

    weight: PositiveFloat | None = None
    """Its share of all samples is its weight over the sum of weights."""

    tokens: PositiveInt | None = None
    """Tokens to take from it in the whole job, instead of a weight."""


class Training(Source):
    """[training] Data, batch, length and precision."""

    datasets: list[WeightedSource] = []
    """A mixture, instead of `dataset` and its keys: tables [[training.datasets]], each with the
    keys of a dataset, `name` (in figures), and `weight` (its share) or `tokens` (to take from it in
    the whole job). At any moment the samples drawn from each are within one of its share."""

    max_epochs: NonNegativeInt = 0
    """Times that any source may be read through; training ends on all ranks before the step that
    would need more. 0: no limit."""

    mask_documents: bool = False
    """Keep the documents in a sequence apart: attention stays inside each, positions start anew,
    and the loss leaves out the first token of each."""

    max_bad_records: NonNegativeInt = 0
    """Records of streamed sources (a line that is no JSON, a row without its text, ...) that may be
    passed over in the whole job, each epoch counting; one more stops it. They are counted in the
    metrics and named in the logs of the ranks that meet them. 0: the first stops it."""

    shuffle_window: PositiveInt = 256
    """Documents that each shard of a streamed source reads at once, to shuffle them. More: better
    shuffled, more memory."""

    stream_shards: PositiveInt = 64
    """Independent parts that a streamed source is read in, whatever the number of ranks; at most
    one per file. Best a multiple or a divisor of the global batch: a rank then reads no more than
    it needs."""

    token_cache_folder: Annotated[LocalPath, OUTPUT_PATH] = ""
    """Where tokens are kept. Absent: ~/.cache/meshwright, or $XDG_CACHE_HOME/meshwright."""

    local_batch_size: PositiveInt = 8
    """Sequences per data-parallel rank and microbatch: as many as fit the memory."""

    global_batch_size: OrFilledIn = -1
    """Sequences per optimizer step over all ranks: a multiple of data-parallel ranks x
    `local_batch_size`, and gradients are accumulated where it is more. Set it for a result that
    does not depend on the number of ranks. -1: that product, with a pipeline as many times that as
    it has stages."""

    seq_len: PositiveInt = 2048
    """Tokens per sequence."""

    max_norm: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 1.0
    """Bound on the global gradient norm: larger gradients are scaled down to it. inf: no bound."""

    steps: PositiveInt = 10000
    """Optimizer steps of the whole job, those before a resume included."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights that the optimizer updates, and of its state. bfloat16: half the memory,
    but updates below about 2^-9 of a weight are lost."""

    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of parameters and activations in forward and backward."""

    fp32_modules: list[str] = []
    """Modules, e.g. ["output", "layers.*.attention_norm", "layers.0"], whose weights and arithmetic
    stay fp32; their outputs are cast to mixed_precision_param, except the output's logits."""

    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over ranks. With bfloat16, microbatches are still added up
    in fp32, so several of them need `parallelism.fsdp_reduce_gradients` = every_microbatch."""

    loss_chunk_tokens: NonNegativeInt = 0
    """Tokens of a microbatch whose logits exist at once, to save memory. 0, which is best for most:
    as many as the model is wide, half as many if the output computes in fp32, so that logits take
    no more memory than its weight would in bf16; with a small vocabulary as many as have 16 Mi
    logits."""

    enable_cpu_offload: bool = False
    """Keep sharded parameters, gradients and optimizer state in the host's memory, and update them
    there; the device gets parameters layer by layer. Slow: for models that do not fit otherwise."""

    gc_freq: PositiveInt = 50
    """Steps between Python garbage collections, which happen at no other time."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Fixes the initial weights and the order of the data."""

    attention_kernel: Literal["auto", "cudnn", "flash", "fa3"] = "auto"
    """Causal attention on GPUs. auto: cuDNN's kernel on H100, B200 and their like, unless the job
    is deterministic or this cuDNN is known to be wrong for `seq_len`; otherwise FlashAttention 2,
    or memory-efficient attention where it takes no such type. fa3: FlashAttention 3, if its
    package is installed. The log names the kernel. Documents and context parallelism have kernels
    of their own."""

    deterministic: bool = False
    """Only algorithms that give equal bits in equal runs; slower on GPUs. Without it, kernels of
    GPUs, attention among them, add up in an order that changes from run to run."""


class Validation(Source):
    """[validation] The loss on data that is not trained on."""

    enable: bool = False
    """Validate every `freq` steps and after the last."""

    freq: PositiveInt = 500
    """Steps between validations."""

    num_samples: OrFilledIn = -1
    """Sequences of each dataset, of `training.seq_len` tokens, the same each time. -1: all (not of
    a streamed one)."""

    datasets: list[NamedSource] = []
    """Several datasets, each with its own loss, instead of `dataset` and its keys: tables
    [[validation.datasets]], each with the keys of a dataset and `name` (in figures)."""

    sample_prompts: list[str] = []
    """Prompts that the model continues at each validation, always by the likeliest token."""

    sample_tokens: PositiveInt = 32
    """Most tokens after each prompt. Each takes a forward of one microbatch."""


class ParameterGroup(Section):
    """[[optimizer.groups]] Parameters with a learning rate or a weight decay of their own."""

    parameters: Annotated[list[str], Field(min_length=1)]
    """Glob patterns of parameter names: ["tok_embeddings.*"], ["layers.[01].*", "*norm.weight"]. A
    parameter is in the first group that matches it."""

    lr_scale: PositiveFloat = 1.0
    """Factor on the learning rate of every step."""

    weight_decay: NonNegativeFloat | None = None
    """Instead of the parameter's usual one. Absent: the usual one."""


class Optimizer(Section):
    """[optimizer] Fused AdamW or Adam over master weights in `training.dtype`."""

    name: Literal["AdamW", "Adam"] = "AdamW"
    """AdamW subtracts weight decay from the weights, Adam adds it to the gradient."""

    lr: PositiveFloat = 8e-4
    """Peak learning rate."""

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay per step of the gradient's running mean."""

    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay per step of the squared gradient's running mean."""

    eps: PositiveFloat = 1e-8
    """Added to the denominator of the update."""

    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of parameters with two dimensions: matrices and embeddings."""

    decay_norm_and_bias: bool = False
    """Apply weight decay to parameters with one dimension too: weights of norms, biases."""

    groups: list[ParameterGroup] = []
    """Parameters with settings of their own: tables [[optimizer.groups]], each with `parameters`
    (glob patterns of names, as in `model.frozen`), and `lr_scale` (a factor on the learning rate)
    or `weight_decay`. The first group that matches a parameter counts."""

    early_step_in_backward: bool = False
    """Update each parameter during backward, as soon as its gradient is final, and free that: the
    gradients of the whole model are never in memory together. Needs `training.max_norm = inf`."""


class BadSteps(Section):
    """[bad_steps] Steps whose loss or gradient norm cannot be right."""

    policy: Literal["stop", "skip"] = "stop"
    """stop: the job ends at the next report or save (exit code 3), with the weights as they were
    before the step. skip: the step's update is left out, but data and learning rate move on;
    skipped steps are in the log and in {dump_folder}/skipped_steps.jsonl, with the samples'
    indices. Not with `optimizer.early_step_in_backward`."""

    budget: Annotated[int, Field(ge=1, le=10_000)] = 10
    """With policy = "skip": steps that may be skipped in the whole job; one more stops it."""

    spike_std: NonNegativeFloat = 0.0
    """A step is bad, too, if its loss or its gradient norm is more than so many standard deviations
    above its running mean; 6 is usual. 0: only figures that are not finite are bad."""

    spike_window: Annotated[int, Field(ge=2)] = 128
    """Good steps that the running means and deviations look back over; before there have been as
    many, no step is a spike."""


class LRScheduler(Section):
    """[lr_scheduler] The learning rate as a fraction of `optimizer.lr`: warm up, stay, decay."""

    warmup_steps: NonNegativeInt = 200
    """Optimizer steps from 0 to the peak."""

    total_steps: PositiveInt | None = None
    """Steps of the schedule, if it belongs to a longer job: `training.steps` then ends it early.
    Absent: `training.steps`."""

    decay_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Part of all steps spent decaying; absent: decay begins when the warm-up ends."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""

    min_lr_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of the peak that the decay ends at, one step after the last: a decay to 0 leaves the
    last step a rate above 0."""


class Parallelism(Section):
    """[parallelism] Degrees of the mesh; their product is the number of ranks."""

    data_parallel_replicate_degree: PositiveInt = 1
    """Copies of the sharded model (HSDP when above 1)."""

    data_parallel_shard_degree: OrFilledIn = -1
    """Ranks that share one copy's parameters (FSDP2). -1: every rank that the others leave over."""

    tensor_parallel_degree: PositiveInt = 1
    """Ranks that share every matrix, and the sequence between matrices; best within a node."""

    enable_async_tensor_parallel: bool = False
    """With tensor parallelism on GPUs that reach each other's memory, compiled by inductor: cut
    collectives and the products beside them into pieces that overlap."""

    context_parallel_degree: PositiveInt = 1
    """Ranks that share each sequence; for sequences whose activations do not fit one device."""

    context_parallel_attention: Literal["auto", "gather", "ring"] = "auto"
    """How a rank's queries meet all keys. gather: the rank gathers keys and values, layer by layer,
    and again in backward. Only with `training.mask_documents` does it keep them. ring: keys and
    values pass from rank to rank, not with documents. auto: gather."""

    pipeline_parallel_degree: PositiveInt = 1
    """Ranks that share the layers; microbatches travel through them."""

    pipeline_parallel_schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """In which order a rank computes its microbatches, forward and backward. GPipe, and the
    schedules of two backward passes (InterleavedZeroBubble, ZBVZeroBubble, DualPipeV), keep the
    gradient of the output's weight for every microbatch in flight, 4 bytes x vocabulary x width
    each. The last three cannot be compiled."""

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
    """Layers whose parameters are gathered ahead of the one that computes; more hide slow networks
    and cost the memory of as many gathered layers. 1: FSDP2's own prefetching."""

    fsdp_cpu_backend: Literal["auto", "gloo"] = "auto"
    """How CPU ranks exchange FSDP2's tensors. auto: through memory that they share, if they are on
    one machine; otherwise by gloo. Sums over three ranks or more may differ in the last bit."""

    fsdp_reduce_gradients: Literal["auto", "last_microbatch", "every_microbatch"] = "auto"
    """When gradients are reduce-scattered. last_microbatch: once per step, the fastest; until then
    each rank holds whole gradients in `mixed_precision_reduce`. every_microbatch: each rank keeps
    only the sum of its shard, in `training.dtype`. Copies (HSDP) add up once per step. auto, which
    is best for most: every_microbatch if there are several and whole gradients would be summed in
    bfloat16, or take more, beyond the shard, than a quarter of the memory that weights and
    optimizer leave of a device (`job.device_memory_gib`, or 80 GiB). Otherwise last_microbatch, and
    always with a pipeline, `optimizer.early_step_in_backward` or bfloat16 weights."""


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
    "meshwright.ring_attention",
    "higher_order.flex_attention",
    "higher_order.inductor_compiled_code",
    "_c10d_functional.reduce_scatter_tensor",
]


class ActivationCheckpoint(Section):
    """[activation_checkpoint] Activations that backward recomputes instead of keeping them."""

    mode: Literal["none", "full", "selective", "memory_budget"] = "none"
    """Activations that backward computes again. none: none, the fastest. full: every block, the
    least memory. selective: between them (`selective_ac_option`). memory_budget: those that the
    compiler finds cheapest; not with `compile.enable` = false."""

    selective_ac_option: Annotated[str, Field(pattern=r"^(op|[1-9][0-9]*)$")] = "op"
    """With mode = selective: "op" keeps the outputs of `saved_ops` and recomputes the rest; a
    number n recomputes every n-th block whole."""

    saved_ops: list[Annotated[str, Field(pattern=r"^\w+\.\w+$")]] = SAVED_OPS
    """Operators of torch.ops whose outputs selective "op" keeps: those that cost much for the
    memory that they need. Norms and pointwise steps are cheap. "aten.amax" and "aten.max" give the
    scales of float8. "higher_order" holds flex attention,
    as compiled blocks and as eager ones call it; "_c10d_functional" collectives."""

    memory_budget: Annotated[float, Field(ge=0, le=1)] = 0.5
    """With mode = memory_budget: the share kept of a compiled block's usual activations.
    1: as without recomputation; 0: as with full."""


def _check_bool_or_auto(value: object) -> object:
    """Refuse other values with one error: pydantic would give one for each type of the union."""
    if not (isinstance(value, bool) or value == "auto"):
        raise PydanticCustomError("bool_or_auto", 'must be true, false or "auto"')
    return value


class Compile(Section):
    """[compile] torch.compile, block by block."""

    enable: Annotated[bool | Literal["auto"], BeforeValidator(_check_bool_or_auto)] = "auto"
    """Compile every block, for faster steps; one graph serves all of them. The first step then
    takes longer. auto: if an option needs it, or if the whole job computes 100 TFLOP or more, a
    C++ compiler is there, and no option is incompatible; the log says why."""

    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """Backend of torch.compile; all but inductor are for finding faults."""

    cpu_attention: Literal["auto", "torch"] = "auto"
    """Causal attention on CPUs. auto: our kernel in C++, if the job is compiled, attention
    has no masks, there is a C++ compiler, and the CPUs have AMX or AVX512-BF16 (for float32: AVX2),
    on every rank; otherwise torch's. torch: torch's."""

    cpu_products: Literal["auto", "torch"] = "auto"
    """Matmuls in float32 on CPUs. auto: by oneDNN, if the job is compiled, there is a C++ compiler,
    and the CPUs have AVX-512 and are not Intel's, on every rank; otherwise torch's, by MKL. torch:
    torch's."""


def _no_write_process(mode: object) -> object:
    if mode == "process":
        raise PydanticCustomError("removed", 'was removed, as it was no faster: write "thread"')
    return mode


class Float8(Section):
    """[float8] Matrix products of the blocks in 8 bits, forward and backward, by torchao (pip
    install 'meshwright[float8]'). On GPUs of compute capability 8.9 or newer; best compiled."""

    enable: bool = False
    """Multiply in float8. Weights, gradients, optimizer, communication and all other layers, the
    output among them, stay as they are."""

    recipe_name: Literal["rowwise", "tensorwise"] = "rowwise"
    """rowwise: each row and column that is multiplied has a scale, a power of two, so that the
    model does not depend on the mesh beyond rounding. tensorwise: one scale for a whole tensor,
    which is faster, and depends on the mesh and on `training.local_batch_size`: a token's result
    changes with the tokens beside it."""

    filter_fqns: list[str] = ["attention.wk", "attention.wv"]
    """Parts of names of layers that stay in `training.mixed_precision_param`. The default ones, the
    projections of keys and values, are small in models with grouped heads: casts would cost more
    than they gain."""

    emulate: bool = False
    """Round to float8, but multiply in fp32: on any device, and slow. For tests and proofs."""


class Checkpoint(Section):
    """[checkpoint] Sharded checkpoints of everything that a resume needs."""

    enable: bool = False
    """Save, and resume from the dump folder."""

    folder: Annotated[LocalPath, Field(min_length=1)] = "checkpoint"
    """Folder inside `job.dump_folder`."""

    interval: PositiveInt = 500
    """Steps between saves; the last step is always saved."""

    keep_latest_k: NonNegativeInt = 10
    """Newest checkpoints to keep; older ones are deleted. 0: all are kept."""

    keep_every_n_steps: NonNegativeInt = 0
    """Checkpoints of steps that this divides are never deleted. 0: every one may be deleted."""

    keep_best: bool = False
    """Also save whenever the validation loss is the lowest so far (of several datasets, their
    mean), and keep that checkpoint until there is a better one. {folder}/best.json names it."""

    load_step: Annotated[int, Field(ge=-1)] = -1
    """Step to resume from. -1: the newest that is not damaged."""

    async_mode: Annotated[Literal["disabled", "thread"], BeforeValidator(_no_write_process)] = (
        "disabled"
    )
    """thread: write checkpoints while training continues. A thread of each rank writes from a copy
    in host memory, as large as the rank's part. disabled: training waits."""

    on_save_failure: Literal["warn", "stop"] = "warn"
    """If a checkpoint cannot be written (disk full, folder not writable), the job
    warns and continues, or stops with exit code 4. For the last step's checkpoint it always
    stops."""

    exclude_from_loading: list[Literal["optimizer", "dataloader"]] = []
    """Parts that a resume does not load: "optimizer", for a fresh one; "dataloader", to begin
    with the first sample, of other data if need be. The step number is kept, and the learning rate
    follows from it. Applies once: a checkpoint saved by a job with this same setting is loaded in
    full, unless `load_step` names it."""

    initial_load_path: InputPath = ""
    """Folder of the weights that the job starts from, if the dump folder holds no checkpoint to
    resume from. A step's folder or a dump folder (its newest step) of meshwright or torchtitan:
    only the weights are taken. Or a folder of Meta's (params.json, consolidated.*.pth), or of
    Hugging Face's (`initial_load_in_hf`). Absent: the seed's weights."""

    load_only: bool = False
    """Resume from the dump folder, and save nothing."""

    enable_first_step_checkpoint: bool = False
    """Save after step 1 too: whether the storage can be written shows at once."""

    last_save_model_only: bool = False
    """Save the weights alone after the last step, in `export_dtype`: a third of the size. Nothing
    resumes from that checkpoint; a job starts from it by `initial_load_path`."""

    last_save_in_hf: bool = False
    """After the last step, write the weights in `export_dtype` to {dump_folder}/hf/step-N too, as a
    model folder of Hugging Face, as `meshwright export` does and with its comparisons. The first
    rank does it, with the whole model in its memory while logits are compared."""

    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights that `last_save_model_only` and `last_save_in_hf` write."""

    initial_load_in_hf: bool = False
    """`initial_load_path` is a model folder of Hugging Face's: config.json and safetensors. Absent,
    it is the folder that `model.flavor` names."""


class Metrics(Section):
    """[metrics] Reports and their destinations. {dump_folder}/metrics.jsonl is always written."""

    log_freq: PositiveInt = 10
    """Steps between reports; the device is waited for only then."""

    grad_norm_by_group: bool = False
    """Also report the gradient norm of each layer, of the embedding, of the last norm and of the
    output. Not with `optimizer.early_step_in_backward`."""

    peak_tflops: NonNegativeFloat = 0.0
    """Dense TFLOP/s of one device, of which MFU is a percentage. 0: the data sheet's figure in
    bf16, if the device is known; without a figure there is no MFU."""

    enable_tensorboard: bool = True
    """Write TensorBoard events."""

    save_tb_folder: Annotated[LocalPath, Field(min_length=1)] = "tb"
    """Folder for them inside `job.dump_folder`."""

    enable_wandb: bool = False
    """Report to Weights & Biases too (pip install 'meshwright[wandb]')."""

    wandb_project: str = ""
    """Project there. Absent: $WANDB_PROJECT, or W&B's own choice."""

    wandb_entity: str = ""
    """User or team there. Absent: $WANDB_ENTITY, or the user who is logged in."""

    wandb_name: str = ""
    """Name of the run there. Absent: $WANDB_NAME, or a name that W&B makes up. A resumed job
    continues the same run."""


class Profiling(Section):
    """[profiling] Chrome traces of single steps by torch.profiler; snapshots of GPU memory. Also
    asked for at any time, by a file PROFILE in the dump folder."""

    enable_profiling: bool = False
    """Write traces."""

    save_traces_folder: Annotated[LocalPath, Field(min_length=1)] = "profile_traces"
    """Folder for them inside `job.dump_folder`."""

    profile_freq: PositiveInt = 10
    """Steps from one trace to the next."""

    profiler_warmup: NonNegativeInt = 3
    """Steps before each trace that the profiler runs without recording."""

    profiler_active: PositiveInt = 1
    """Steps that each trace holds."""

    enable_memory_snapshot: bool = False
    """On GPUs, record allocations, and write a snapshot every `profile_freq` steps and when memory
    runs out: for https://pytorch.org/memory_viz. It takes host memory, and some speed."""

    save_memory_snapshot_folder: Annotated[LocalPath, Field(min_length=1)] = "memory_snapshot"
    """Folder for them inside `job.dump_folder`."""


class Comm(Section):
    """[comm] Limits on collectives."""

    init_timeout_seconds: PositiveInt = 300
    """Seconds that a collective may take, up to the end of the first step, compilation included."""

    train_timeout_seconds: PositiveInt = 100
    """Seconds that a collective may take after that, or that a rank may be stopped. Then the job
    ends with exit code 6, and names the rank that the others wait for."""


class Experimental(Section):
    """[experimental] Code of your own."""

    custom_import: Annotated[InputPath, PATH_OR_NAME] = ""
    """Module that adds models, datasets or sinks: "package.module", or "path/to/file.py"."""


class JobConfig(Section):
    """A job's whole configuration. Read from a TOML, overridden by `--section.key value`."""

    job: Job = Job()
    model: Model = Model()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    bad_steps: BadSteps = BadSteps()
    lr_scheduler: LRScheduler = LRScheduler()
    parallelism: Parallelism = Parallelism()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    float8: Float8 = Float8()
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    comm: Comm = Comm()
    experimental: Experimental = Experimental()
