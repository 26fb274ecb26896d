"""Servers of mounts: what the driver asks of whatever starts them.

``processes`` starts processes of this machine, ``pods`` makes pods. Either server is ``dlfs mount
--holder``, which takes the mount from the holder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dlfs_csi.context import MountSpec
from dlfs_csi.failures import CallError, code_of_exit


@dataclass(frozen=True)
class Launch:
    """A server that is to run.

    Attributes:
        name: name of the mount.
        folder: the folder through which it takes the mount from the holder.
        keys: the directory of its keys; None if it has none.
        spec: what it serves.
    """

    name: str
    folder: str
    keys: Path | None
    spec: MountSpec


class Launcher(Protocol):
    """Starts, watches and stops servers, by the names of mounts.

    Threads: any; one at a time for a name.
    """

    def check(self, spec: MountSpec) -> None:
        """Check that a server can serve these volumes.

        Raises:
            CallError: INVALID_ARGUMENT: it can not.
        """

    def start(self, launch: Launch) -> None:
        """Start a server, unless it runs.

        Raises:
            CallError: UNAVAILABLE, RESOURCE_EXHAUSTED: it cannot be started.
        """

    def failure(self, name: str) -> CallError | None:
        """Return why a server has ended or cannot start; None if it runs, starts, or is unknown."""

    def stop(self, name: str) -> None:
        """Stop a server, if there is one, and forget it.

        Raises:
            CallError: UNAVAILABLE: it cannot be stopped now.
        """

    def names(self) -> set[str]:
        """Return the names of all mounts that have a server.

        Raises:
            CallError: UNAVAILABLE: they cannot be listed now.
        """


_TEXT_MAX = 2000


def ended(status: int, output: str) -> CallError:
    """Return the failure that a server's exit status and the end of its output describe."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    text = lines[-1][-_TEXT_MAX:] if lines else "it printed nothing"
    how = f"status {status}" if status >= 0 else f"signal {-status}"
    return CallError(code_of_exit(status), f"the server ended ({how}): {text}")
