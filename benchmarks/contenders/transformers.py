"""transformers' Trainer on its own Llama, fused AdamW, SDPA."""

import os
import sys
import tempfile
from pathlib import Path

sys.path = [p for p in sys.path if Path(p).resolve() != Path(__file__).parent]  # its own name
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

sys.path.insert(0, str(Path(__file__).parent))
from workload import Stopwatch, from_command_line, random_tokens  # noqa: E402


def main() -> None:
    """Train, and print the result."""
    w, watch = from_command_line(), Stopwatch()
    config = LlamaConfig(
        vocab_size=w.vocab,
        hidden_size=w.dim,
        intermediate_size=w.hidden_dim,
        num_hidden_layers=w.n_layers,
        num_attention_heads=w.n_heads,
        num_key_value_heads=w.n_kv_heads,
        max_position_embeddings=w.seq_len,
        attn_implementation="sdpa",
        use_cache=False,
    )
    samples = random_tokens(w, w.steps * w.ranks)[..., :-1].flatten(0, 1)
    data = [{"input_ids": sample, "labels": sample} for sample in samples]

    class Mark(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            watch.step()

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=w.batch,
            max_steps=w.steps,
            learning_rate=8e-4,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            bf16=w.dtype == "bfloat16",
            torch_compile=w.compile,
            use_cpu=watch.device.type == "cpu",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        Trainer(LlamaForCausalLM(config), args, train_dataset=data, callbacks=[Mark()]).train()
    watch.report()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
