"""Tokenizers behind one interface, and the chat templates that go with them.

`chat` makes tokens of conversations; `datasets/encoding` of documents.
"""
