"""Opens one generation of a volume, and commits the next one as the only writer.

Commit protocol (FORMAT.md): data, flush; directory, flush; catalog in chunks that were free, flush;
on every member the superblock in slot A or B of the new generation, flush; the tail copies, flush.
A crash at any write leaves the old generation or the new one, complete.

A writer first locks every member, then reads the superblocks again. It brings up to date the
members whose copies lag, as a crash between two members leaves them, and flushes all members.
Chunks that its base generation freed are then durably free.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dlfs._native.checksums import crc32c
from dlfs.base.closing import Closing
from dlfs.base.deadlines import limit_call
from dlfs.block import BlockDevice, MissingDevice, open_device
from dlfs.errors import (
    ClosedError,
    DegradedError,
    DeviceTimeoutError,
    DlfsError,
    FormatError,
    LimitError,
    SpaceError,
    UsageError,
)
from dlfs.format.catalog import (
    Catalog,
    DatasetRecord,
    check_catalog,
    decode_catalog,
    encode_catalog,
)
from dlfs.format.constants import CATALOG_EXTENTS_MAX, DATASET_VERSION_MAX
from dlfs.format.geometry import ChunkRun, DataSpace, Geometry, superblock_offsets
from dlfs.format.paths import display
from dlfs.format.run_arrays import complement, to_array
from dlfs.format.superblock import Superblock, encode_superblock, slot_for, with_removed
from dlfs.store.chunk_reader import copy_orders, read_blocks
from dlfs.store.chunk_writer import ChunkWriter
from dlfs.store.locking import lock_members, unlock_members
from dlfs.store.members import (
    COPY_NAMES,
    Identified,
    Member,
    Opener,
    assemble,
    close_devices,
    reopening_uris,
    superblock_for,
)
from dlfs.store.recorded import open_members
from dlfs.store.space import FreeSpace, TakenRuns, allocatable_runs, count_chunks

CATALOG_GROWTH_BYTES = 4096
"""Bytes that stay free in addition to the size of the catalog: the next commit may have more free
runs."""

OPEN_ATTEMPTS = 8
"""Attempts of a reader to open a catalog that writers replace; each failure takes two commits."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Generation:
    """A volume at one generation, with its members; immutable."""

    members: tuple[Member, ...]
    superblock: Superblock
    catalog: Catalog

    @property
    def geometry(self) -> Geometry:
        """Layout of the chunks over the members."""
        return self.superblock.geometry

    @property
    def devices(self) -> list[BlockDevice]:
        """Devices of the members in order, unreadable ones included."""
        return [member.device for member in self.members]

    @property
    def sources(self) -> list[BlockDevice]:
        """Devices to read the members from, in order; a ``MissingDevice`` for an absent member."""
        return [member.source for member in self.members]

    @property
    def absent(self) -> list[Member]:
        """Members that are missing or degraded."""
        return [member for member in self.members if member.reason is not None]

    @property
    def copies_left(self) -> int:
        """Least number of copies of a chunk on members that are present; 1 also if none may be."""
        return max(1, self.geometry.replicas - len(self.absent))

    @property
    def unproven(self) -> str | None:
        """Reason why members that were not read may hold a newer generation; None if none can.

        Every commit writes its generation to all members. If more than half of them agree on a
        generation, a newer one would need as many members that were reset to an older copy.
        """
        count = len(self.members)
        unread = [str(member.number) for member in self.members if not member.copies]
        current = count - len(self.absent)
        if self.geometry.replicas == 1 or not unread or 2 * current > count:
            return None
        return (
            f"generation {self.superblock.generation} may not be the newest: it is that of "
            f"{current} of {count} members, which are an older copy where member "
            f"{' or '.join(unread)} has a newer generation"
        )

    @property
    def uris(self) -> tuple[str, ...]:
        """URIs that open the volume again, member 0 first."""
        return reopening_uris(self.devices)


def load_generation(
    devices: Sequence[BlockDevice],
    known: Generation | None = None,
    identified: Identified | None = None,
) -> Generation:
    """Find the newest generation on a volume's devices and read its catalog.

    Args:
        devices: devices of the members, in any order.
        known: a generation that this process has read or committed. Its catalog is not read again
            if it is still the newest.
        identified: members whose superblocks were just read; see ``identify_all``.

    Raises:
        FormatError: superblocks or catalog are damaged; the message names where.
        NotFoundError: a member is missing.
        UsageError: a member is foreign, or given twice.
        DeviceError: a device failed.
    """
    with limit_call():
        members, newest = assemble(devices, identified)
        if known is not None and newest == replace(
            known.superblock, member_number=newest.member_number, member_bytes=newest.member_bytes
        ):
            return Generation(members, newest, known.catalog)
        for _ in range(OPEN_ATTEMPTS):
            try:
                return Generation(members, newest, read_catalog(members, newest)[0])
            except FormatError:
                # A writer may have committed twice meanwhile, and reused the catalog's chunks.
                members, again = assemble(devices)
                if again.generation == newest.generation:
                    raise
                newest = again
        return Generation(members, newest, read_catalog(members, newest)[0])


