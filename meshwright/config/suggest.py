"""The key that an unknown one probably stands for, or silence."""

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

from meshwright.config.fields import Key, all_keys, find_section
from meshwright.config.job_config import JobConfig

_WORDS = {
    "optimizer.lr": "learning_rate lr_max max_lr peak_lr base_lr",
    "optimizer.weight_decay": "wd l2 adam_weight_decay",
    "optimizer.beta1": "adam_beta1 adam_b1 b1 momentum",
    "optimizer.beta2": "adam_beta2 adam_b2 b2",
    "optimizer.beta1 and optimizer.beta2": "betas adam_betas",
    "optimizer.eps": "adam_epsilon adam_eps epsilon",
    "optimizer.name": "optim opt optimizer_type optimizer_name",
    "training.steps": (
        "max_steps num_steps train_steps total_steps training_steps max_iters train_iters "
        "num_iterations max_iterations iterations iters num_train_steps num_training_steps n_steps "
        "max_train_steps total_iterations"
    ),
    "training.max_epochs": "epochs num_epochs n_epochs num_train_epochs total_epochs",
    "training.local_batch_size": (
        "micro_batch_size microbatch_size per_device_train_batch_size per_device_batch_size "
        "device_batch_size mbs train_micro_batch_size_per_gpu batch_size_per_gpu "
        "local_train_batch_size"
    ),
    "training.local_batch_size (per rank) or training.global_batch_size (per optimizer step)": (
        "batch_size train_batch_size batchsize bs bsz"
    ),
    "training.global_batch_size": "gbs total_batch_size effective_batch_size global_bs",
    "training.global_batch_size (sequences per optimizer step; accumulation follows from it)": (
        "gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps "
        "grad_accumulation_steps accumulate_grad_batches accumulation_steps num_microbatches "
        "gradient_accumulation_iters"
    ),
    "training.max_norm": (
        "grad_clip max_grad_norm clip_grad clip_grad_norm gradient_clip_val gradient_clipping "
        "clip_norm gradient_clip grad_norm_clip clip_gradients grad_clip_norm clip"
    ),
    "training.seq_len": (
        "seq_length sequence_length sequence_len context_length context_len max_seq_len ctx_len "
        "max_seq_length block_size max_length max_sequence_length context_size n_ctx "
        "model_max_length max_position_embeddings context_window"
    ),
    "training.mixed_precision_param": (
        "precision mixed_precision bf16 amp amp_dtype param_dtype compute_dtype torch_dtype "
        "autocast autocast_dtype mixed_precision_dtype bfloat16"
    ),
    "training.mixed_precision_reduce": "reduce_dtype grad_reduce_dtype reduction_dtype",
    "training.seed": "random_seed manual_seed rng_seed data_seed",
    "training.dataset": "dataset_name train_dataset dataset_id train_dataset_name data",
    "training.dataset_path": (
        "data_path data_dir train_file data_files train_data train_path dataset_dir data_folder "
        "train_data_path data_file"
    ),
    "training.dataset_column": "text_column text_field text_key content_field dataset_text_field",
    "training.dataset_subset": "dataset_config dataset_config_name subset_name",
    "training.mask_documents": (
        "document_mask doc_mask document_masking intra_document_masking reset_attention_mask "
        "block_causal"
    ),
    "training.shuffle_window": "shuffle_buffer shuffle_buffer_size buffer_size",
    "training.enable_cpu_offload": "cpu_offload offload offload_params fsdp_cpu_offload",
    "training.deterministic": "full_determinism use_deterministic_algorithms",
    "training.datasets": "data_mix mixture data_mixture data_blend",
    "model.tokenizer_path": (
        "tokenizer tokenizer_name tokenizer_model tokenizer_file hf_assets_path vocab_file "
        "tokenizer_name_or_path tokenizer_dir tokenizer_folder"
    ),
    "model.flavor": "size model_size variant",
    "model.name": "architecture model_type model_name arch",
    "model.frozen": "freeze freeze_layers frozen_parameters",
    "model.chat_template_path": "chat_template",
    "model.args.dim": "dim hidden_size d_model n_embd embed_dim model_dim emb_dim",
    "model.args.n_layers": "n_layers num_layers num_hidden_layers n_layer depth",
    "model.args.n_heads": "n_heads num_heads num_attention_heads n_head",
    "model.args.n_kv_heads": "n_kv_heads num_key_value_heads num_kv_heads num_query_groups",
    "model.args.vocab_size": "vocab_size padded_vocab_size",
    "model.args.hidden_dim": "hidden_dim ffn_hidden_size intermediate_size ffn_dim mlp_dim",
    "model.args.rope_theta": "rope_theta rotary_base rope_base",
    "model.args.norm_eps": "norm_eps rms_norm_eps layer_norm_eps norm_epsilon",
    "model.args.tie_embeddings": "tie_embeddings tie_word_embeddings weight_tying tied_embeddings",
    "job.dump_folder": (
        "output_dir out_dir save_dir output_folder run_dir output_path save_folder results_dir "
        "dump_dir experiment_dir output"
    ),
    "job.description": "run_name experiment_name exp_name job_name",
    "job.max_run_seconds": "max_time time_limit max_duration exit_duration walltime",
    "checkpoint.interval": (
        "save_steps save_interval save_every checkpoint_interval ckpt_interval save_freq "
        "checkpoint_every save_every_n_steps checkpoint_freq checkpoint_steps"
    ),
    "checkpoint.keep_latest_k": (
        "save_total_limit keep_last keep_last_n save_top_k max_checkpoints max_to_keep"
    ),
    "checkpoint.enable (a job with it resumes by itself)": (
        "resume resume_from_checkpoint resume_from auto_resume enable_checkpoint save_checkpoints "
        "checkpointing"
    ),
    "checkpoint.initial_load_path": (
        "init_from pretrained pretrained_path pretrained_model load_path model_name_or_path "
        "init_checkpoint load_from finetune_from base_model pretrained_checkpoint load_checkpoint"
    ),
    "checkpoint.async_mode": "async_save async_checkpoint async_checkpointing",
    "metrics.log_freq": (
        "logging_steps log_interval log_every log_every_n_steps log_steps print_freq "
        "logging_interval print_every"
    ),
    "metrics.enable_wandb": "wandb use_wandb wandb_log enable_wandb_logging",
    "metrics.enable_tensorboard": "tensorboard use_tensorboard tensorboard_log",
    "metrics.enable_wandb or metrics.enable_tensorboard": "report_to logger loggers",
    "validation.enable": "do_eval evaluate enable_validation eval_enabled do_validation",
    "validation.freq": (
        "eval_steps eval_interval eval_every val_interval val_check_interval eval_freq "
        "validation_interval val_freq validation_freq eval_every_n_steps evaluation_interval"
    ),
    "validation.num_samples": (
        "eval_iters val_iters eval_samples max_eval_samples eval_batches limit_val_batches "
        "val_samples"
    ),
    "validation.dataset": "eval_dataset val_dataset validation_dataset",
    "validation.dataset_path": "eval_file val_file validation_file val_path eval_path val_data",
    "lr_scheduler.warmup_steps": (
        "warmup warmup_iters num_warmup_steps lr_warmup_steps lr_warmup_iters warmup_iterations"
    ),
    "lr_scheduler.warmup_steps (a number of steps)": (
        "warmup_ratio warmup_fraction lr_warmup_fraction warmup_pct"
    ),
    "lr_scheduler.decay_type": (
        "lr_scheduler_type lr_decay_style lr_schedule schedule scheduler scheduler_type lr_decay "
        "lr_decay_type schedule_type"
    ),
    "lr_scheduler.min_lr_factor (a fraction of optimizer.lr)": (
        "min_lr lr_min final_lr min_lr_ratio eta_min lr_end min_learning_rate lr_final"
    ),
    "lr_scheduler.decay_ratio (a fraction of training.steps)": (
        "decay_steps lr_decay_iters lr_decay_steps cooldown_steps decay_fraction num_decay_steps"
    ),
    "parallelism.tensor_parallel_degree": (
        "tp tp_size tp_degree tensor_parallel tensor_parallel_size tensor_model_parallel_size "
        "tensor_parallelism"
    ),
    "parallelism.pipeline_parallel_degree": (
        "pp pp_size pp_degree pipeline_parallel pipeline_parallel_size "
        "pipeline_model_parallel_size pipeline_parallelism"
    ),
    "parallelism.context_parallel_degree": (
        "cp cp_size cp_degree context_parallel context_parallel_size context_parallelism"
    ),
    "parallelism.data_parallel_shard_degree": (
        "dp dp_size dp_shard fsdp fsdp_size fsdp_degree data_parallel_size data_parallel_degree "
        "dp_shard_degree data_parallel"
    ),
    "parallelism.data_parallel_replicate_degree": (
        "dp_replicate hsdp ddp num_replicas replicas dp_replicate_degree"
    ),
    "parallelism.pipeline_parallel_schedule": "pipeline_schedule pp_schedule",
    "parallelism.fsdp_reshard_after_forward": "reshard_after_forward zero_stage sharding_strategy",
    "activation_checkpoint.mode": (
        "gradient_checkpointing activation_checkpointing recompute recompute_granularity remat "
        "grad_checkpointing use_gradient_checkpointing recompute_activations ac_mode"
    ),
    "compile.enable": "torch_compile compile_model use_compile use_torch_compile",
    "profiling.enable_profiling": "profile profiler use_profiler profiling",
    "comm.init_timeout_seconds or comm.train_timeout_seconds": (
        "timeout nccl_timeout ddp_timeout dist_timeout timeout_seconds distributed_timeout_minutes"
    ),
    "bad_steps.policy": "skip_nan nan_policy skip_bad_steps check_for_nan_in_loss",
}


