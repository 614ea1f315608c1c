"""Checks of the numbers that users write in `model.args`. Free of torch."""

LARGEST = 2**31
"""Above this a dimension is a slip of the finger."""


def check_positive(args: object, *names: str) -> None:
    """Raise `ValueError` unless every field is positive and no slip of the finger."""
    for name in names:
        if not 0 < getattr(args, name) < LARGEST:
            raise ValueError(f"{name} = {getattr(args, name)}: must be positive and below 2^31")


def check_window(window: int) -> None:
    """Raise `ValueError` unless a window holds the token itself and is no slip of the finger."""
    if not 0 < window < LARGEST:
        nearest = 1 if window < 1 else LARGEST - 1
        rule = "must be positive and below 2^31"
        raise ValueError(f"window = {window}: {rule}: use {nearest}")
