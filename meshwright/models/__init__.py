"""Models for a single device, in plain PyTorch: they import torch and each other.

No mesh, config or trainer is used here. Parallelism is applied from outside, in `parallelisms`.
"""
