"""A kernel of attention for CPUs, in C++: what makes a whole step at least 1.1 times as fast there.

`attention.apply_cpu_attention` installs it, as `compile.cpu_attention` says. No model and no loop
knows of it, it replaces nothing of torch, and GPUs never come here.
"""