SYNONYMS: dict[str, dict[str, str]] = {
    "": {name: key for key, names in _WORDS.items() for name in names.split()},
    "validation": {
        "steps": "validation.num_samples (sequences of each dataset) or training.steps",
        "interval": "validation.freq or checkpoint.interval",
        "batch_size": "training.local_batch_size (validation has the same)",
        "local_batch_size": "training.local_batch_size (validation has the same)",
        "seq_len": "training.seq_len (validation has the same)",
    },
    "checkpoint": {
        "freq": "checkpoint.interval or validation.freq",
        "steps": "checkpoint.interval or training.steps",
        "path": "checkpoint.folder (inside job.dump_folder) or checkpoint.initial_load_path",
        "dir": "checkpoint.folder (inside job.dump_folder)",
    },
    "metrics": {"interval": "metrics.log_freq", "steps": "metrics.log_freq or training.steps"},
    "lr_scheduler": {
        "name": "lr_scheduler.decay_type or optimizer.name",
        "type": "lr_scheduler.decay_type",
    },
    "optimizer": {"type": "optimizer.name"},
    "parallelism": {"fsdp": "parallelism.data_parallel_shard_degree (1: nothing is sharded)"},
    "activation_checkpoint": {"enable": "activation_checkpoint.mode"},
}
"""By section ("": any): their name, then our key."""


