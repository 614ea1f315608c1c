"""The rules that a config must keep to run on a mesh, and the values that follow. Imports no torch.

Rules are rows of tables (`config/rules.py`), judged by `train/resolve.py`. They read no files.
"""
