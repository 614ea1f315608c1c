"""Code in C++, compiled on the machine that runs it."""
