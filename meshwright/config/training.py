"""The sections `training`, `validation`, `lr_scheduler`, `bad_steps` and `experts` of a TOML."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from meshwright.config.section import (
    OUTPUT_PATH,
    PATH_OR_NAME,
    DataPath,
    InputPath,
    LocalPath,
    OrFilledIn,
    Section,
)


class Source(Section):
    """Where text comes from: the same keys for training, for validation, and in a mixture."""

    dataset: str = "sympy_source"
    """text, json, parquet, arrow: local files of text. megatron, tokens: local files of token ids
    (.bin with .idx of Megatron-LM; .npy or .bin of OLMo, nanoGPT or llm.c; .ds of datatrove). c4,
    fineweb, fineweb-edu, slimpajama, or any "owner/name": of the Hugging Face hub. sympy_source:
    the Python code of sympy, which torch installs, for trying."""

    dataset_path: DataPath = ""
    """File, folder or glob for local data, or an address of such (s3://, gs://, hf://; of https://
    one file); for a named dataset a local copy of it."""

    dataset_subset: str = ""
    """Configuration of a Hub dataset, e.g. "en" or "sample-10BT". Absent: the usual one."""

    dataset_revision: str = ""
    """Commit, tag or branch of a Hub dataset. Absent: the newest when the job starts; the
    log and its checkpoints name the commit."""

    dataset_split: str = "train"
    """Part of a Hub dataset; of sympy_source "train", or "validation": every 20th file."""

    dataset_column: str = "text"
    """Column that holds the text, or a conversation: a list of {role, content}, of which only the
    assistant's tokens count in the loss."""

    dataset_separator: str = ""
    """Of dataset "text": the words between two documents of a file, e.g. "<|endoftext|>". With
    "\\n" each line is a document, with "\\n\\n" each paragraph. Line ends around a document are
    dropped. Absent: each file is a document, as it is."""

    dataset_where: list[str] = []
    """Rows that are taken, by conditions of which all must hold: a column or its length, a
    comparison and a value, e.g. ["language == 'en'", "meta.score >= 3", "len(text) > 200"]."""

    max_documents: NonNegativeInt = 0
    """Documents that are taken, the first ones in the order of the files; of a streamed source
    each shard gives an equal part. 0: all."""

    dataset_format: Annotated[InputPath, PATH_OR_NAME] = ""
    """How a row becomes a conversation or a text, instead of a column: "alpaca", "sharegpt",
    "messages", or one that `experimental.custom_import` adds; or your function from a row (a
    dict), "package.module:function" or "path/to/file.py:function"."""

    dataset_mode: Literal["auto", "cached", "streamed"] = "auto"
    """cached: tokenized once, into files that every later job reads; any sample can be read, and
    all are shuffled. streamed: tokenized as it is read, for data too large to be
    tokenized first. auto: streamed for Hub datasets, otherwise cached."""


class NamedSource(Source):
    """[[validation.datasets]] One of several."""

    name: str = ""
    """Its name in metrics. Absent: the dataset's name."""


class WeightedSource(NamedSource):
    """[[training.datasets]] One part of a mixture."""

    weight: PositiveFloat | None = None
    """Its share of all samples is its weight over the sum of weights."""

    tokens: PositiveInt | None = None
    """Tokens to take from it in the whole job, instead of a weight."""

    loss_weight: PositiveFloat = 1.0
    """Factor on the loss of each of its labels. The loss of a step is the sum over labels divided
    by the sum of their factors, so only the ratio between datasets counts."""


