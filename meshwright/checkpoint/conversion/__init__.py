"""Weights from and to Hugging Face, with their tokenizers.

Names of tensors in another format belong to the model's family, in `models/family.py`.
"""
