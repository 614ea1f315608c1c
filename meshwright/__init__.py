"""Meshwright: config-driven LLM pre-training on native PyTorch."""

__version__ = "0.1.0"
