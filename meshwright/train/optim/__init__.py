"""Optimizers, parameter groups, learning-rate schedules and the norm of the gradients.

When a step is taken or skipped is decided in `train/trainer.py` and `train/bad_steps.py`.
"""
