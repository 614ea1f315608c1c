"""The rules that a config must keep to run on a mesh. Imports no torch.

A rule takes sections of the config and sizes of the model, and raises `ConfigError`. Files on disk
are checked in `train/resolve.py`.
"""
