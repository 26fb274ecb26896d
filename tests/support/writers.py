"""A process that holds the lease of a device until a test kills it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

from dlfs.block.lease import LeaseTimes
from tests.support.scripts import hear, running

PURPOSE = "a dying writer"
"""Name of the writer in its lock record."""

_PROGRAM = f"""
import sys
from dlfs.block import SharedNamespaceDevice, open_device
from dlfs.block.lease import LeaseTimes
SharedNamespaceDevice.lease_times = LeaseTimes(*map(float, sys.argv[2].split(",")))
device = open_device(sys.argv[1], writable=True)
device.lock_exclusive("{PURPOSE}")
print("locked", flush=True)
sys.stdin.read()
"""


def format_times(times: LeaseTimes) -> str:
    """Return the durations of a lease as an argument of a program."""
    values = (times.renew_s, times.valid_s, times.drain_s, times.claim_s, times.poll_s)
    return ",".join(map(str, values))


@contextmanager
def locked_writer(uri: str, times: LeaseTimes) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that holds the lease of a device; kill it at the end.

    Args:
        uri: URI of the device.
        times: durations of the process's lease.
    """
    with running(_PROGRAM, uri, format_times(times)) as process:
        assert hear(process) == "locked"
        yield process


def other_writer() -> AbstractContextManager[object]:
    """Writers in this context check no reserved columns, as a writer that is not ours may do."""
    return mock.patch("dlfs.dataset.step_builder.check_reserved")
