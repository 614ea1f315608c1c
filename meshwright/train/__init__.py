"""The job: preflight, set up, loop, step, end. `job.py` is it, top to bottom.

The ranks are started in `launch`. Whatever can be used without a job is in a folder of its own.
"""
