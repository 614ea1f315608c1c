"""Llama in the form of torchtitan's checkpoints: names. Free of torch.

The order of a head's rows is ours. Source: pytorch/torchtitan, its models llama and llama3.
"""

from collections.abc import Iterator

PREFIXES: tuple[str, ...] = ("", "model.")
"""Possible prefixes: a saved whole state has the model beside the rest, or below "model"."""

RENAMED = {
    "attention.wq.": "attention.qkv_linear.wq.",
    "attention.wk.": "attention.qkv_linear.wk.",
    "attention.wv.": "attention.qkv_linear.wv.",
    "output.": "lm_head.",
}
"""Parts of our names, and their names from its version 0.3 on."""

OF_MODEL: tuple[str, ...] = ("tok_embeddings.", "layers.", "norm.", "output.", "lm_head.")
"""Beginnings of parameters' names."""


def names(ours: str) -> Iterator[str]:
    """Yield a parameter's possible names there, without prefix; see `TorchtitanForm`."""
    yield ours
    for part, renamed in RENAMED.items():
        if part in ours:
            yield ours.replace(part, renamed)
