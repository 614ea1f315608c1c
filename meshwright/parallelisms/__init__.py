"""FSDP2, tensor, context and pipeline parallelism, activation checkpointing and compile.

Each is applied to a model from outside, in the order of `parallelize.py`. Files of
`models` import nothing from here, and the step is in `train/trainer.py`.
"""
