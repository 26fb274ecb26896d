"""Which members this process knows to be lost, so that each loss is told once.

A member may be found missing or degraded when a volume is opened, or lost while a dataset is read.
Either way the log ``dlfs`` gets one warning, however many readers meet it, and ``Volume.members``
and ``dlfs info`` show it. When it is back, that is told too, and the next loss is news again.

Threads: any at once; every change is one operation on a dictionary.
"""

from __future__ import annotations

import logging
from uuid import UUID

from dlfs.store.transaction import Generation

_log = logging.getLogger("dlfs")

_Key = tuple[UUID, UUID]

_told: dict[_Key, object] = {}
"""Volume and member of what was told; the value is of whoever told it."""

_lost: dict[_Key, str] = {}
"""Why members were lost while they were read."""


def _tell(key: _Key, message: str) -> None:
    mine = object()
    if _told.setdefault(key, mine) is mine:
        _log.warning("%s", message)


def report_members(generation: Generation) -> None:
    """Tell of members that a volume was opened without, and of those that are back."""
    volume, unproven = generation.superblock.volume_uuid, generation.unproven
    rest = "the other copies are read" + (f"; {unproven}" if unproven else "")
    for member in generation.members:
        key = volume, member.uuid
        if member.reason is not None:
            _tell(key, f"volume {volume}: {member}; {rest}")
            continue
        _lost.pop(key, None)
        if _told.pop(key, None) is not None:
            _log.info("volume %s: %s is back", volume, member)


def report_loss(generation: Generation, number: int, reason: str) -> None:
    """Tell of a member that was lost while it was read."""
    volume, member = generation.superblock.volume_uuid, generation.members[number]
    key = volume, member.uuid
    _lost[key] = reason
    rest = "the other copies are read" if generation.geometry.replicas > 1 else "it has no copy"
    _tell(key, f"volume {volume}: {member} was lost: {reason}; {rest}")


def report_return(generation: Generation, number: int) -> None:
    """Tell of a member that can be read again."""
    volume, member = generation.superblock.volume_uuid, generation.members[number]
    key = volume, member.uuid
    if _lost.pop(key, None) is not None and _told.pop(key, None) is not None:
        _log.info("volume %s: %s is back", volume, member)


def loss_of(volume_uuid: UUID, member_uuid: UUID) -> str | None:
    """Why a member was lost while it was read; None: it was not, or is back."""
    return _lost.get((volume_uuid, member_uuid))