class Stage(Section):
    """[[training.stages]] A part of the job. Its keys replace those of the whole job."""

    until_tokens: PositiveInt | None = None
    """Tokens of the job, earlier stages included, with which the stage ends: at the first step that
    reaches them. Of every stage but the last, which takes the rest of `training.steps`."""

    datasets: list[WeightedSource] = []
    """Data sets in the place of the job's: tables [[training.stages.datasets]]. A source that has
    the name and the content of one of the stage before continues where that was."""

    weights: dict[str, PositiveFloat] = {}
    """Other weights of the job's `datasets`, by name: {web = 0.2, code = 0.8}."""

    seq_len: PositiveInt | None = None
    """As `training.seq_len`. With a different one, every source starts with its first sample."""

    global_batch_size: PositiveInt | None = None
    """As `training.global_batch_size`."""

    local_batch_size: PositiveInt | None = None
    """As `training.local_batch_size`."""

    lr: PositiveFloat | None = None
    """As `optimizer.lr`."""

    warmup_steps: NonNegativeInt | None = None
    """As `lr_scheduler.warmup_steps`: steps count from the start of the job, as in all keys of the
    schedule."""

    total_steps: PositiveInt | None = None
    """As `lr_scheduler.total_steps`. Absent: that, or `training.steps` of the whole job."""

    decay_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """As `lr_scheduler.decay_ratio`."""

    decay_start: NonNegativeInt | None = None
    """As `lr_scheduler.decay_start`."""

    decay_type: Literal["linear", "sqrt", "cosine"] | None = None
    """As `lr_scheduler.decay_type`."""

    min_lr_factor: Annotated[float, Field(ge=0, le=1)] | None = None
    """As `lr_scheduler.min_lr_factor`."""


