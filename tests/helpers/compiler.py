"""Marks tests that need a C++ compiler, by which inductor compiles."""

import pytest

from meshwright.parallelisms.rules.compile_choice import why_no_compiler

needs_compiler = pytest.mark.skipif(bool(why_no_compiler()), reason=why_no_compiler())
