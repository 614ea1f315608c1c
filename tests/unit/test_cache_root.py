"""Where caches of tokens are kept."""

from pathlib import Path

import pytest

from meshwright.datasets.token_cache.tokenizing import cache_root


def test_a_given_folder_needs_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root("/data/caches") == Path("/data/caches")
