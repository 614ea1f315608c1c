"""torchtitan's TOMLs, read as ours.

Their checkpoints are in `checkpoint/conversion`.
"""
