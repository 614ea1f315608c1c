"""The TOMLs that come with meshwright, by name."""

from pathlib import Path

from meshwright.errors import ConfigError, did_you_mean, where_it_ends

FOLDER = Path(__file__).parents[1] / "train_configs"
"""In the repository a link to `train_configs/`; in a wheel a folder."""


def preset_names() -> list[str]:
    """Return the names of all presets."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find_config(name: str) -> Path:
    """Return the TOML that `name` stands for: a path, or a preset with or without `.toml`.

    Raises:
        ConfigError: if there is neither.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if "://" in name:
        raise ConfigError("", f"{name}: is an address\n  fix: fetch the file, and name its path")
    if path.parent != Path():
        raise ConfigError("", f"{name}: no such file\n  fix: {where_it_ends(path)}")
    stem = name.removesuffix(".toml")
    if stem in preset_names():
        return FOLDER.resolve() / f"{stem}.toml"
    fix = did_you_mean(stem, preset_names())
    raise ConfigError("", f"{name}: neither a file here nor a preset\n  fix: {fix}")
