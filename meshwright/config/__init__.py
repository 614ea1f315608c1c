"""The TOML as typed, frozen data, and its errors with line and fix.

Rules that need the mesh are in `parallelisms/rules`, those that need files in `train/resolve.py`.
"""
