"""Every key of the TOML: its type, bounds, default and documentation; and what follows from keys.

Sections and keys have torchtitan 0.2's names wherever the meaning is the same.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from meshwright.config.optimizer import Optimizer
from meshwright.config.parallelism import ActivationCheckpoint, Comm, Compile, Float8, Parallelism
from meshwright.config.section import (
    CHAT_TEMPLATES,
    OUTPUT_PATH,
    PATH_OR_NAME,
    InputPath,
    LocalPath,
    Section,
)
from meshwright.config.training import BadSteps, Experts, LRScheduler, Training, Validation


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
    """Memory of one GPU in GiB. With it, a job that surely doesn't fit is rejected before it
    starts, and `parallelism.fsdp_reduce_gradients` = auto takes it into account. 0: not known; each
    rank then compares the GPU that it finds."""

    max_run_seconds: NonNegativeInt = 0
    """Seconds from the first step after which the job saves and exits with code 75; started again,
    it resumes. Leave time for the save. 0: no limit."""


class Model(Section):
    """[model] Which model, how large, and its tokenizer."""

    name: str = "llama"
    """Model family; a wrong name lists them all. `experimental.custom_import` may add one."""

    flavor: Annotated[InputPath, PATH_OR_NAME] = "debugmodel"
    """Size, from the family's table (a wrong one lists them all). Or a model folder of Hugging
    Face, as a path with a slash in it: its config.json gives the dimensions and, if `name` is
    absent, the family; its tokenizer is taken unless `tokenizer_path` is given, and its weights if
    `checkpoint.initial_load_in_hf`."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Dimensions that differ from the flavor's: dim, n_layers, n_heads, n_kv_heads, head_dim,
    hidden_dim, vocab_size, norm_eps, rope_theta, tie_embeddings, mtp_depth (layers that predict
    further tokens, as DeepSeek-V3's does), and those of the family. On the command line:
    --model.args.n_layers 4."""

    frozen: list[str] = []
    """Parameters that aren't trained, as glob patterns of their names: `tok_embeddings.*`,
    `layers.[01].*`, `*norm.weight`."""

    tokenizer_type: str = ""
    """Tokenizer that `experimental.custom_import` adds, by its name; `tokenizer_path` is then its
    file, if it needs one. Absent: the one in `tokenizer_path`, whose kind its content decides."""

    tokenizer_path: InputPath = ""
    """Hugging Face's `tokenizer.json`, a `tokenizer.model` of sentencepiece, or a folder with one;
    or "bytes" for UTF-8 bytes as tokens (vocabulary 258), which needs no file."""

    bos_token: str | None = None
    """Token before every document, as `tokenizer.json` spells it; "": none. Absent: the token that
    the file's own post-processor puts first."""

    eos_token: str | None = None
    """Token after every document; "": none. Absent: the token that the post-processor of
    `tokenizer.json` puts last, otherwise a well-known one in the file."""

    chat_template_path: Annotated[InputPath, CHAT_TEMPLATES] = ""
    """Jinja file that makes text of conversations, or the name of a shipped one: "llama2",
    "llama3", "llama3.1", "mixtral", "olmo2", "qwen2.5" or "qwen3". Absent: the tokenizer's own."""

    @property
    def gives_tie(self) -> bool:
        """Whether `args` say that embeddings are tied, or aren't: a folder's tensors don't then."""
        return "tie_embeddings" in self.args


class Average(Section):
    """[checkpoint.average] An EMA of the weights in fp32: validated next to them, and saved.
    Off, unless one of the keys is given."""

    decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the EMA that each step keeps, e.g. 0.999: EMA = decay x EMA + (1 - decay) x
    weights."""

    window_tokens: PositiveInt | None = None
    """Tokens that the mean looks back over, instead of `decay`: that is then 1 - tokens of a step /
    window_tokens."""

    @property
    def is_on(self) -> bool:
        """Whether there is a mean."""
        return self.decay is not None or self.window_tokens is not None


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
    """Step to resume from. -1: the newest that isn't damaged."""

    rewind_to: Annotated[int, Field(ge=-1)] = -1
    """Go back to the newest checkpoint at or before this step, once: later ones are set aside, and
    restarts with this key continue the new run. -1: no rewind."""

    verify: Literal["full", "sizes"] = "full"
    """How a resume finds damage before it loads a checkpoint. full: by the checksum of every byte,
    so that each is read twice. sizes: by the sizes of files; a flipped bit is then loaded."""

    async_mode: Literal["disabled", "thread"] = "disabled"
    """thread: write checkpoints while training continues. A thread of each rank writes from a copy
    in host memory, as large as the rank's part. disabled: training waits."""

    on_save_failure: Literal["warn", "stop"] = "warn"
    """If a checkpoint can't be written (disk full, folder not writable), the job
    warns and continues, or stops with exit code 4. For the last step's checkpoint it always
    stops."""

    exclude_from_loading: list[Literal["optimizer", "dataloader"]] = []
    """Parts that a resume doesn't load: "optimizer", for a fresh one; "dataloader", to start
    with the first sample, of other data if need be. The step number is kept, and the learning rate
    follows from it. Applies once: a checkpoint saved by a job with this same setting is loaded in
    full, unless `load_step` names it."""

    initial_load_path: InputPath = ""
    """Folder of the weights that the job starts from, if the dump folder holds no checkpoint to
    resume from. A step's folder or a dump folder (its newest step): only the weights are taken.
    Or a Hugging Face model directory (`initial_load_in_hf`). Absent: the seed's weights."""

    load_only: bool = False
    """Resume from the dump folder, and save nothing."""

    enable_first_step_checkpoint: bool = False
    """Save after step 1 too: whether the storage can be written shows at once."""

    last_save_model_only: bool = False
    """After the last step, save only the weights, in `export_dtype`: a third of the size. Nothing
    resumes from that checkpoint; a job starts from it by `initial_load_path`."""

    last_save_in_hf: bool = False
    """After the last step, write the weights in `export_dtype` to {dump_folder}/hf/step-N too, as a
    Hugging Face model directory, as `meshwright export` does and with its comparisons. The first
    rank does it, with the whole model in its memory while logits are compared."""

    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights that `last_save_model_only` and `last_save_in_hf` write."""

    export_mtp: bool = True
    """With `last_save_in_hf`: write the layers for multi-token prediction too. Only DeepSeek-V3's
    files have a place for them, and transformers leaves them out."""

    initial_load_in_hf: bool = False
    """`initial_load_path` is a Hugging Face model directory's: config.json and safetensors. Absent,
    it is the folder that `model.flavor` names."""

    initial_load_upcycle_noise: NonNegativeFloat | None = None
    """`initial_load_path` holds a dense model: Qwen3 for model.name = "qwen3_moe", Llama for
    "mixtral". Each expert starts as a copy of its layer's feed-forward plus normal noise of this
    std, as a share of that of fresh weights. Routers are fresh. Absent: the folder holds a
    model of the same family."""

    initial_load_new_mtp: bool = False
    """`initial_load_path` holds a model without layers for multi-token prediction (`mtp_depth` in
    `model.args`), which start with the seed's weights."""

    average: Average = Average()

    @property
    def saves(self) -> bool:
        """Whether the job writes checkpoints at all."""
        return self.enable and not self.load_only


class Sentry(Section):
    """[sentry] Finds a GPU that computes wrongly: all data-parallel ranks compute one and the same
    microbatch, forward and backward, and compare the bits of each block's output and gradients;
    replicas also compare their weights. Errors of the optimizer and of collectives are found only
    if replicas then differ. Training stays bitwise the same."""

    interval: NonNegativeInt = 0
    """Steps between comparisons, e.g. 100. Each takes as long as a microbatch. A rank that differs
    from most others twice ends the job with exit code 7; of two ranks both are named, and with
    tensor or context parallelism all that share the work. A difference that doesn't come again is
    a warning. Not with one data-parallel rank or expert parallelism. 0: off."""


class Metrics(Section):
    """[metrics] Reports and their destinations. {dump_folder}/metrics.jsonl is always written."""

    log_freq: PositiveInt = 10
    """Steps between reports; the device is waited for only then."""

    grad_norm_by_group: bool = False
    """Also report the gradient norm of each layer, of the embedding, of the last norm and of the
    output. Not with `optimizer.early_step_in_backward`."""

    layer_stats_freq: NonNegativeInt = 0
    """Steps between statistics of each layer: RMS of activations and of gradients, update over
    weight, and the largest attention logit. Such a step is logged. 0: none. They take one more
    forward of one sequence, and a copy of the weights while they are updated; training stays the
    same to the bit. Not with `optimizer.early_step_in_backward`."""

    every_step: bool = False
    """Keep the loss, the gradient norm and, with `grad_norm_by_group`, the groups' norms of every
    step in {dump_folder}/steps.jsonl, not of logged steps only. The device isn't waited for."""

    peak_tflops: NonNegativeFloat = 0.0
    """Dense TFLOP/s of one device, of which MFU is a percentage. 0: the data sheet's number in
    bf16, if the device is known; without one there is no MFU."""

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


class Experimental(Section):
    """[experimental] Your own code."""

    custom_import: Annotated[InputPath, PATH_OR_NAME] = ""
    """Module with models, datasets, formats, tokenizers, optimizers, schedules, losses, metrics,
    sinks or options: "package.module", or "path/to/file.py"."""


class Options(Section):
    """[options] A table for each name that your own module has options for: [options.NAME]."""

    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, dict[str, Any]]


