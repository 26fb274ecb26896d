"""``start_workers``: how the workers of an import are started, and where they join.

Workers of this host join by the import's UNIX socket. Those of a Ray cluster, and those that join
by a file, may be on other hosts, unless the volume is on files and disks, whose writes have no
deadline: then the import takes only processes of this host, which it can kill.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from dlfs.ingest.workers.addresses import Address, address_towards, named_address
from dlfs.ingest.workers.by_workers import StartLauncher
from dlfs.ingest.workers.coordinator import GrantTimes
from dlfs.ingest.workers.engines import LOCAL, ProcessWorkers, RayWorkers, Workers
from dlfs.ingest.workers.invitation import Invitation, clear_ended
from dlfs.ingest.workers.launching import ProcessLauncher
from dlfs.ingest.workers.listening import Listener
from dlfs.ingest.workers.messages import Hello
from dlfs.ingest.workers.ray_launcher import RayLauncher, check_ray
from dlfs.ingest.workers.serving import Launcher

NOTE_S = 60.0
"""Interval between two notes that no worker has joined, in seconds."""
_log = logging.getLogger("dlfs")


class JoinLauncher:
    """Starts no workers: they join by a file, and are replaced by what has started them.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._noted_s = time.monotonic()

    def check(self, wanted: int, joined: Mapping[int, Hello]) -> None:  # noqa: ARG002
        """Log from time to time that no worker has joined."""
        now_s = time.monotonic()
        if joined:
            self._noted_s = now_s
        elif now_s - self._noted_s >= NOTE_S:
            self._noted_s = now_s
            _log.warning(
                "import: it waits for workers: none has joined by dlfs import-worker %s", self._path
            )

    def close(self) -> None:
        """Do nothing: the workers end with the import."""


def start_workers(
    workers: Workers | None, *, listen: Address | None = None, join_file: str | None = None
) -> StartLauncher:
    """Return what starts the workers of an import.

    Args:
        workers: workers to start; None for those only that join by the file.
        listen: address at which workers elsewhere reach this host; found by default.
        join_file: file by which workers join; None for no others.

    Raises:
        UsageError: Ray is wanted and not installed.
    """
    if isinstance(workers, RayWorkers):
        check_ray()
    if join_file is not None:
        clear_ended(join_file)

    def start(stack: ExitStack, count: int, times: GrantTimes) -> tuple[Listener, Launcher]:
        address = listen
        if address is None and times.expire:
            address = _find_address(workers, join_file)
        made = Listener() if address is None else Listener(address.host, address.port)
        listener = stack.enter_context(made)
        invitation = listener.invitation
        if join_file is not None:
            invitation.write(join_file)
            stack.enter_context(_said_how_it_ends(invitation, join_file))
        if isinstance(workers, ProcessWorkers):
            return listener, ProcessLauncher(count, invitation)
        if workers is not None:
            return listener, RayLauncher(workers, invitation, only_here=not times.expire)
        return listener, JoinLauncher(join_file or "")

    return start


@contextmanager
def _said_how_it_ends(invitation: Invitation, path: str) -> Iterator[None]:
    """Have the file say how the import has ended, at the end of the ``with`` statement."""
    try:
        yield
    except BaseException as error:
        invitation.end(path, error)
        raise
    invitation.end(path, None)


def _find_address(workers: Workers | None, join_file: str | None) -> Address | None:
    """Return the address at which workers elsewhere reach this host; None if there are none."""
    if join_file is not None:
        return named_address()
    if not isinstance(workers, RayWorkers):
        return None
    if workers.address == LOCAL:
        return Address("127.0.0.1")
    known = os.environ.get("RAY_ADDRESS", "").removeprefix("ray://").rpartition(":")[0]
    return address_towards(workers.host or known.strip("[]") or None)