def read_catalog(
    members: Sequence[Member], superblock: Superblock
) -> tuple[Catalog, NDArray[np.uint8]]:
    """Read a catalog, from other copies if one is damaged; return it and its bytes.

    Raises:
        FormatError: no copy is right; the error describes the first copy.
        DeviceError: no copy can be read.
    """
    sources = [member.source for member in members]
    space = DataSpace(superblock.geometry, superblock.catalog_runs)
    member, offset_bytes = space.resolve(0)
    where = f"{sources[member].uri} at byte {offset_bytes}"
    problem: FormatError | None = None
    for choice in copy_orders(superblock.geometry):
        data = read_blocks(sources, space, 0, superblock.catalog_bytes, choice)
        try:
            return decode_catalog(data.tobytes(), superblock, where), data
        except FormatError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def flush_all(devices: Sequence[BlockDevice]) -> None:
    """Make every completed write durable on every member."""
    for device in devices:
        device.flush()


def write_superblocks(members: Sequence[Member], superblock: Superblock) -> None:
    """Write a superblock to slot A or B of all members, flush, write the tail copies, flush."""
    slot = slot_for(superblock.generation)
    for name in (slot, "tail"):
        for member in members:
            _write_copy(member, name, superblock)
        flush_all([member.device for member in members])


def _write_copy(member: Member, name: str, superblock: Superblock) -> None:
    offset = superblock_offsets(member.member_bytes)[COPY_NAMES.index(name)]
    member.device.write(offset, encode_superblock(superblock_for(member, superblock)))


def add_committed_note(error: BaseException, superblock: Superblock) -> None:
    """Note in an error that a change was committed before, so that it is not repeated blindly."""
    note = (
        f"the change itself is on the volume, as generation {superblock.generation}: look before "
        "you repeat it"
    )
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


@contextmanager
def after_commit(superblock: Superblock | None) -> Iterator[None]:
    """Note in whatever the block raises that a change was committed before.

    Args:
        superblock: superblock of the commit; None if there was none.
    """
    try:
        yield
    except BaseException as error:
        if superblock is not None:
            add_committed_note(error, superblock)
        raise


def check_whole(generation: Generation) -> None:
    """Check that every member is present and current, as a writer needs it.

    Raises:
        DegradedError: a member is absent; the message names all that are.
    """
    absent = "; ".join(map(str, generation.absent))
    if absent:
        raise DegradedError(
            f"write to volume {generation.superblock.volume_uuid}: expected all "
            f"{generation.geometry.member_count} members, but {absent}; "
            f"'dlfs repair' makes the volume whole"
        )


def check_volume(generation: Generation, volume_uuid: UUID) -> None:
    """Check that a generation is of the expected volume, and that this release may write to it.

    Raises:
        UsageError: it is another volume, or has features that this release can only read.
    """
    superblock = generation.superblock
    if superblock.volume_uuid != volume_uuid:
        raise UsageError(
            f"write to volume {volume_uuid}: its devices now hold volume "
            f"{superblock.volume_uuid}; open it again"
        )
    if not superblock.writable:
        raise UsageError(
            f"write to volume {volume_uuid}: a newer dlfs made it, with features that this one "
            f"can read but not write"
        )


def check_writable(
    uris: Sequence[str],
    *,
    volume_uuid: UUID,
    opener: Opener = open_device,
) -> None:
    """Check that a writer could open a volume now, without a lock and without writing.

    Args:
        uris: URIs of the members.
        volume_uuid: expected UUID of the volume.
        opener: function that opens devices.

    Raises:
        DegradedError: a member is missing or stale, or cannot be opened for writing.
        DeviceError: no member can be opened for writing.
        UsageError: it is another volume, or this release may only read it.
        FormatError: as ``load_generation``.
    """
    devices = open_members(uris, writable=True, opener=opener)
    try:
        generation = load_generation(devices)
        check_whole(generation)
        check_volume(generation, volume_uuid)
    finally:
        close_devices(devices)


