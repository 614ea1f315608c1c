"""Every key of torchtitan 0.2.2 that is not one of ours, and every default that differs.

A key that no table names has the same name and meaning here. Source: torchtitan 0.2.2,
`torchtitan/config/job_config.py` (149 keys) and `torchtitan/models/*/__init__.py` (flavors).
"""

from typing import Any

LLAMA_SIZES, QWEN_SIZES = ("8B", "70B", "405B"), ("0.6B", "1.7B", "4B", "8B", "14B", "32B")

FLAVORS: dict[tuple[str, str], tuple[str, str, dict[str, Any]]] = {
    ("llama3", "debugmodel"): (
        "llama",
        "debugmodel",
        {"n_heads": 16, "n_kv_heads": 16, "rope_scaling": {"factor": 8.0}},
    ),
    **{("llama3", size): ("llama", f"llama3.1_{size.lower()}", {}) for size in LLAMA_SIZES},
    ("qwen3", "debugmodel"): (
        "qwen3",
        "debugmodel",
        {
            "n_layers": 8,
            "n_heads": 16,
            "n_kv_heads": 8,
            "head_dim": 128,
            "hidden_dim": 3072,
            "rope_theta": 1000000.0,
            "tie_embeddings": True,
        },
    ),
    **{("qwen3", size): ("qwen3", f"qwen3_{size.lower()}", {}) for size in QWEN_SIZES},
}
"""Their name and flavor; our name, flavor and `model.args`. Every Llama there has Llama 3.1's
stretched rotation, the debug model too."""

DEFAULT_NAME = "llama3"
"""Of its model, if a TOML names none."""

DOCUMENT_MASKS = ("_flex_attn", "_varlen_attn", "_flex", "_varlen")
"""Endings of flavors whose attention stays inside documents: `training.mask_documents` here."""

OTHER_MODELS = ("llama3_ft", "llama4", "deepseek_v3", "gpt_oss", "flux")
"""Models of torchtitan that are not here."""

RENAMED = {
    "model.hf_assets_path": "model.tokenizer_path",
    "debug.seed": "training.seed",
    "debug.deterministic": "training.deterministic",
}
"""Their key and ours; the value is the same."""

VALUES: dict[str, dict[str, str]] = {
    "checkpoint.async_mode": {"async": "thread", "async_with_pinned_mem": "thread"},
}
"""Values with another name here, by key."""


DEFAULTS: dict[str, tuple[object, str, object]] = {
    "activation_checkpoint.mode": ("selective", "", None),
    "activation_checkpoint.selective_ac_option": ("2", "activation_checkpoint.mode", "selective"),
    "checkpoint.last_save_model_only": (True, "checkpoint.enable", True),
    "compile.enable": (False, "", None),
    "float8.recipe_name": ("tensorwise", "float8.enable", True),
    "float8.filter_fqns": ([], "float8.enable", True),
    "metrics.enable_tensorboard": (False, "", None),
    # no key there: weight decay applies to every parameter
    "optimizer.decay_norm_and_bias": (True, "", None),
    "validation.freq": (10, "validation.enable", True),
}
"""Values that torchtitan has where a TOML says nothing, and we have not; by our key, in the order
in which they are stated. Each with the key and the value of ours beside which alone it has an
effect, if there is one."""

FLOAT8 = ("float8", "quantize.linear.float8")
"""Names of the converter to float8 layers."""

SMALL_LAYERS = "auto_filter_small_kn"
"""Among the layers to leave out there: those too small to gain. In models of the sizes above these
are the projections of keys and values."""

IDLE: dict[str, str] = {
    pattern: why
    for why, patterns in {
        "Meshwright decides it by itself": """
            job.print_config job.save_config_file metrics.save_for_all_ranks
            model.print_after_conversion optimizer.implementation training.gc_debug
            training.dataloader.* validation.dataloader.*
            parallelism.context_parallel_load_balancer parallelism.context_parallel_rotate_method
            parallelism.disable_loss_parallel
            activation_checkpoint.early_stop activation_checkpoint.determinism_check
            activation_checkpoint.preserve_rng_state activation_checkpoint.debug
            activation_checkpoint.visualize_memory_budget_pareto
            quantize.linear.float8.enable_fsdp_float8_all_gather
            quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp""",
        "it matters only to a feature that the job does not use": """
            parallelism.pipeline_parallel_expert_parallel_overlap
            parallelism.expert_tensor_parallel_degree parallelism.expert_parallel_comm_backend
            debug.moe_force_load_balance memory_estimation.disable_fake_mode quantize.*
            fault_tolerance.* checkpoint.enable_ft_dataloader_checkpoints""",
        "a pipeline's stages are even in parameters, or as module_fqns_per_model_part says": """
            parallelism.pipeline_parallel_*_stage_less_layers
            parallelism.pipeline_parallel_layers_per_stage""",
        "activation_checkpoint.saved_ops decides": """
            activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns""",
        "NO_COLOR=1 in the environment turns colour off": "metrics.disable_color_printing",
        "NCCL's flight recorder is set by TORCH_FR_BUFFER_SIZE and TORCH_FR_DUMP_TEMP_FILE": """
            comm.trace_buf_size comm.save_traces_*""",
    }.items()
    for pattern in patterns.split()
}
"""Their key, as a glob pattern, and why it has no effect here. A row of `REFUSED` goes first."""

LEAVE_OUT = "leave it out"

OWN_KEYS = "keys of your own are not supported"

REFUSED: dict[str, tuple[object, str, str]] = {
    "job.custom_config_module": ("", OWN_KEYS, "see experimental.custom_import in the docs"),
    "parallelism.pipeline_parallel_schedule_csv": (
        *("", "schedules from a file are not supported"),
        "use pipeline_parallel_schedule",
    ),
    "checkpoint.initial_load_model_only": (
        *(True, "a job starts from the weights of another, not from its optimizer and data"),
        "to resume that job, use its job.dump_folder",
    ),
    "checkpoint.initial_load_in_hf_quantized": (
        *(False, "quantized weights are not read"),
        "convert them to bfloat16 safetensors",
    ),
    "checkpoint.create_seed_checkpoint": (
        *(False, "training.seed gives the same first weights on every mesh"),
        LEAVE_OUT,
    ),
    "comm.mode": ("default", "only real communication is supported", LEAVE_OUT),
    "memory_estimation.enable": (
        *(False, "a job that surely does not fit job.device_memory_gib is refused"),
        LEAVE_OUT,
    ),
    "fault_tolerance.enable": (False, "torchft is not supported", LEAVE_OUT),
    "experimental.custom_args_module": ("", OWN_KEYS, LEAVE_OUT),
    "debug.deterministic_warn_only": (
        *(False, "training.deterministic raises where an operation is not"),
        LEAVE_OUT,
    ),
}
"""Keys that ask for a feature that Meshwright lacks: the value that asks for nothing, the rule and
the fix."""
