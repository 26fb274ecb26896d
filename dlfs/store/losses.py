"""The members that this process knows to be lost, so that it logs each loss once.

A member may be missing or degraded when a volume is opened, or be lost while a dataset is read. In
either case the log ``dlfs`` gets one warning, whatever the number of readers, and
``Volume.members`` and ``dlfs info`` show the loss. The return of a member is logged as well, and
its next loss is logged again.

Threads: any at once; every change is one operation on a dictionary.
"""

from __future__ import annotations

import logging
from uuid import UUID

from dlfs.store.transaction import Generation

_log = logging.getLogger("dlfs")

_Key = tuple[UUID, UUID]

_reported: dict[_Key, object] = {}
"""Volume and member of each logged loss; the value identifies the call that logged it."""

_lost: dict[_Key, str] = {}
"""Reasons why members were lost while they were read."""


def _report_once(key: _Key, message: str) -> None:
    own = object()
    if _reported.setdefault(key, own) is own:
        _log.warning("%s", message)


def report_members(generation: Generation) -> None:
    """Log the members that a volume was opened without, and those that have returned."""
    volume, unproven = generation.superblock.volume_uuid, generation.unproven
    consequence = "the other copies are read" + (f"; {unproven}" if unproven else "")
    for member in generation.members:
        key = volume, member.uuid
        if member.reason is not None:
            _report_once(key, f"volume {volume}: {member}; {consequence}")
            continue
        _lost.pop(key, None)
        if _reported.pop(key, None) is not None:
            _log.info("volume %s: %s is back", volume, member)


def report_change(generation: Generation, number: int, reason: str | None) -> None:
    """Log a member that was lost while it was read, and why; or, without a reason, its return."""
    volume, member = generation.superblock.volume_uuid, generation.members[number]
    key = volume, member.uuid
    if reason is None:
        if _lost.pop(key, None) is not None and _reported.pop(key, None) is not None:
            _log.info("volume %s: %s is back", volume, member)
        return
    _lost[key] = reason
    consequence = (
        "the other copies are read" if generation.geometry.replicas > 1 else "it has no copy"
    )
    _report_once(key, f"volume {volume}: {member} was lost: {reason}; {consequence}")


def loss_of(volume_uuid: UUID, member_uuid: UUID) -> str | None:
    """Return why a member was lost while it was read; None if it was not, or has returned."""
    return _lost.get((volume_uuid, member_uuid))
