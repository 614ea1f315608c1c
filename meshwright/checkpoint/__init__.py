"""Checkpoints of this project: atomic, and loadable on any mesh.

Weights of other formats are in `conversion`. `train/resume.py` says what a job puts into one.
"""
