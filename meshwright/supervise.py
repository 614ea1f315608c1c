"""What keeps a job's processes in order."""

import ctypes
import os
import signal
import sys

import torch.distributed as dist

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent() -> None:
    """Have the kernel kill this rank when torchrun dies, SIGKILL included (Linux only).

    torchrun starts every rank in a session of its own, so nothing else would. A rank without
    torchrun may outlive the shell that started it.
    """
    if sys.platform != "linux" or not dist.is_torchelastic_launched():
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)