class Transaction(Closing):
    """The lock of one writer on a volume, from opening to commit.

    Args:
        uris: URIs of the members, member 0 first.
        volume_uuid: expected UUID of the volume.
        holder: description of the writer, for others that find the volume locked.
        known: a generation that this process has read; see ``load_generation``.
        opener: function that opens devices.

    Attributes:
        base: generation on which the next one is built.
        devices: devices of the members, in order.
        geometry: layout of the chunks over the members.
        space: free chunks.
        committed: superblock of the commit; None before it.

    Raises:
        LockedError: another writer has locked the volume, or one of its members.
        DegradedError: a member is missing or stale.
        FormatError: as ``load_generation``; also for a volume that this release may only read.
        DeviceError: a device cannot be written.

    Threads: one at a time. Owns: the devices, opened for writing.
    """

    committed: Superblock | None = None

    def __init__(
        self,
        uris: Sequence[str],
        *,
        volume_uuid: UUID,
        holder: str,
        known: Generation | None = None,
        opener: Opener = open_device,
    ) -> None:
        self._devices = open_members(uris, writable=True, opener=opener)
        self._open = True
        try:
            if any(isinstance(device, MissingDevice) for device in self._devices):
                check_whole(load_generation(self._devices, known))
            lock_members(self._devices, holder)
            self.base = load_generation(self._devices, known)
            check_whole(self.base)
            self._check_volume(volume_uuid)
            self._catch_up()
        except BaseException:
            self.close()
            raise
        self._begin(self.base)

    @classmethod
    def over(cls, base: Generation) -> Self:
        """Return a transaction on members that are open, locked and up to date already.

        Args:
            base: generation on which the next one is built; the next one has the same members.
        """
        transaction = cls.__new__(cls)
        transaction._devices = base.devices
        transaction._open = True
        transaction._begin(base)
        return transaction

    def _begin(self, base: Generation) -> None:
        self.base = base
        self.devices = base.devices
        self.geometry = base.geometry
        reserve = self.next_catalog_chunks
        self.space = FreeSpace.of(self.geometry, base.catalog.free, reserve=reserve)

    def _check_volume(self, volume_uuid: UUID) -> None:
        check_volume(self.base, volume_uuid)
        current = [device for device in self._devices if device in self.base.devices]
        if self.base.devices[0] is not current[0]:
            raise UsageError(
                f"write to volume {volume_uuid}: its devices are now in another order; "
                f"open it again"
            )

    def _catch_up(self) -> None:
        """Bring lagging members up to date, and make the base generation durable."""
        superblock = self.base.superblock
        flush_all(self._devices)
        lagging = [m for m in self.base.members if not m.is_current(superblock.generation)]
        if lagging:
            write_superblocks(lagging, superblock)

    def next_version(self, name: bytes) -> int:
        """Return the number of a dataset's next version: above all existing and removed versions.

        Raises:
            LimitError: there is no higher number.
        """
        version = max((record.version for record in self.base.catalog.find(name)), default=0)
        version = max(version, self.base.superblock.last_removed(name)) + 1
        if version > DATASET_VERSION_MAX:
            raise LimitError(
                f"write dataset {display(name)!r}: expected at most {DATASET_VERSION_MAX} versions"
            )
        return version

    @property
    def next_catalog_chunks(self) -> int:
        """Upper bound of the chunks of a catalog with one more dataset."""
        return self._chunks(self.base.superblock.catalog_bytes + 2 * CATALOG_GROWTH_BYTES)

    def _chunks(self, length_bytes: int) -> int:
        return -(-length_bytes // self.geometry.chunk_bytes)

    def write_segment(self, parts: Sequence[NDArray[np.uint8]]) -> tuple[ChunkRun, ...]:
        """Write bytes to newly allocated chunks, and flush.

        Args:
            parts: arrays, ``uint8[n_bytes]`` each, written one after the other; all but the last
                are whole chunks or blocks.

        Returns:
            The runs of the allocated chunks.

        Raises:
            SpaceError: too few chunks are free; nothing is written.
            DeviceError: a write failed.
        """
        taken = self.space.take_all(self._chunks(sum(part.nbytes for part in parts)))
        self._write_to(taken, parts)
        return tuple(taken)

    def _write_to(self, runs: Sequence[ChunkRun], parts: Sequence[NDArray[np.uint8]]) -> None:
        with ChunkWriter(self.devices, self.geometry, TakenRuns(runs).take) as writer:
            writer.write_parts(parts)
            writer.drain()
        flush_all(self.devices)

    def commit(
        self,
        *,
        removed: Sequence[DatasetRecord] = (),
        added: Sequence[DatasetRecord] = (),
        first: Sequence[Member] = (),
    ) -> Generation:
        """Commit changes of the catalog as the next generation of the volume.

        All chunks of the new records must be flushed. Chunks that no record uses are free in the
        new generation.

        Args:
            removed: records that the next generation does not have, or has in another form.
            added: records that it has in addition, or in another form.
            first: members whose superblocks must be durable before any other is written.

        Raises:
            SpaceError: no room for this catalog, or none would be left for the next commit.
            LimitError: too many datasets or runs.
            DeviceError: a device failed; the volume has the old generation or the new one. If it
                has the new one, or nobody knows, a note of the error says so.
        """
        if not self._open:
            raise ClosedError("commit: the writer's hold on the volume has ended")
        superblock, catalog, encoded = self._prepare(removed, added)
        return self._write(Generation(self.base.members, superblock, catalog), encoded, first)

    def _write(self, made: Generation, encoded: bytes, first: Sequence[Member]) -> Generation:
        """Write the catalog and the superblocks of a generation, and load it."""
        superblock = made.superblock
        self._write_to(superblock.catalog_runs, [np.frombuffer(encoded, np.uint8)])
        try:
            if first:
                write_superblocks(first, superblock)
            write_superblocks([m for m in self.base.members if m not in first], superblock)
        except BaseException as error:
            self._note_outcome(superblock, error)
            raise
        with after_commit(superblock):
            self.committed = superblock
            return load_generation(self.devices, made)

    def _note_outcome(self, superblock: Superblock, error: BaseException) -> None:
        """Note in the error of a commit that the volume has, or may have, the change all the same.

        Args:
            superblock: superblock whose copies were being written.
            error: what ended the writes. A device that does not answer is not asked again.
        """
        if isinstance(error, DlfsError) and not isinstance(error, DeviceTimeoutError):
            try:
                newest = load_generation(self.devices).superblock
            except DlfsError:
                pass
            else:
                if newest.generation >= superblock.generation:
                    add_committed_note(error, superblock)
                return
        error.add_note(
            f"the change may be on the volume, as generation {superblock.generation}: look before "
            "you repeat it"
        )

    def _prepare(
        self, removed: Sequence[DatasetRecord], added: Sequence[DatasetRecord]
    ) -> tuple[Superblock, Catalog, bytes]:
        """Return the next superblock, its catalog and its bytes, in chunks that are free now."""
        base = self.base.superblock
        edited = self.base.catalog.edited(removed, added)
        count = 0
        runs: list[ChunkRun] = []
        # The catalog lists the free runs, and its own chunks are not among them: its size is final
        # at once unless another chunk changes the number of free runs.
        for _ in range(CATALOG_EXTENTS_MAX):
            used = np.concatenate([edited.used_runs, to_array(runs)])
            catalog = edited.with_free(complement(self.geometry, used))
            if self._chunks(catalog.size_bytes) <= count:
                break
            self.space.give_back(runs)
            count = self._chunks(catalog.size_bytes + CATALOG_GROWTH_BYTES // 16)
            runs = self.space.take_all(count, runs_max=CATALOG_EXTENTS_MAX)
        else:
            raise LimitError("commit: the catalog's size does not settle")
        encoded = encode_catalog(catalog)
        remaining = {(record.uuid, *record.key) for record in added}
        gone = [record.key for record in removed if (record.uuid, *record.key) not in remaining]
        superblock = replace(
            with_removed(base, gone),
            generation=base.generation + 1,
            catalog_runs=tuple(runs),
            catalog_bytes=len(encoded),
            catalog_crc32c=crc32c(encoded),
        )
        check_catalog(catalog, superblock)
        free_count = count_chunks(allocatable_runs(superblock.geometry, catalog.free))
        if free_count < count:
            raise SpaceError(
                f"commit: expected {count} chunks to stay free for the next commit, "
                f"got {free_count}"
            )
        return superblock, catalog, encoded

    def close(self) -> None:
        """Unlock and close the members. Idempotent. Uncommitted changes are lost."""
        self._open = False
        with after_commit(self.committed):
            try:
                unlock_members(self._devices)
            finally:
                close_devices(self._devices)


def now_ns() -> int:
    """Return the time of day in nanoseconds since 1970, for records."""
    return time.time_ns()
