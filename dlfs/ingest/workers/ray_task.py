"""The task of Ray that is a worker of an import; every node of the cluster imports this module."""

from __future__ import annotations

from dlfs.errors import DlfsError


def run_task(invitation: str) -> str:
    """Run a worker in this process, until it ends.

    Args:
        invitation: what it needs to join, as text.

    Returns:
        Why it has ended; empty if it was told to.
    """
    from dlfs.ingest.workers.invitation import Invitation
    from dlfs.ingest.workers.process import NotNeededError, run_worker

    try:
        failure = run_worker(Invitation.parse(invitation), is_process=True)
    except NotNeededError:
        return ""
    except DlfsError as error:
        return str(error)
    return "" if failure is None else str(failure)