class Training(Source):
    """[training] Data, batch, length and precision."""

    datasets: list[WeightedSource] = []
    """A mixture, instead of `dataset` and its keys: tables [[training.datasets]], each with the
    keys of a dataset, `name` (in metrics), and `weight` (its share) or `tokens` (to take from it in
    the whole job). At any moment the samples drawn from each are within one of its share."""

    mix_file: InputPath = ""
    """A mixture as a file, instead of `datasets`: a line for each part, its weight, a space, and a
    path or glob that starts at the file's folder. Lines that start with # are left out. The other
    keys, `dataset` first, are those of [training]."""

    max_epochs: NonNegativeInt = 0
    """Times that any source may be read through; training ends on all ranks before the step that
    would need more. 0: no limit."""

    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the documents of each source that is kept from training, and on which `[validation]`
    measures the loss if it names no dataset. A hash of the text decides, so a document is on the
    same side in every job, whatever the order and the mesh, and so are its duplicates."""

    packing: Literal["cut", "best_fit"] = "cut"
    """How documents become sequences. cut: they are laid end to end, and split every `seq_len` + 1
    tokens. best_fit: a document that fits a sequence is never split. In windows of 16,384
    documents, the longest first, each joins the sequence that it leaves the least room in. The rest
    of a sequence is padding, which the loss and the balance of experts leave out. Needs cached
    sources. Validation always has "cut"."""

    exclude: list[str] = []
    """Documents and samples that the loss leaves out, as `meshwright replay` names them: "json
    document 137", "json sample 848-863". They keep their places, so all other samples stay as they
    are, on any mesh. It may change at a resume. Documents of cached sources only."""

    mask_documents: bool = False
    """Keep the documents in a sequence apart: attention stays inside each, positions restart at 0,
    and the loss leaves out the first token of each."""

    max_bad_records: NonNegativeInt = 0
    """Records (a line that is no JSON, a row without its text, the rest of a damaged file, ...)
    that may be skipped; one more stops the job. A cached source counts them when it is
    tokenized. Streamed ones count them in the whole job, each epoch again, in the metrics and in
    the logs of the ranks that meet them. 0: the first stops it."""

    shuffle_window: PositiveInt = 256
    """Documents that each shard of a streamed source reads at once, to shuffle them. More: better
    shuffled, more memory."""

    stream_shards: PositiveInt = 64
    """Independent parts that a streamed source is read in, on any number of ranks; at most one per
    file. Choose a multiple or a divisor of `global_batch_size`: each rank then reads only its own
    parts."""

    token_cache_folder: Annotated[LocalPath, OUTPUT_PATH] = ""
    """Where tokens are kept. Absent: ~/.cache/meshwright, or $XDG_CACHE_HOME/meshwright."""

    block_cache_gib: PositiveFloat = 16.0
    """Most GiB of `token_cache_folder` that keep blocks of token files in object storage; the
    oldest are deleted beyond it. Per machine."""

    stages: list[Stage] = []
    """Parts of the job, one after the other: tables [[training.stages]], each with `until_tokens`,
    the tokens of the job with which it ends (the last one has none), and keys that differ in it:
    `datasets`, or `weights` of the job's by name; `seq_len`, `global_batch_size`,
    `local_batch_size`; `lr`, `warmup_steps`, `total_steps`, `decay_ratio`, `decay_start`,
    `decay_type`, `min_lr_factor`."""

    local_batch_size: PositiveInt = 8
    """Sequences per data-parallel rank and microbatch: as many as fit the memory."""

    global_batch_size: OrFilledIn = -1
    """Sequences per optimizer step over all ranks: a multiple of data-parallel ranks x
    `local_batch_size`. The rest is gradient accumulation. Set it if results must not depend on the
    number of ranks. -1: one microbatch per rank; with a pipeline, one per stage."""

    seq_len: PositiveInt = 2048
    """Tokens per sequence."""

    max_norm: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 1.0
    """Bound on the global gradient norm: larger gradients are scaled down to it. inf: no bound."""

    steps: PositiveInt = 10000
    """Optimizer steps of the whole job, those before a resume included."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights that the optimizer updates, and of its state. bfloat16: half the memory,
    but updates below about 2^-9 of a weight are lost."""

    mixed_precision_param: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of parameters and activations in forward and backward. auto: bfloat16; but float32 on a
    CPU that has no fast instructions for bfloat16, unless `dtype` or float8 needs that. All
    nodes have to find the same type, or the job is rejected."""

    fp32_modules: list[str] = []
    """Modules, e.g. ["output", "layers.*.attention_norm", "layers.0"], whose weights and arithmetic
    stay fp32; their outputs are cast to mixed_precision_param, except the output's logits."""

    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over ranks, those of norms and routers over
    tensor-parallel ranks included. With bfloat16, microbatches are still added up in fp32, so
    several of them need `parallelism.fsdp_reduce_gradients` = every_microbatch."""

    loss: str = "cross_entropy"
    """What is trained on. `experimental.custom_import` may add losses; validation always has the
    cross entropy, so that its values compare."""

    loss_chunk_tokens: NonNegativeInt = 0
    """Tokens of a microbatch whose logits exist at once, to save memory. 0 (recommended) chooses a
    number with which logits take no more memory than the output weight in bf16, or 16 Mi logits if
    the vocabulary is small."""

    mtp_loss_weight: PositiveFloat = 0.3
    """Weight of the mean loss of further tokens, with layers for multi-token prediction
    (`mtp_depth` in `model.args`). The logged loss doesn't contain it. DeepSeek-V3 has 0.3 for 10T
    tokens and 0.1 for the last 4.8T (arXiv:2412.19437, section 4.2)."""

    enable_cpu_offload: bool = False
    """Keep sharded parameters, gradients and optimizer state in the host's memory, and update them
    there; the device gets parameters layer by layer. Slow: for models that don't fit otherwise."""

    gc_freq: PositiveInt = 50
    """Steps between Python garbage collections, which happen at no other time."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Fixes the initial weights and the order of the data."""

    attention_kernel: Literal["auto", "cudnn", "flash", "fa3"] = "auto"
    """Causal attention on GPUs. auto: cuDNN's kernel on H100, B200 and their like, unless the job
    is deterministic or this cuDNN is known to be wrong for `seq_len`; otherwise FlashAttention 2,
    or memory-efficient attention where it takes no such type. fa3: FlashAttention 3, if its
    package is installed; not with context parallelism. The log gives the kernel. Documents have a
    kernel of their own. With `sentry` and context parallelism, auto is FlashAttention 2."""

    deterministic: bool = False
    """Only algorithms that give equal bits in equal runs; slower on GPUs. Without it, kernels of
    GPUs, attention among them, add up in an order that changes from run to run."""


