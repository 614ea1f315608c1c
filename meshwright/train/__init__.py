"""The job: resolve, set up, loop, step, end. `job.py` is it, top to bottom.

The ranks are started in `launch`. Parts that work without a job are in other folders.
"""
