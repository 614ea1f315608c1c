"""Makes the file system of a rank lack something. Python imports it at start, from PYTHONPATH.

FILE_FAULT says which: `slow:SECONDS`, `no_flock:ERRNO`, `no_fsync:ERRNO`, `no_folder_fsync:ERRNO`,
or `blind:FOLDER`, which hides a folder from rank 1 behind an empty one (as root).
"""

import ctypes
import fcntl
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


def _plant(kind, value):
    if kind == "slow":
        for name in ("fsync", "rename", "replace", "mkdir", "unlink"):
            setattr(os, name, _slow(getattr(os, name), float(value)))
    elif kind == "no_flock":
        fcntl.flock = _lacking(int(value))
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