class Validation(Source):
    """[validation] The loss on data that isn't trained on."""

    enable: bool = False
    """Validate every `freq` steps and after the last."""

    freq: PositiveInt = 500
    """Steps between validations."""

    num_samples: OrFilledIn = -1
    """Sequences of each dataset, of `training.seq_len` tokens, the same each time: of a cached one
    some from all over it, of a streamed one the first of its shards. -1: all of a cached one."""

    datasets: list[NamedSource] = []
    """Several datasets, each with its own loss, instead of `dataset` and its keys: tables
    [[validation.datasets]], each with the keys of a dataset and `name` (in metrics)."""

    sample_prompts: list[str] = []
    """Prompts that the model continues at each validation, by greedy decoding."""

    sample_tokens: PositiveInt = 32
    """Most tokens after each prompt. Each takes a forward of one microbatch."""


class BadSteps(Section):
    """[bad_steps] Steps whose loss or gradient norm can't be right."""

    policy: Literal["stop", "skip"] = "stop"
    """stop: the job ends at the next report or save (exit code 3), with the weights as they were
    before the step. skip: the step's update is left out, but data and learning rate move on;
    skipped steps are in the log and in {dump_folder}/skipped_steps.jsonl, with the samples'
    indices. Not with `optimizer.early_step_in_backward`."""

    budget: Annotated[int, Field(ge=1, le=10_000)] = 10
    """With policy = "skip": steps that may be skipped in the whole job; one more stops it."""

    spike_std: NonNegativeFloat = 0.0
    """A step is also bad if its loss or its gradient norm is more than this many standard
    deviations above its EMA; 6 is usual. 0: only metrics that aren't finite are bad."""

    spike_window: Annotated[int, Field(ge=2)] = 128
    """Good steps that the EMAs and deviations look back over; before there have been as
    many, no step is a spike."""


class Experts(Section):
    """[experts] How tokens are spread over the experts of a layer, in models that have some. No
    setting depends on the mesh or on microbatches."""

    balance_loss: NonNegativeFloat = 0.01
    """Weight of the loss that evens loads out: mean over tokens, sum over experts, of load x share
    of the score. An expert's load is its number of tokens over the mean, in the last step's global
    batch. transformers' `router_aux_loss_coef` is stronger by the number of experts of a token."""

    sequence_balance_loss: NonNegativeFloat = 0.0
    """Weight of the same loss with the loads of each full sequence, as DeepSeek-V3 has it. With
    context or tensor parallelism it costs a small all-reduce per layer."""

    bias_update_rate: NonNegativeFloat = 0.0
    """Per step, add this to the bias of each expert with fewer tokens than the mean, and subtract
    it from that of others; biases count in the choice of experts only. DeepSeek-V3 has 0.001. Only
    families whose files have a place for biases can be exported then."""

    router_z_loss: NonNegativeFloat = 0.0
    """Weight of the mean squared logarithm of the sum of exponentials of router logits, which keeps
    them small. OLMoE has 0.001."""


class LRScheduler(Section):
    """[lr_scheduler] The learning rate as a fraction of `optimizer.lr`: warm up, stay, decay."""

    name: str = "wsd"
    """wsd: warm up, stay, decay, as the keys below say. inverse_sqrt: warm up, then fall as
    1 / sqrt(step), but not below `min_lr_factor`. `experimental.custom_import` may add one."""

    warmup_steps: NonNegativeInt = 200
    """Optimizer steps from 0 to the peak."""

    total_steps: PositiveInt | None = None
    """Steps of the schedule, if it belongs to a longer job: `training.steps` then ends it early.
    Absent: `training.steps`."""

    decay_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Part of all steps spent decaying; absent: decay starts when the warm-up ends."""

    decay_start: NonNegativeInt | None = None
    """Steps before the decay, in the place of `decay_ratio`; absent: that decides. The first step
    of a decay still has the peak."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""

    min_lr_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of the peak that the decay ends at, one step after the last: a decay to 0 leaves the
    last step a rate above 0."""
