"""`meshwright` for experiments whose runs are `fake_train`'s.

$FAKE_NODE: name of a node of its own, which knows no process of another one, has no locks, and
gives up the lease of another after 3 s.
"""

import errno
import fcntl
import os
import socket

from meshwright.commands.experiment import worker
from meshwright.commands.main import main
from meshwright.system import lease
from tests.helpers import fake_train


def no_lock(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


worker.CHILD = fake_train.CHILD
if node := os.environ.get("FAKE_NODE"):
    socket.gethostname = lambda: node
    fcntl.flock = fcntl.lockf = no_lock
    lease.LEASE_S, lease.BEAT_S, lease.STUCK_S = 3.0, 0.5, 0.5
main()
