"""Leases of processes that a test cannot start."""

from pathlib import Path

FAR = {"host": "far", "pid": 2**30}
"""A node that cannot be seen from here, and no number of ours."""


def rewrite(file: Path, **values: object) -> None:
    """Put another lease in the place of one, as a process does that takes it; None: without."""
    head, *lines = file.read_text().splitlines()
    fields = dict(line.split("=", 1) for line in lines) | values
    named = [f"{key}={value}" for key, value in fields.items() if value is not None]
    (own := file.with_name("rewritten")).write_text("\n".join([head, *named, ""]))
    own.replace(file)
