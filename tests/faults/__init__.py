"""Faults that other frameworks had, planted into a copy of the package: does `prove` find them?

python -m tests.faults                    (all: prints found, named, seconds)
python -m tests.faults --only norm_of_copies
"""
