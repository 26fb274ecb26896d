"""The system call prctl(2), which Python does not have.

Source: prctl(2), PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import ctypes
import os
import signal

_SET_PARENT_DEATH_SIGNAL = 1


def die_with_parent(parent: int) -> None:
    """Have the system kill this process when the thread that has forked it ends.

    Args:
        parent: process ID of the parent, which may have ended already.

    Raises:
        OSError: the system refused.
    """
    call = ctypes.CDLL(None, use_errno=True).prctl
    call.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    if call(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
