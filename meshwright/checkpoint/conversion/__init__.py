"""Weights from and to Hugging Face, with their tokenizers.

Names of tensors in a different format belong to the model's family, in `models/family.py`.
"""