_ADVICE = {
    "leave it out: the number of ranks belongs to the launch, --ngpu N or NGPU=N": (
        "gpus num_gpus devices n_gpus nproc_per_node ngpu world_size num_processes"
    ),
    "leave it out: the number of machines belongs to the launch, --nnodes N or NNODES=N": (
        "nodes num_nodes nnodes num_machines"
    ),
    "leave it out: every rank reads ahead by itself": (
        "num_workers dataloader_num_workers pin_memory prefetch_factor n_workers"
    ),
    "leave it out: meshwright does not support it": (
        "dropout attention_dropout hidden_dropout label_smoothing z_loss"
    ),
    "list the others, which are not trained, in model.frozen": (
        "trainable_parameters trainable trainable_layers"
    ),
    "leave it out: fp16 is not supported; training.mixed_precision_param is bfloat16 or float32": (
        "fp16 loss_scale fp16_opt_level grad_scaler"
    ),
    "leave it out: parallelism.tensor_parallel_degree above 1 also splits the sequence": (
        "sequence_parallel enable_sequence_parallel"
    ),
    "leave it out: the launcher sets it": "local_rank rank master_addr master_port",
    "leave it out: context parallelism always gathers keys and values": (
        "context_parallel_attention context_parallel_rotate_method"
    ),
}


NOT_HERE = {name: advice for advice, names in _ADVICE.items() for name in names.split()}
"""Names that stand for no key of ours, and advice."""


SECTIONS = {
    name: section
    for section, names in {
        "training": "train trainer data dataset dataloader datamodule run",
        "optimizer": "optim opt adamw adam",
        "lr_scheduler": "scheduler schedule lrschedule learningrate",
        "parallelism": "parallel mesh distributed fsdp parallelization",
        "activation_checkpoint": "ac recompute gradientcheckpointing",
        "compile": "torchcompile",
        "validation": "eval evaluation val",
        "checkpoint": "ckpt save saving checkpoints",
        "metrics": "logging log wandb tensorboard logger",
        "profiling": "profiler profile",
        "comm": "communication nccl comms",
        "model": "network architecture tokenizer",
        "job": "experiment general",
    }.items()
    for name in names.split()
}


ALIKE = 0.8
"""Least share of equal letters of a typing error; "lrr" and "lr" have 0.8."""


ALIKE_SYNONYM = 0.88


MOST_CHOICES = 4


