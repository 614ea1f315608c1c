"""transformers' Trainer on its own Llama, fused AdamW, SDPA."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path = [p for p in sys.path if Path(p).resolve() != Path(__file__).parent]  # its own name
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

sys.path.insert(0, str(Path(__file__).parent))
from workload import BETAS, LR, Stopwatch, fill, from_command_line, random_tokens  # noqa: E402


class WatchedTrainer(Trainer):
    """Takes batches in their order, and notes every loss; labels are next tokens already."""

    loss = torch.tensor(0.0)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: object, **__: object) -> Any:
        """Return the mean loss of a batch."""
        labels = inputs.pop("labels")
        self.loss = model(**inputs, labels=labels, shift_labels=labels).loss
        return self.loss

    def _get_train_sampler(self, *_: object) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Mark(TrainerCallback):
    """Notes the end of every step."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch, self.trainer = watch, None

    def on_step_end(self, *_: object, **__: object) -> None:
        """A step is over."""
        self.watch.step(self.trainer.loss)


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
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(watch.device)
    fill(model.named_parameters(), head=w.dim // w.n_heads)
    # every rank gets the same batches, as those of other contenders do
    samples = random_tokens(w, w.steps).repeat_interleave(w.ranks, 0).flatten(0, 1)
    data = [{"input_ids": sample[:-1], "labels": sample[1:]} for sample in samples]
    mark = Mark(watch)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=w.batch,
            max_steps=w.steps,
            learning_rate=LR,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            adam_beta2=BETAS[1],
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
        mark.trainer = WatchedTrainer(model, args, train_dataset=data, callbacks=[mark])
        mark.trainer.train()
    watch.report()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
