"""Libraries that a killed job has left unfinished in the cache of torch.compile."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch._inductor.cpu_vec_isa
from torch._inductor.codecache import CppCodeCache

from meshwright.parallelisms import compiled_libraries
from meshwright.parallelisms.compiled_libraries import is_whole, remove_unfinished


@pytest.fixture
def library(tmp_path, monkeypatch) -> Path:
    """A library in a cache of torch's."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CppCodeCache, "cache", {})
    invalid = torch._inductor.cpu_vec_isa.invalid_vec_isa  # else it compiles a test of each
    monkeypatch.setattr(torch._inductor.codecache, "pick_vec_isa", lambda: invalid)
    assert load().one() == 1
    (path,) = tmp_path.glob("*/*.so")
    remove_unfinished.cache_clear()
    return path


def load():
    CppCodeCache.cache.clear()
    return CppCodeCache.load('extern "C" int one() { return 1; }')


def test_an_unfinished_library_is_removed_and_linked_again(library, caplog) -> None:
    caplog.set_level("INFO", "meshwright")
    whole = library.read_bytes()
    remove_unfinished()
    assert library.read_bytes() == whole
    for unfinished in (b"", bytes(len(whole)), whole[:-1], whole[:5000]):
        library.unlink()
        library.write_bytes(unfinished)
        assert not is_whole(library)
        remove_unfinished.cache_clear()
        remove_unfinished()
        assert not library.exists()
        assert "removed 1 unfinished" in caplog.messages[-1]
        load()
        assert is_whole(library)


def test_a_library_that_is_being_linked_stays(library) -> None:
    """By another process, which holds torch's lock of it."""
    library.unlink()  # this process has mapped it
    library.write_bytes(b"")
    (lock,) = library.parents[1].glob(f"locks/{library.name.partition('.')[0]}.lock")
    with open(lock) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        remove_unfinished()
        assert library.exists()
    remove_unfinished.cache_clear()
    remove_unfinished()
    assert not library.exists()


def test_a_library_that_was_finished_meanwhile_stays(library, monkeypatch) -> None:
    """By another process, between the look and its lock."""
    looks = iter([False, True])
    monkeypatch.setattr(compiled_libraries, "is_whole", lambda path: next(looks))
    remove_unfinished()
    assert library.exists()


def test_libraries_of_other_users_stay(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    library = tmp_path / "torchinductor_me/ab/cab.main.so"
    for folder in (library.parent, library.parents[1] / "locks"):
        folder.mkdir(parents=True)
    library.touch()
    for user, stays in ((os.getuid() + 1, True), (os.getuid(), False)):
        monkeypatch.setattr(os, "getuid", lambda user=user: user)
        remove_unfinished.cache_clear()
        remove_unfinished()
        assert library.exists() == stays


def test_what_a_linker_leaves_that_is_killed(library, tmp_path) -> None:
    """Its first bytes come last."""
    source, out = tmp_path / "many.cpp", tmp_path / "many.so"
    functions = (f'extern "C" int f{i}(int x) {{ return x * {i}; }}' for i in range(8_000))
    source.write_text("\n".join(functions))
    subprocess.run(["g++", "-O0", "-fPIC", "-c", source, "-o", tmp_path / "many.o"], check=True)
    command = ["ld", "-shared", tmp_path / "many.o", "-o", out]
    subprocess.run(command, check=True)
    whole = out.read_bytes()
    for share in range(1, 10):
        out.unlink(missing_ok=True)
        with subprocess.Popen(command) as linker:
            while not out.exists() or out.stat().st_size < len(whole) * share / 10:
                if linker.poll() is not None:
                    break
            linker.kill()
        assert is_whole(out) == (out.read_bytes() == whole)
