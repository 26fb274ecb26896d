"""Follows the chunks of an open dataset while they are moved and the volume's members change.

A ``LocalPlacement`` belongs to one open dataset and knows its chunks when it was opened. A chunk is
written again only after a commit that freed it, and a commit writes a superblock to every member.
So if no member's superblock has changed after a read, the bytes are the dataset's, and a wrong
checksum is damage: ``diagnose`` reads the superblocks A and B of the members that have its chunks,
and nothing else while they stay the same. All of them, since a device may have been overwritten by
another volume.

Once a second a thread looks at the open datasets of each volume, in the same way. It remembers
where the members of a grown volume are, and has datasets opened anew when their members have left.
So they are found although these members are detached soon, also by programs that pause.

No lock is held while a device is read. Each call has a deadline (``base.deadlines``), and members
that the reader lost because they do not answer are not asked again.

Threads: any at once; one thread of each volume that has open datasets. A forked child has none
until it opens datasets of its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from uuid import UUID

from dlfs._native import abi
from dlfs.base.closing import LiveObjects, Uses
from dlfs.base.deadlines import limit_call, limit_device, share_for
from dlfs.base.forks import Lock
from dlfs.block import note_unanswered
from dlfs.connection.identity import DatasetIdentity
from dlfs.errors import DeviceError, DlfsError, FormatError, NotFoundError, UsageError
from dlfs.format.catalog import Catalog, DatasetRecord
from dlfs.format.constants import SUPERBLOCK_BYTES
from dlfs.format.geometry import superblock_offsets
from dlfs.format.superblock import decode_superblock
from dlfs.store.members import Member, Opener, describe_swapped
from dlfs.store.newest import groups_of, have_left, is_moved, newest_generation
from dlfs.store.recorded import remember_members
from dlfs.store.transaction import Generation

WATCH_S = 1.0
"""Time between two looks at the members of a volume, in seconds."""

_Marks = dict[int, bytes | None]
"""Superblocks A and B of some members as they were read, by the number of the member; None for one
that cannot be read."""


class LocalPlacement:
    """The chunks of a dataset on devices that this process has open.

    Args:
        generation: generation at which the dataset was opened.
        record: record of the dataset in it.
        identity: identity of the dataset.
        opener: function that opens further devices.
        uses: calls under way that use the devices.
        find: returns the record of the same samples in the catalog of another generation; None if
            they were removed. By default the record of the same dataset.

    Attributes:
        moved: True once the dataset must be opened anew, since its chunks or members are others.
        lost_members: returns the members that the reader has lost, as bits.
        member_code: returns the error code for which the reader lost a member.
        closed: True once the devices are closed.
    """

    def __init__(
        self,
        generation: Generation,
        record: DatasetRecord,
        identity: DatasetIdentity,
        opener: Opener,
        uses: Uses,
        find: Callable[[Catalog], DatasetRecord | None] | None = None,
    ) -> None:
        self.volume_uuid = generation.superblock.volume_uuid
        self.moved = False
        self.lost_members: Callable[[], int] = lambda: 0
        self.member_code: Callable[[int], int] = lambda _number: 0
        self._opened = generation
        self._record = record
        self._find = find or (lambda catalog: catalog.find_uuid(record.uuid))
        self._identity = identity
        self._opener = opener
        self._members = _members_of(generation, record, every=generation.geometry.replicas > 1)
        self._right: _Marks = {}  # while these are read, the chunks are the dataset's
        self._seen: _Marks = {}  # when the thread looked last
        self.closed = False
        self._uses = uses
        self._part = share_for(len(generation.members), generation.copies_left)
        self._lock = Lock()  # of the marks and `moved`; not held while a device is read
        _watch(self)

    def diagnose(self) -> DlfsError | None:
        """Return the error that explains failed reads: dataset removed or moved, device swapped."""
        found: DlfsError | None = None
        with self._uses, limit_call(), limit_device(self._part):
            self._note_unanswered()
            with suppress(FormatError, DeviceError, NotFoundError, UsageError):
                found = self._check()
            if found is None:  # it looks at some of the members
                other = describe_swapped(self._opened.devices, self.volume_uuid)
                found = None if other is None else self._identity.stale(other)
        return found  # None: the samples' own errors explain it

    def _check(self) -> DlfsError | None:
        """Return None if what was read so far is the dataset's; else the error that says why.

        Raises:
            DlfsError: the newest generation cannot be read.
        """
        with self._uses, limit_call(), limit_device(self._part):
            if self.moved:
                return self._identity.moved()
            marks = self._read_marks(_members_of(self._opened, self._record, every=True))
            with self._lock:
                if self._are_right(marks):
                    self._note(marks)
                    return None
            found = self._examine()
            if found is None:
                return self._identity.missing_from(self._opened.devices)
            read = [_newest_in(mark) for mark in marks.values() if mark is not None]
            # One may be none of the volume any more, which replicas allow. The bytes may be of its
            # device, so the dataset is opened anew without it.
            foreign = any(newest is None or newest[0] != self.volume_uuid for newest in read)
            if self.moved or found or foreign:
                self.moved = True
                return self._identity.moved()
            with self._lock:
                self._note(marks)
            return None

    def look(self) -> None:
        """Look whether the volume has changed, and have the dataset opened anew if it must be.

        A dataset that was moved is read on: the checksums of samples, or ``check``, say when it can
        no longer be read there.
        """
        if self.moved:
            return
        seen = self._seen
        with self._uses, limit_call(), limit_device(self._part):
            marks = self._read_marks(self._members)
            if marks != seen and (seen or not self._are_opened(marks)):
                self._examine()
        with self._lock:
            if self._seen is seen:  # no check has seen newer ones meanwhile
                self._seen = marks

    def _note_unanswered(self) -> None:
        """Note the members that do not answer the reader, so that they are not asked now."""
        lost = self.lost_members()
        for member in self._opened.members:
            timed_out = lost >> member.number & 1 and self.member_code(member.number)
            if timed_out == abi.E_TIMEOUT:
                note_unanswered(member.device)

    def _examine(self) -> bool | None:
        """Compare the dataset with the newest generation.

        Returns:
            None if the dataset was removed; else True if it has other chunks, or its members have
            left. In the second case ``moved`` is set.
        """
        with newest_generation(self._opened, self._opener) as newest:
            if newest.superblock.volume_uuid == self.volume_uuid:
                remember_members(self._opened.members, newest.superblock, newest.members)
            found = self._find(newest.catalog)
            if found is None:
                return None
            self.moved |= have_left(self._opened, self._record, newest)
            return is_moved(self._opened, self._record, newest, found)

    def _read_marks(self, members: Sequence[Member]) -> _Marks:
        lost = self.lost_members()
        return {
            member.number: None if lost >> member.number & 1 else _read_slots(member)
            for member in members
        }

    def _are_right(self, marks: _Marks) -> bool:
        """Return True if the superblocks say that the chunks are the dataset's."""
        new = {number: mark for number, mark in marks.items() if number not in self._right}
        return (not new or self._are_opened(new)) and all(
            mark == marks.get(number, mark) for number, mark in self._right.items()
        )

    def _note(self, marks: _Marks) -> None:
        self._right |= marks
        self._seen = {member.number: marks[member.number] for member in self._members}

    def _are_opened(self, marks: _Marks) -> bool:
        """Return True if the superblocks are those of the generation that was opened."""
        read = [mark for mark in marks.values() if mark is not None]
        expected = self.volume_uuid, self._opened.superblock.generation
        return bool(read) and all(_newest_in(mark) == expected for mark in read)