class JobConfig(Section):
    """A job's whole configuration. Read from a TOML, overridden by `--section.key value`."""

    job: Job = Job()
    model: Model = Model()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    bad_steps: BadSteps = BadSteps()
    lr_scheduler: LRScheduler = LRScheduler()
    experts: Experts = Experts()
    parallelism: Parallelism = Parallelism()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    float8: Float8 = Float8()
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    sentry: Sentry = Sentry()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    comm: Comm = Comm()
    experimental: Experimental = Experimental()
    options: Options = Options()

    @property
    def schedule_steps(self) -> int:
        """Steps that the learning rate's schedule is laid out for."""
        return self.lr_scheduler.total_steps or self.training.steps

    @property
    def num_decay_steps(self) -> int:
        """Optimizer steps on which the learning rate falls."""
        schedule, steps = self.lr_scheduler, self.schedule_steps
        if schedule.decay_start is not None:
            return max(steps - schedule.decay_start, 0)
        if schedule.decay_ratio is None:
            return max(steps - schedule.warmup_steps, 0)
        return round(steps * schedule.decay_ratio)

    @property
    def num_data_ranks(self) -> int:
        """Ranks that read different samples; of a config without -1."""
        p = self.parallelism
        return p.data_parallel_replicate_degree * p.data_parallel_shard_degree

    @property
    def num_microbatches(self) -> int:
        """Per rank and optimizer step; of a config without -1."""
        per_microbatch = self.num_data_ranks * self.training.local_batch_size
        return self.training.global_batch_size // per_microbatch

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all ranks; of a config without -1."""
        return self.training.global_batch_size * self.training.seq_len

    @property
    def has_fsdp(self) -> bool:
        """Whether FSDP2 has anything to shard, offload or add up; as `parallelize` decides."""
        p = self.parallelism
        cut = p.context_parallel_degree * p.tensor_parallel_degree * p.pipeline_parallel_degree
        return self.num_data_ranks * cut > 1 or needs_fsdp_alone(self.training)

    @property
    def overlaps_tensor_parallel(self) -> bool:
        """Whether tensor parallelism's collectives and matmuls are to overlap."""
        p = self.parallelism
        return p.enable_async_tensor_parallel and p.tensor_parallel_degree > 1

    @property
    def compiles_validation(self) -> bool:
        """Whether the first validation compiles: masks have compiled kernels."""
        return self.compile.is_on or self.training.mask_documents


