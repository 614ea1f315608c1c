"""Values that a config of before may hold."""

from pathlib import Path

import pytest

from meshwright.config.loader import load_config
from meshwright.system.errors import ConfigError


def test_saves_by_a_process_are_told_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text('[checkpoint]\nasync_mode = "process"\n')
    with pytest.raises(ConfigError, match="old.toml:2: .*async_mode = 'process'.*write .thread"):
        load_config([f"--job.config_file={tmp_path / 'old.toml'}"])
