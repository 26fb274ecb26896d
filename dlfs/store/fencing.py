"""Ends the right of workers to write, before their chunks are used by others (FORMAT.md, 8.9).

Workers of an import write to granted chunks without the lock of the volume. Whoever takes the
import over, ends it, or changes the members of the volume first calls ``revoke_grants``. Commits
that do none of this keep granted chunks as they are, and need not know of workers.

Threads: one, which has the lock of the volume.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from dlfs.base.wording import quote
from dlfs.block import BlockDevice
from dlfs.block.slots import COORDINATOR_SLOT
from dlfs.errors import LockedError, NotFoundError
from dlfs.format.catalog import DatasetRecord
from dlfs.format.constants import TAG_TERM
from dlfs.format.journal import Term, find_term
from dlfs.store.info import read_origin
from dlfs.store.transaction import Generation, Transaction

COORDINATOR = "coordinator"
"""Key of an import's origin: its coordinator's process and host, for messages."""
WORKERS_END_S = 10.0
"""Longest wait for worker processes on this host that still have a file open, in seconds: they end
with their coordinator."""
PAUSE_S = 0.05
"""Pause between two looks at whether they have ended, in seconds."""


def revoke_grants(
    transaction: Transaction,
    records: Sequence[DatasetRecord] | None = None,
    *,
    wait: Callable[[float], None] = time.sleep,
) -> Transaction:
    """End the grants of unfinished imports. Their granted chunks are free afterwards.

    A coordinator of such an import raises ``StaleError`` at its next commit or confirmation. Waits
    until no worker can write any more: where grants expire, as long as the record says.

    Args:
        transaction: lock of the volume; the caller still closes it.
        records: records of the imports; those of all imports by default.
        wait: waits for some seconds.

    Returns:
        A transaction with the same lock, on the newest generation.

    Raises:
        LockedError: worker processes still run.
        DlfsError: as a commit.
    """
    found = transaction.base.catalog.unfinished if records is None else records
    ours = imports_by_workers(found)
    if not ours:
        return transaction
    if any(record.granted_runs for record in ours):
        renewed = with_new_terms(ours)
        transaction = Transaction.over(transaction.commit(removed=ours, added=renewed))
        wait_for_workers(transaction.devices, renewed, wait=wait)
        ours = renewed
    for device in transaction.devices:
        device.dismiss_writers(fence=True)
    return Transaction.over(transaction.commit(removed=ours, added=without_grants(ours)))


def end_import(
    transaction: Transaction, name: bytes, *, where: str
) -> tuple[DatasetRecord, Generation]:
    """Commit without an unfinished import, when no worker of it can write any more.

    Args:
        transaction: lock of the volume.
        name: name of the dataset.
        where: name of the volume for users.

    Returns:
        The record of the import, and the new generation.

    Raises:
        NotFoundError: there is none of this name.
        LockedError: it runs, by workers.
        DlfsError: as ``revoke_grants``.
    """
    record = transaction.base.catalog.find_unfinished(name)
    action = f"abandon the import of {quote(name)} on {where}"
    if record is None:
        raise NotFoundError(f"{action}: there is no unfinished import of this name")
    check_not_running(transaction.devices, [record], action)
    last = revoke_grants(transaction, [record])
    ended = last.base.catalog.find_unfinished(name)
    assert ended is not None
    return record, last.commit(removed=[ended])


def check_not_running(
    devices: Iterable[BlockDevice], records: Iterable[DatasetRecord], action: str
) -> None:
    """Check that no import by workers runs; on files and disks, where its coordinator has a slot.

    Elsewhere a coordinator that runs is found by none, and loses its import to the caller.

    Args:
        devices: devices of the members.
        records: records of unfinished imports; those without workers do not matter.
        action: what the caller wants to do, for the message.

    Raises:
        LockedError: one runs; the message names it and its process.
    """
    for record in imports_by_workers(records):
        if not all(device.granted_writers_gone(COORDINATOR_SLOT) for device in devices):
            raise LockedError(f"{action}: {describe_running(record)}")


def describe_running(record: DatasetRecord) -> str:
    """Return the text that an import by workers runs, and what to do about it."""
    running = read_origin(record).get(COORDINATOR, "another process")
    return (
        f"the import of {quote(record.name)} by workers runs, of {running}: wait for its end, or "
        "end that process first"
    )


def imports_by_workers(records: Iterable[DatasetRecord]) -> list[DatasetRecord]:
    """Return the records of imports that have, or had, a coordinator."""
    return [record for record in records if record.granted_runs or find_term(record.tags)]


def with_new_terms(records: Sequence[DatasetRecord]) -> list[DatasetRecord]:
    """Return records with new terms: their coordinators are stale when these are committed."""
    expiry = {record.key: (find_term(record.tags) or Term(b"", 0)).expiry_ms for record in records}
    return [with_term(record, Term.draw(expiry[record.key])) for record in records]


def without_grants(records: Sequence[DatasetRecord]) -> list[DatasetRecord]:
    """Return records without granted runs and terms, after ``wait_for_workers``."""
    return [replace(with_term(record, None), granted_runs=()) for record in records]


def with_term(record: DatasetRecord, term: Term | None) -> DatasetRecord:
    """Return a record with another term, or with none."""
    tags = [tag for tag in record.tags if tag[0] != TAG_TERM]
    return replace(record, tags=(*tags, *(() if term is None else (term.tag,))))


def expiry_ms(devices: Sequence[BlockDevice]) -> int:
    """Return for how long a granted write may take effect after a confirmation; see ``Term``."""
    times = [device.lease_times for device in devices]
    return max((round(1000 * each.expiry_s) for each in times if each is not None), default=0)


def wait_for_workers(
    devices: Sequence[BlockDevice],
    records: Sequence[DatasetRecord],
    *,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until no worker can write any more.

    Args:
        devices: devices of the members.
        records: records of the imports, whose new terms are committed.
        wait: waits for some seconds.

    Raises:
        LockedError: worker processes on this host do not end.
    """
    granted = [record for record in records if record.granted_runs]
    if not granted:
        return
    terms = [find_term(record.tags) for record in granted]
    expiry_ms = max(0 if term is None else term.expiry_ms for term in terms)
    if any(device.grants_expire for device in devices):
        wait(expiry_ms / 1000)
    left_s = WORKERS_END_S
    while not all(device.granted_writers_gone() for device in devices):
        if left_s <= 0:
            names = ", ".join(quote(record.name) for record in granted)
            raise LockedError(
                f"end the import of {names} by workers: its coordinator is gone, but worker "
                f"processes that write to the volume still run after {WORKERS_END_S:g} s; end them"
            )
        wait(PAUSE_S)
        left_s -= PAUSE_S
