"""Makes the file system of a rank lack something. Python imports it at start, from PYTHONPATH.

FILE_FAULT says which: `slow:SECONDS`, `no_flock:ERRNO`, `no_fsync:ERRNO`, `no_folder_fsync:ERRNO`,
or `blind:FOLDER`, which hides a folder from rank 1 behind an empty one (as root).
FILE_FAULT_EVERYWHERE says it for all processes, launchers included. It can also be
`passing:ERRNO:TIMES:FOLDER` (files of a folder cannot be read so many times), `idle_flock:0` (a
lock that excludes nobody), or `clock:SECONDS` (a clock that is wrong).
"""

import builtins
import ctypes
import fcntl
import io
import os
import random
import stat
import subprocess
import time

CLONE_NEWNS = 0x20000


def _slow(call, seconds):
    def slowly(*arguments, **options):
        time.sleep(random.uniform(0, seconds))
        return call(*arguments, **options)

    return slowly


def _lacking(number):
    def lacks(*arguments, **options):
        raise OSError(number, os.strerror(number))

    return lacks


def _passing(call, number, times, folder):
    left = [times]

    def may_fail(path, mode="r", *arguments, **options):
        is_there = isinstance(path, str | os.PathLike) and os.fspath(path).startswith(folder)
        if is_there and left[0] > 0 and "r" in str(mode):
            left[0] -= 1
            raise OSError(number, os.strerror(number), os.fspath(path))
        return call(path, mode, *arguments, **options)

    return may_fail


def _plant(kind, value):
    if kind == "slow":
        for name in ("fsync", "rename", "replace", "mkdir", "unlink"):
            setattr(os, name, _slow(getattr(os, name), float(value)))
    elif kind == "no_flock":
        fcntl.flock = _lacking(int(value))
    elif kind == "idle_flock":
        fcntl.flock = lambda *_: None
    elif kind == "passing":
        number, times, folder = value.split(":", 2)
        builtins.open = io.open = _passing(io.open, int(number), int(times), folder)
    elif kind == "clock":
        right = time.time
        time.time = lambda: right() + float(value)
    elif kind == "no_fsync":
        os.fsync = _lacking(int(value))
    elif kind == "no_folder_fsync":
        fsync, lacks = os.fsync, _lacking(int(value))

        def of_files_alone(descriptor):
            is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
            return lacks() if is_folder else fsync(descriptor)

        os.fsync = of_files_alone
    elif kind == "blind" and os.environ["RANK"] == "1":
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", value], check=True)


if "RANK" in os.environ and os.environ.get("FILE_FAULT"):
    _plant(*os.environ["FILE_FAULT"].split(":", 1))
if os.environ.get("FILE_FAULT_EVERYWHERE"):
    _plant(*os.environ["FILE_FAULT_EVERYWHERE"].split(":", 1))
