"""The TOML as typed, frozen data, and its errors with line and fix.

Rules between keys are in `combinations.py`, rules that need the mesh in `parallelisms/rules`.
"""
