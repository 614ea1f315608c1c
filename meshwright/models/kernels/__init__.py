"""C++ for CPUs, compiled on the machine that runs it.

Every kernel replaces an operation of torch that gives the same result, so a machine without a
compiler trains the same model. The rules for using one are in `parallelisms/rules`.
"""
