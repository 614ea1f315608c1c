"""What lies on the disk."""

from pathlib import Path


def tree(folder: Path) -> set[str]:
    """Every path below `folder`, for "nothing was written"."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
