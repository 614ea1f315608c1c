"""The TOMLs that come with meshwright, by name."""

import os
from difflib import get_close_matches
from pathlib import Path

from meshwright.errors import ConfigError, did_you_mean, out_of_reach, where_it_ends

FOLDER = Path(__file__).parents[1] / "train_configs"
"""In the repository a link to `train_configs/`; in a wheel a folder."""


def preset_names() -> list[str]:
    """Return the names of all presets."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find_config(name: str, folder: Path = Path()) -> Path:
    """Return the TOML that `name` stands for: a path, or a preset with or without `.toml`.

    Args:
        folder: where a relative path starts.

    Raises:
        ConfigError: if there is neither.
    """
    written = os.path.expanduser(name)
    if why := out_of_reach(written if written.startswith("~") else folder / written):
        raise ConfigError("", f"{name}: {why}")
    path, stem = folder / written, name.removesuffix(".toml")
    is_preset = stem in preset_names()
    if path.exists() and not (is_preset and path.is_dir()):
        return path
    if is_preset:
        return FOLDER.resolve() / f"{stem}.toml"
    if "://" in name:
        raise ConfigError("", f"{name}: is an address\n  fix: fetch the file, and name its path")
    if Path(name).parent != Path():
        raise ConfigError(
            "", f"{name}: no such file\n  fix: {where_it_ends(os.path.normpath(path))}"
        )
    here = [file.name for file in folder.glob("*.toml")]
    near = get_close_matches(name, here, n=1, cutoff=0.75)
    fix = f"did you mean {near[0]}?" if near else did_you_mean(stem, preset_names())
    raise ConfigError("", f"{name}: neither a file here nor a preset\n  fix: {fix}")
