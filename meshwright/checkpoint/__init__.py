"""Checkpoints of this project: atomic, and loadable on any mesh.

`store` lists and opens them, for a command as for all ranks of a job; `manager` saves and loads
those of a job. Weights of other formats are in `conversion`. `train/resume.py` says what a job puts
into one.
"""
