"""Errors, log, files, processes and the devices of this machine: all that is not about training.

It imports nothing of the other folders.
"""
