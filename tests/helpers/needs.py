"""Tests that need something which not every machine has."""

import pytest

from meshwright.parallelisms.rules.compile_choice import why_no_compiler
from meshwright.parallelisms.rules.degrees import shards_experts_apart

needs_compiler = pytest.mark.skipif(bool(why_no_compiler()), reason=why_no_compiler())


def skip_without_mesh_of_experts() -> None:
    """For experts on other ranks than the rest of a layer."""
    if not shards_experts_apart():
        pytest.skip("this torch cannot shard experts over a mesh of their own")
