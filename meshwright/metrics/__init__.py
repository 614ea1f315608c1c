"""The metrics of a run: console, files, TensorBoard, Weights & Biases, profiler.

Their values are computed in `train`. A run as one page is in `report`.
"""