Update = Mapping[str, Mapping[str, Any]]
"""New values, by section and key."""


def differing(config: JobConfig, update: Update) -> dict[str, dict[str, Any]]:
    """Return the values of `update` that `config` hasn't."""
    found = {
        name: {key: new for key, new in keys.items() if getattr(getattr(config, name), key) != new}
        for name, keys in update.items()
    }
    return {name: keys for name, keys in found.items() if keys}


def wants_cpu_attention(compilation: Compile, training: Training, parallelism: Parallelism) -> bool:
    """Return whether a job on CPUs looks for the kernel of `compile.cpu_attention`."""
    is_on = compilation.is_on and compilation.cpu_attention == "auto"
    return is_on and suits_cpu_attention(training, parallelism)


def suits_cpu_attention(training: Training, parallelism: Parallelism) -> bool:
    """Return whether that kernel computes the job's kind of attention."""
    return not training.mask_documents and parallelism.context_parallel_degree == 1


def needs_fsdp_alone(training: Training) -> bool:
    """Return whether one rank needs FSDP2: to offload, or since autograd wouldn't add up in
    fp32."""
    adds_up_in_fp32 = training.mixed_precision_param == "float32" or (
        training.dtype == training.mixed_precision_reduce == "float32"
    )
    return training.enable_cpu_offload or not adds_up_in_fp32