def suggest_key(key: Sequence[str]) -> str:
    """Return advice on an unknown key, as the text of a `fix:` line.

    Args:
        key: its parts: section, ..., name; or the name alone if it stands outside a section.
    """
    *tables, name = key
    inside = tuple(tables)
    section = find_section(inside)
    siblings = list(section.model_fields) if inside and section is not None else []
    if name in SYNONYMS.get(".".join(inside), {}):
        return f"did you mean {SYNONYMS['.'.join(inside)][name]}?"
    by_plain = {_plain(sibling): sibling for sibling in siblings}
    if _plain(name) in by_plain:
        return _did_you_mean([(*inside, by_plain[_plain(name)])])
    parts_of = [sibling for sibling in siblings if f"_{name}_" in f"_{sibling}_"]
    elsewhere = [found for found, _ in all_keys() if found[-1] == _plain(name)]
    choices = [*((*inside, sibling) for sibling in parts_of), *elsewhere]
    if 0 < len(choices) <= MOST_CHOICES:
        return _did_you_mean(choices)
    known = {_bare(synonym): target for synonym, target in SYNONYMS[""].items()}
    absent = {_bare(word): why for word, why in NOT_HERE.items()}
    bare = _bare(name)
    if bare in absent:
        return absent[bare]
    if bare in known:
        return f"did you mean {_in_section(known[bare], inside, siblings)}?"
    if near := nearest(name, siblings):
        return _did_you_mean([(*inside, near)])
    if near := nearest(name, [found[-1] for found, _ in all_keys()]):
        return _did_you_mean([found for found, _ in all_keys() if found[-1] == near])
    if near := nearest(bare, [word for word in known if len(word) > 5], ALIKE_SYNONYM):
        return f"did you mean {known[near]}?"
    if name in JobConfig.model_fields:
        has_switch = "enable" in _names_in(name)
        return f"did you mean {name}.enable?" if has_switch else f"write [{name}]"
    place = inside[0] if inside and inside[0] in JobConfig.model_fields else ""
    return f"leave it out; `meshwright config --help{place and ' '}{place}` documents " + (
        f"the keys of [{place}]" if place else "every key"
    )


def suggest_section(name: str, keys: Iterable[str]) -> str:
    """Return advice on an unknown section, as the text of a `fix:` line.

    Args:
        keys: the section's keys.
    """
    sections = list(JobConfig.model_fields)
    if _bare(name) in SECTIONS:
        return f"did you mean {SECTIONS[_bare(name)]}?"
    if near := nearest(name, sections):
        return f"did you mean {near}?"
    wanted = set(keys)
    holding = [s for s in sections if wanted and wanted <= _names_in(s)]
    if len(holding) == 1:
        return f"did you mean {holding[0]}?"
    return f"leave it out; the sections are {', '.join(sections)}"


def nearest(
    wrong: str, valid: Iterable[str], alike: float = ALIKE, *, may_lack_digits: bool = False
) -> str | None:
    """Return the one of `valid` that `wrong` is a typing error of, if there is one.

    Args:
        may_lack_digits: "bfloat" may be "bfloat16". Otherwise digits have to be equal: beta1 is no
            typing error of beta2, nor size_8b of size_3b.
    """
    plain = _plain(wrong)
    best, most = None, alike
    for name in valid:
        likeness = _likeness(plain, _plain(name))
        digits = _digits(wrong)
        if likeness >= most and (digits == _digits(name) or (may_lack_digits and not digits)):
            best, most = name, likeness
    return best


def _likeness(a: str, b: str) -> float:
    """Share of equal letters; one wrong letter, or two in each other's place, are always alike."""
    ratio = SequenceMatcher(None, a, b).ratio()
    if len(a) != len(b) or len(a) < 4:
        return ratio
    wrong = sum(map(str.__ne__, a, b))
    return max(ratio, 0.9) if wrong == 1 or (wrong == 2 and sorted(a) == sorted(b)) else ratio


def _in_section(target: str, inside: Key, siblings: Sequence[str]) -> str:
    """`target`, or the key of that name in the section at hand."""
    if " " in target:  # several
        return target
    name = target.rpartition(".")[2]
    return ".".join((*inside, name)) if name in siblings else target


def _did_you_mean(keys: Sequence[Key]) -> str:
    names = sorted({".".join(key) for key in keys})
    return f"did you mean {' or '.join(names)}?"


def _names_in(section: str) -> set[str]:
    declared = find_section((section,))
    assert declared is not None
    return set(declared.model_fields)


def _plain(name: str) -> str:
    """As keys are written: `seq-len`, `Seq_Len` and `seqLen` are one."""
    spaced = "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name))
    spaced = name if name.isupper() or "_" in name or "-" in name else spaced
    return spaced.lower().replace("-", "_")


def _bare(name: str) -> str:
    return _plain(name).replace("_", "")


def _digits(name: str) -> str:
    return "".join(character for character in name if character.isdigit())
