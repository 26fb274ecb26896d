"""How a worker that another engine starts, such as Slurm, joins an import: by a file.

The coordinator writes its invitation to the file, in a directory that all hosts share. At the end
the file says how the import has ended, for workers that come late. ``join_import`` waits for the
file and runs a worker in this process. A worker that has lost the coordinator joins again as
another worker: the coordinator may have lost it, or another one may have taken the import over, and
written the file anew. So does one for which the volume had no room, a while later.

Threads: those of the worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dlfs.errors import DlfsError, LeaseLostError, NotFoundError, StaleError
from dlfs.ingest.workers.connection import ConnectionEndedError
from dlfs.ingest.workers.invitation import CannotJoinError, ImportEndedError, Invitation
from dlfs.ingest.workers.process import NotNeededError, run_worker

WAIT_S = 600.0
"""Time for which a worker waits for a coordinator by default, in seconds."""
RETRY_S = 0.5
"""Interval between two looks at the file, in seconds."""
REJOIN_S = 10.0
"""Time after which a worker joins again that was not needed, in seconds."""


def join_import(path: str, *, wait_s: float = WAIT_S, say: Callable[[str], None]) -> None:
    """Run a worker of the import whose invitation is in a file, until the import ends.

    Args:
        path: the file.
        wait_s: longest time to wait for a coordinator, at the beginning and when it was lost, in
            seconds.
        say: called with what users should know.

    Raises:
        NotFoundError: there was no file in that time.
        UsageError: the import takes no worker of this host, or the file is no invitation.
        DeviceError: no coordinator could be reached in that time.
        DlfsError: the import failed; this is its error.
    """
    until_s = time.monotonic() + wait_s
    while True:
        try:
            if (failure := run_worker(Invitation.read(path), is_process=True)) is not None:
                raise failure
            return
        except NotNeededError as error:
            say(f"{error}; joining again later")
            until_s = time.monotonic() + REJOIN_S + wait_s
            _wait_for_end(path)
        except (StaleError, LeaseLostError) as error:
            say(f"{error}; joining again")
            until_s = time.monotonic() + wait_s
        except ImportEndedError as ended:
            if ended.failure is not None:
                raise ended.failure from None
            say("the import is complete")
            return
        except (NotFoundError, CannotJoinError, ConnectionEndedError):
            if time.monotonic() >= until_s:
                raise
        time.sleep(RETRY_S)


def _wait_for_end(path: str) -> None:
    """Wait a while for the end of an import that does not need this worker now."""
    again_s = time.monotonic() + REJOIN_S
    while time.monotonic() < again_s:
        try:
            Invitation.read(path)
        except DlfsError:
            return  # the caller reads it again
        time.sleep(RETRY_S)
