"""What lies on the disk."""

from pathlib import Path


def tree(folder: Path) -> set[str]:
    """Every path below `folder`, for "nothing was written"."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def flip_bit(path: Path, position: int) -> None:
    """Change the bit at `position`, counted from the first of the file."""
    with open(path, "r+b") as file:
        file.seek(position // 8)
        byte = file.read(1)[0]
        file.seek(position // 8)
        file.write(bytes([byte ^ 1 << position % 8]))
