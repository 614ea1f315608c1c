"""Starts the ranks of a machine, watches them, and reports the one that hangs.

The function that a rank runs is in `train/main.py`.
"""
