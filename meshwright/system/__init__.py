"""Errors, log, files, processes and the devices of this machine: everything that isn't training.

It imports nothing of the other folders.
"""
