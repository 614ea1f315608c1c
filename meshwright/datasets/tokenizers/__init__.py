"""Tokenizers, one file for each kind, behind one interface.

Chat templates are in `datasets/conversations`.
"""
