"""Sample i of a job, on any mesh: from files or the hub, through tokens, to batches.

The datasets by name are in `sources.py`; the keys that choose one are in `config/training.py`.
"""
