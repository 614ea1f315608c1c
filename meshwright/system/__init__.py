"""Errors, log, files, processes and the devices of this machine: everything that is not training.

It imports nothing of the other folders.
"""
