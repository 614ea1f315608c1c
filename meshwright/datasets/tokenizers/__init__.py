"""Tokenizers, one file for each kind, behind one interface.

`chat` makes tokens of conversations; `datasets/encoding` of documents.
"""
