"""Print docs/config_reference.md, every key of the config.

python -m scripts.config_reference > docs/config_reference.md
"""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.config.fields import SECTIONS, KeyEntry, entries, summary
from meshwright.system.errors import as_toml

PRESETS = Path(__file__).parents[1] / "train_configs"
HEAD = """# Configuration reference

Every key with its type, its default and an example, which works as it is at the top of a TOML.
Below the section's header, leave out the first part of the key. `meshwright config --help SECTION`
prints the same, and [Configure a run](configuration.md) explains how a config is put together.
Made from `meshwright/config/job_config.py` by `python -m scripts.config_reference`."""

EXAMPLES = {
    "job.dump_folder": '"outputs/my_job"',
    "job.description": '"the first try with twice the learning rate"',
    "model.name": '"qwen3"',
    "job.max_run_seconds": "3600",
    "model.args": "{n_layers = 4, rope_theta = 500000.0}",
    "model.frozen": '["tok_embeddings.*", "layers.[01].*"]',
    "model.tokenizer_type": '"characters"',
    "model.bos_token": '"<s>"',
    "model.eos_token": '"</s>"',
    "training.dataset_path": '"my_texts/*.txt"',
    "training.dataset_subset": '"sample-10BT"',
    "training.dataset_revision": '"main"',
    "training.dataset_split": '"train"',
    "training.dataset_column": '"content"',
    "training.dataset_where": """["language == 'en'", "len(text) > 200"]""",
    "training.datasets": '[{dataset = "text", dataset_path = "a/*.txt", weight = 1.0}, '
    '{dataset = "text", dataset_path = "b/*.txt", weight = 0.5}]',
    "training.max_bad_records": "10",
    "training.token_cache_folder": '"/scratch/tokens"',
    "training.fp32_modules": '["output"]',
    "training.stages": "[{until_tokens = 1000000}, {lr = 1e-4}]",
    "optimizer.groups": '[{parameters = ["*norm.weight"], lr_scale = 0.5}]',
    "optimizer.qk_clip_threshold": "100.0",
    "lr_scheduler.total_steps": "10000",
    "experts.sequence_balance_loss": "1e-4",
    "experts.bias_update_rate": "1e-3",
    "experts.router_z_loss": "1e-3",
    "parallelism.pipeline_parallel_stages_per_rank": "2",
    "parallelism.module_fqns_per_model_part": '[["tok_embeddings", "layers.0"], '
    '["layers.1", "norm", "output"]]',
    "activation_checkpoint.selective_ac_option": '"2"',
    "activation_checkpoint.saved_ops": '["aten.mm"]',
    "validation.datasets": '[{dataset = "text", dataset_path = "held_out/*.txt"}]',
    "checkpoint.load_step": "100",
    "checkpoint.average.window_tokens": "1000000",
    "metrics.wandb_entity": '"my-team"',
    "metrics.wandb_name": '"my-run"',
    "model.tokenizer_path": '"models/Llama-3.2-1B"',
    "model.chat_template_path": '"llama3"',
    "training.dataset": '"text"',
    "training.dataset_separator": '"\\\\n\\\\n"',
    "training.max_documents": "10000",
    "training.validation_fraction": "0.02",
    "training.loss_chunk_tokens": "1024",
    "training.shuffle_window": "1024",
    "training.stream_shards": "128",
    "training.seed": "1",
    "optimizer.beta2": "0.99",
    "bad_steps.spike_std": "6.0",
    "lr_scheduler.decay_ratio": "0.2",
    "lr_scheduler.decay_start": "8000",
    "parallelism.fsdp_prefetch_layers": "2",
    "parallelism.data_parallel_shard_degree": "8",
    "activation_checkpoint.memory_budget": "0.3",
    "validation.sample_prompts": '["Once upon a time"]',
    "validation.dataset_path": '"held_out/*.txt"',
    "checkpoint.keep_every_n_steps": "5000",
    "checkpoint.exclude_from_loading": '["dataloader"]',
    "checkpoint.initial_load_path": '"models/Llama-3.2-1B"',
    "checkpoint.initial_load_upcycle_noise": "0.01",
    "checkpoint.average.decay": "0.999",
    "metrics.wandb_project": '"my-project"',
    "metrics.peak_tflops": "989.0",
    "experimental.custom_import": '"my_package.my_model"',
    "comm.init_timeout_seconds": "1800",
    "comm.train_timeout_seconds": "600",
}
"""Of keys that neither a preset sets nor a rule can show: TOML of a value."""

WITHOUT_EXAMPLE = ("job.config_file", "training.mix_file")
"""A TOML can't set the first one, and the second needs `dataset` beside it."""


def page() -> Iterator[str]:
    """Lines of Markdown; a key that means the same in two sections is explained in the first."""
    yield HEAD
    explained, used = dict[KeyEntry, str](), _used_by_presets()
    for section, declared in SECTIONS.items():
        yield f"\n## {section}\n"
        yield summary(declared).removeprefix(f"[{section}] ")
        for entry in entries(declared):
            if explained.setdefault(entry, section) != section:
                continue
            key = f"{section}.{entry.name}"
            kind = entry.kind.replace("|", "`, `")
            yield f"\n### {key}\n"
            facts = f"`{kind}`, default `{entry.default}`"
            if key not in WITHOUT_EXAMPLE:
                facts += f", for example `{key} = {_example(key, entry, used)}`"
            yield facts
            yield f"\n{entry.text}"
        for other in SECTIONS:
            same = [e.name for e in entries(declared) if explained[e] == other != section]
            if same:
                yield f"\nAs in [{other}](#{other}): `{'`, `'.join(same)}`."


def _example(key: str, entry: KeyEntry, used: Mapping[str, str]) -> str:
    """Return the TOML of a value that differs from the default, if there is an obvious one."""
    if key in EXAMPLES:
        return EXAMPLES[key]
    if used.get(key, entry.default) != entry.default:
        return used[key]
    if entry.kind == "true|false":
        return "false" if entry.default == "true" else "true"
    if "|" in entry.kind:
        return next(f'"{v}"' for v in entry.kind.split("|") if v not in entry.default)
    return entry.default.replace("'", '"')


def _used_by_presets() -> dict[str, str]:
    """Return the value that the first preset gives each key, in TOML."""
    used = dict[str, str]()

    def walk(table: Mapping[str, Any], prefix: str = "") -> None:
        for name, value in table.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{name}.")
            else:
                used.setdefault(f"{prefix}{name}", as_toml(value).replace("'", '"'))

    for preset in sorted(PRESETS.glob("*.toml")):
        walk(tomllib.loads(preset.read_text("utf-8")))
    return used


if __name__ == "__main__":
    print("\n".join(page()))