def _members_of(generation: Generation, record: DatasetRecord, *, every: bool) -> list[Member]:
    """Return members of the groups that have a dataset: every one, or the first of each group.

    Each gets a superblock in every commit. One that was replaced, which replicas allow, gets none.
    """
    count = None if every else 1
    groups = groups_of(generation, record)
    numbers = [number for group in groups for number in group.members[:count]]
    members = [generation.members[number] for number in numbers]
    return [member for member in members if member.reason is None]


def _read_slots(member: Member) -> bytes | None:
    """Return the bytes of superblocks A and B of a member; None if they cannot be read."""
    slots = superblock_offsets(member.member_bytes)[:2]
    with suppress(DeviceError, FormatError, UsageError):  # it may have become smaller
        block_bytes = max(SUPERBLOCK_BYTES, member.device.block_bytes)
        return b"".join(member.device.read(slot, block_bytes)[:SUPERBLOCK_BYTES] for slot in slots)
    return None


def _newest_in(slots: bytes) -> tuple[UUID, int] | None:
    """Return the volume and generation of the newest of some superblocks; None without any."""
    found = []
    for start in range(0, len(slots), SUPERBLOCK_BYTES):
        with suppress(FormatError):
            superblock = decode_superblock(slots[start : start + SUPERBLOCK_BYTES], "a member")
            found.append((superblock.volume_uuid, superblock.generation))
    return max(found, key=lambda pair: pair[1], default=None)


# ---- the thread of each volume -------------------------------------------------------------------

_watched: dict[UUID, LiveObjects[LocalPlacement]] = {}
"""Open datasets of each volume that has a thread."""

_watched_lock = Lock()


def _watch(placement: LocalPlacement) -> None:
    uuid = placement.volume_uuid
    with _watched_lock:
        if uuid in _watched:
            _watched[uuid].add(placement)
            return
        try:
            _watched[uuid] = LiveObjects()
            _watched[uuid].add(placement)
            threading.Thread(target=_run, args=[uuid], name="dlfs-placement", daemon=True).start()
        except BaseException:  # Ctrl-C: the next dataset starts a thread
            _watched.pop(uuid, None)
            raise


def _run(uuid: UUID) -> None:
    while True:
        time.sleep(WATCH_S)
        with _watched_lock:
            placements = [each for each in _watched.get(uuid, ()) if not each.closed]
            if not placements:
                _watched.pop(uuid, None)
                return
        for placement in placements:
            with suppress(DlfsError):  # the next look may find the volume readable again
                placement.look()
        del placement, placements  # so that datasets that are no longer used are freed


os.register_at_fork(after_in_child=_watched.clear)
