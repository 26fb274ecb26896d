"""Repairs a volume, from opening its members to the commit that ends the repair.

1. The members are opened as a reader opens them, and with them the devices that replace lost
   members. All are locked as by any writer.
2. A new device gets a joining record (FORMAT.md, section 3.3). A repair that a crash interrupted
   finds it and continues.
3. Every copy of a chunk in use is made valid (``dlfs.volume.copies``) and flushed.
4. Two generations with the same datasets are committed, which write every superblock copy, those of
   new devices first. If nothing was wrong, nothing is committed.

After a crash at any point, another run starts over and has the same result.

In a volume without replicas only superblocks have copies: three on each member. Step 4 alone writes
damaged ones again from the others. A member that has lost all its superblocks is recognised by its
data (``dlfs.volume.adoption``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from uuid import UUID, uuid4

import numpy as np

from dlfs.attributes import read_attributes
from dlfs.base.arguments import Engine
from dlfs.block import BlockDevice, FileUri, MissingDevice, open_device, parse_uri
from dlfs.connection.previous_version import SharedChunks
from dlfs.connection.segment_loading import load_segment
from dlfs.errors import (
    DegradedError,
    DeviceError,
    DeviceLostError,
    FormatError,
    LimitError,
    UsageError,
)
from dlfs.format.catalog import DatasetRecord
from dlfs.format.constants import JOINING_BYTES, JOINING_OFFSET_BYTES, SUPERBLOCK_BYTES
from dlfs.format.geometry import DataSpace, Geometry, usable_bytes
from dlfs.format.joining import JoiningRecord
from dlfs.format.paths import display
from dlfs.store.discovered import resolve_uris
from dlfs.store.fencing import (
    check_not_running,
    imports_by_workers,
    wait_for_workers,
    with_new_terms,
    without_grants,
)
from dlfs.store.formatting import check_blocks, check_empty, prepare_file, wipe
from dlfs.store.info import describe_member
from dlfs.store.locking import lock_members, unlock_members
from dlfs.store.members import (
    Member,
    Members,
    Opener,
    close_devices,
    identify,
    read_locations,
    split_uris,
)
from dlfs.store.places import opener_for
from dlfs.store.recorded import encode_locations, open_members, write_locations
from dlfs.store.segments import read_segment
from dlfs.store.space import count_chunks
from dlfs.store.transaction import (
    Generation,
    Transaction,
    flush_all,
    load_generation,
    read_catalog,
    write_superblocks,
)
from dlfs.volume.adoption import adopt, holds_data
from dlfs.volume.copies import RepairState, repair_bytes, repair_samples

Progress = Callable[[int, int], None]

_log = logging.getLogger("dlfs")


def _log_unproven(reason: str) -> None:
    _log.warning("repair: %s", reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """Result of a repair.

    Attributes:
        uri: URI that opens the volume now.
        uuid: UUID of the volume.
        generation: generation of the volume after the repair.
        replaced: numbers of the members that have a new device.
        written_bytes: bytes written to copies that were wrong or missing, superblocks included.
        damaged: one text for each part of which no copy is right; those parts were left as they
            are.
    """

    uri: str
    uuid: UUID
    generation: int
    replaced: tuple[int, ...]
    written_bytes: int
    damaged: tuple[str, ...]


def repair(
    members: Members,
    *,
    replacements: Mapping[int, str] | None = None,
    force: bool = False,
    engine: Engine = "auto",
    opener: Opener | None = None,
    progress: Progress = lambda _done, _total: None,
    unproven: Callable[[str], None] = _log_unproven,
) -> RepairReport:
    """Restore all copies of a volume.

    Damaged copies and stale members are written again from correct copies. A lost member needs a
    device that replaces it. In a volume without replicas only superblocks can be repaired: from
    another copy on the member, or from the other members if a member has lost all of its own. The
    second case requires that every checksum of the volume holds with the data on that member.

    Args:
        members: URIs of the members, in any order, or one text with commas. Lost ones may be left
            out.
        replacements: URIs of new devices, by the numbers of the members that they replace. A file
            that does not exist is created.
        force: use a new device although it holds data. Without replicas: accept a member that has
            lost its superblocks although a sample or directory of the volume is damaged.
        engine: engine for file devices.
        opener: function that opens devices, in place of ``open_device`` with this engine.
        progress: called with the bytes done and the total bytes.
        unproven: called before anything is written if the available members cannot prove that their
            generation is the newest, with the reason; the repair makes it the newest. An exception
            that it raises ends the repair. By default the reason is logged.

    Raises:
        DegradedError: a member is lost, and no device replaces it.
        ExistsError: a new device holds data, and ``force`` is False.
        UsageError: the volume has no replicas and no damaged superblock, or a new device cannot be
            a member.
        LockedError: another writer has locked the volume.
        NotFoundError, FormatError: more members are lost than the volume tolerates.
        SpaceError: there is no room for another catalog.
        DeviceError: a device failed.
    """
    opener = opener or partial(open_device, engine=engine)
    given = split_uris(members)
    uris = resolve_uris(given, opener=opener)
    opener = opener_for(given, uris, opener)
    with closing(_Repair(dict(replacements or {}), force, opener, unproven)) as job:
        job.open(uris, progress)
        return job.run(progress)


class _Repair:
    """One repair: its open devices and its steps."""

    def __init__(
        self,
        replacements: dict[int, str],
        force: bool,
        opener: Opener,
        unproven: Callable[[str], None],
    ) -> None:
        self._unproven = unproven
        self._replacements = replacements
        self._force = force
        self._opener = opener
        self._devices: list[BlockDevice] = []
        self._fresh: dict[int, UUID] = {}
        """UUIDs of the new members, by number."""
        self._old: dict[int, BlockDevice] = {}
        """Readable devices that are replaced, by number: sources for chunks without other
        copies."""
        self._adopted: int | None = None
        """Number of the member that has lost its superblocks, in a volume without replicas."""
        self._damaged: tuple[str, ...] = ()
        """Damage that the examination of the adopted member found."""

    def close(self) -> None:
        """Unlock the members and close all devices."""
        try:
            unlock_members(self._devices)
        finally:
            close_devices([*self._devices, *self._old.values()])

    # ---- opening ---------------------------------------------------------------------------------

    def open(self, uris: Sequence[str], progress: Progress) -> None:
        """Open, check and lock all members, old and new."""
        self._devices = open_members(uris, writable=True, opener=self._opener)
        generation = self._load(self._devices)
        self._check_request(generation)
        if self._adopted is not None:  # before the lock writes to it: it may be another device
            self._devices = generation.devices  # the same devices, in order
            self._examine(generation, self._adopted, progress)
        devices = generation.devices
        for number, uri in self._replacements.items():
            old, devices[number] = devices[number], self._open_new(uri, number, devices, generation)
            if (
                generation.members[number].reason is None
                and old.identity != devices[number].identity
            ):
                self._old[number] = old
        in_use = {id(device) for device in (*devices, *self._old.values())}
        dropped = [device for device in self._devices if id(device) not in in_use]
        self._devices = devices
        close_devices(dropped)
        self._check_new_devices(generation)
        lock_members(devices, "dlfs repair")
        self._check_new_devices(generation)

    def _load(self, devices: Sequence[BlockDevice]) -> Generation:
        """Return the newest generation, also if one member has lost its superblocks."""
        try:
            return load_generation(devices)
        except FormatError:
            adopted = adopt(devices)
            if adopted is None:
                raise
        generation, self._adopted = adopted
        return generation

    def _check_request(self, generation: Generation) -> None:
        name = f"repair volume {generation.superblock.volume_uuid}"
        count = generation.geometry.member_count
        if generation.geometry.replicas == 1 and self._replacements:
            raise UsageError(f"{name}: it has no replicas: a lost member cannot be made again")
        if generation.geometry.replicas == 1 and not _bad_superblocks(generation):
            raise UsageError(
                f"{name}: it has no replicas to repair samples from, and all its superblocks are "
                "whole; 'dlfs verify' says what is damaged"
            )
        if not generation.superblock.writable:
            raise UsageError(
                f"{name}: a newer dlfs made it, with features that this one can read but not write"
            )
        for number in self._replacements:
            if not 0 <= number < count:
                raise UsageError(f"{name}: expected a member 0..{count - 1}, got {number}")
        self._check_complete(generation, self._replacements)
        if generation.unproven is not None:
            self._unproven(generation.unproven)

    def _check_complete(self, generation: Generation, replaced: Container[int]) -> None:
        """Check that every member has a device, old or new."""
        lost = [m for m in generation.absent if not m.copies and m.number not in replaced]
        if lost:
            raise DegradedError(
                f"repair volume {generation.superblock.volume_uuid}: expected a device in place of "
                f"every lost member, but {'; '.join(map(str, lost))}; if it will not come back, "
                f"'dlfs repair VOLUME --member {lost[0].number} --with DEVICE' replaces it"
            )

    def _open_new(
        self, uri: str, number: int, devices: Sequence[BlockDevice], generation: Generation
    ) -> BlockDevice:
        """Open the device that replaces a member, or that an earlier repair made that member."""
        (uri,) = split_uris([uri])
        parsed = parse_uri(uri)
        absent = isinstance(parsed, FileUri) and not Path(parsed.path).exists()
        size_bytes = _needed_bytes(generation.geometry, number) if absent else None
        prepare_file(uri, size_bytes, force=False, made=[])
        device = self._opener(uri, writable=True)
        self._devices.append(device)
        for other in devices:
            if other.identity == device.identity and other is not devices[number]:
                raise UsageError(f"repair with {uri}: it is a member already: {other.uri}")
        if not _is_member(device, number, generation):
            record = _joining_record(device, number, generation)
            self._fresh[number] = uuid4() if record is None else record.member_uuid
        return device

    def _check_new_devices(self, generation: Generation) -> None:
        geometry = generation.geometry
        for number in self._fresh:
            device = self._devices[number]
            check_blocks(device, geometry.block_bytes, "repair with")
            usable = usable_bytes(device.size_bytes, geometry.data_offset_bytes)
            if usable < geometry.group_of_member(number).row_count * geometry.chunk_bytes:
                needed = _needed_bytes(geometry, number)
                raise UsageError(
                    f"repair with {device.uri}: expected at least {needed} bytes, "
                    f"got {device.size_bytes}"
                )
            if not self._force and _joining_record(device, number, generation) is None:
                check_empty(device, "repair with")

    # ---- running ---------------------------------------------------------------------------------

    def run(self, progress: Progress) -> RepairReport:
        """Repair all copies, commit, and return the report."""
        found = self._load(self._sources())
        self._check_complete(found, self._fresh)  # a new device may have a newer generation
        name = f"repair volume {found.superblock.volume_uuid}"
        check_not_running(self._devices, found.catalog.unfinished, name)
        _catch_up(found)
        for number, uuid in self._fresh.items():
            record = JoiningRecord(found.superblock.volume_uuid, uuid, number)
            _write_record(self._devices[number], record.encode())
            wipe(self._devices[number])
        state = self._begin(found, progress)
        if found.geometry.replicas > 1:
            self._repair_copies(state, found)
        flush_all(self._devices)
        newest = found
        bad_count = _bad_superblocks(found)
        if state.written_bytes or self._fresh or found.absent or bad_count:
            newest = self._commit(found)
        for number, device in enumerate(self._devices):  # also records that a crash left
            if _joining_record(device, number, newest) is not None:
                _write_record(device, bytes(JOINING_BYTES))
        return RepairReport(
            uri=",".join(newest.uris),
            uuid=newest.superblock.volume_uuid,
            generation=newest.superblock.generation,
            replaced=tuple(sorted(self._replacements)),
            written_bytes=state.written_bytes + bad_count * SUPERBLOCK_BYTES,
            damaged=self._damaged or tuple(state.damaged),
        )

    def _sources(self) -> list[BlockDevice]:
        """Return the devices to read from; a new device is empty and counts as missing."""
        being_filled = DeviceLostError("it is being filled")
        return [
            MissingDevice(device.uri, being_filled) if number in self._fresh else device
            for number, device in enumerate(self._devices)
        ]

    def _examine(self, found: Generation, number: int, progress: Progress) -> None:
        """Check that the device without superblocks is the member for which it is taken.

        Raises:
            FormatError: a checksum of the volume does not hold, or none covers the device.
        """
        state = self._begin(found, progress)
        self._repair_datasets(state, found)
        self._damaged = tuple(state.damaged)
        problem = state.damaged[0] if state.damaged else "nothing of the volume lies on it"
        if (state.damaged or not holds_data(found, number)) and not self._force:
            raise FormatError(
                f"repair volume {found.superblock.volume_uuid}: {found.devices[number].uri} has no "
                f"whole superblock, and cannot be shown to be member {number}: {problem}; --force, "
                "or force=True, takes it for that member"
            )

    def _begin(self, found: Generation, progress: Progress) -> RepairState:
        chunks = sum(count_chunks(record.runs) for record in found.catalog.records)
        total = chunks * found.geometry.chunk_bytes
        sources = [self._old.get(n, source) for n, source in enumerate(self._sources())]
        state = RepairState(
            sources,
            self._devices,
            lambda done: progress(min(done, total), total),
            fresh=frozenset(self._fresh),
            stale=frozenset(member.number for member in found.absent),
        )
        state.progress(0)
        return state

    def _repair_copies(self, state: RepairState, found: Generation) -> None:
        self._repair_datasets(state, found)
        geometry = found.geometry
        space = DataSpace(geometry, found.superblock.catalog_runs)
        catalog = read_catalog(found.members, found.superblock)[1]
        chunks = -(-catalog.nbytes // geometry.chunk_bytes)
        correct = np.zeros(chunks * geometry.chunk_bytes, np.uint8)
        correct[: catalog.nbytes] = catalog
        repair_bytes(state, space, correct)

    def _repair_datasets(self, state: RepairState, found: Generation) -> None:
        shared = SharedChunks(found.geometry, found.catalog.datasets)
        for record in found.catalog.datasets:
            self._repair_dataset(state, found, record, shared)
        state.fresh |= state.stale  # bytes that no checksum proves are those of current members
        for record in found.catalog.unfinished:
            runs = (*record.data_runs, *record.journal_runs)  # what is granted means nothing
            repair_bytes(state, DataSpace(found.geometry, runs), None)

    def _repair_dataset(
        self, state: RepairState, found: Generation, record: DatasetRecord, shared: SharedChunks
    ) -> None:
        name = f"dataset {display(record.name)!r} version {record.version}"
        space = DataSpace(found.geometry, record.directory_runs)
        samples_runs, attributes_runs = record.split_data_runs(found.geometry.chunk_bytes)
        data = DataSpace(found.geometry, samples_runs)
        self._repair_attributes(state, DataSpace(found.geometry, attributes_runs), record, name)
        try:
            segment = read_segment(state.sources, found.geometry, record)
            directory = load_segment(found, record, shared=False, locked=True)
        except (FormatError, DeviceError) as error:
            state.damaged.append(f"{name}: {error}")
            repair_bytes(state, space, None)
            repair_bytes(state, data, None)
            return
        with directory:
            repair_bytes(state, space, segment)
            start, damaged = shared.start(record, directory), len(state.damaged)
            state.progress_by(start)
            repair_samples(state, data, directory, name, start=start)
            if len(state.damaged) == damaged:
                shared.add_intact(record, directory)

    def _repair_attributes(
        self, state: RepairState, space: DataSpace, record: DatasetRecord, name: str
    ) -> None:
        try:
            segment = read_attributes(state.sources, space.geometry, record)
        except (FormatError, DeviceError) as error:
            state.damaged.append(f"{name}: {error}")
            repair_bytes(state, space, None)
            return
        if segment is not None:
            repair_bytes(state, space, segment)

    def _commit(self, found: Generation) -> Generation:
        """Commit twice, so that this repair writes every superblock copy."""
        uuids = list(found.superblock.member_uuids)
        members = []
        for member, device in zip(found.members, self._devices, strict=True):
            number = member.number
            if number in self._fresh:
                uuids[number] = self._fresh[number]
                member = Member(number, uuids[number], device, device.size_bytes, ())
            members.append(replace(member, reason=None))
        superblock = replace(found.superblock, member_uuids=tuple(uuids))
        base = Generation(tuple(members), superblock, found.catalog)
        first = [member for member in members if member.number in self._fresh]
        if self._fresh and any(read_locations(member.device) for member in members):
            try:
                write_locations(members, encode_locations(superblock, members))
            except LimitError as error:
                _log.warning("repair volume %s: %s", superblock.volume_uuid, error)
        # Workers of imports know the members of before alone: the first commit ends their right to
        # write, and the second one frees what they may have been writing until then.
        by_workers = imports_by_workers(found.catalog.unfinished)
        renewed = with_new_terms(by_workers)
        base = Transaction.over(base).commit(removed=by_workers, added=renewed, first=first)
        wait_for_workers(base.devices, renewed)
        return Transaction.over(base).commit(removed=renewed, added=without_grants(renewed))


def _catch_up(found: Generation) -> None:
    """Make the newest generation durable on all members, as every writer does first."""
    current = [member for member in found.members if member.reason is None]
    flush_all([member.device for member in current])
    lagging = [m for m in current if not m.is_current(found.superblock.generation)]
    if lagging:
        write_superblocks(lagging, found.superblock)


def _bad_superblocks(found: Generation) -> int:
    """Return the number of superblock copies that verification would report."""
    return sum(
        copy.state in ("damaged", "stale")
        for member in found.members
        for copy in describe_member(member, found.superblock).superblocks
    )


def _needed_bytes(geometry: Geometry, member: int) -> int:
    """Return the smallest possible size of a member, in bytes."""
    rows_bytes = geometry.group_of_member(member).row_count * geometry.chunk_bytes
    return geometry.data_offset_bytes + rows_bytes + SUPERBLOCK_BYTES


def _is_member(device: BlockDevice, number: int, generation: Generation) -> bool:
    """Return True if a device is that member already, by a finished or interrupted repair."""
    try:
        member = identify(device)
    except (DeviceError, FormatError):
        return False
    superblock = generation.superblock
    if member.newest.volume_uuid != superblock.volume_uuid:
        return False
    ahead = member.newest.generation > superblock.generation and member.number == number
    return ahead or member.uuid == superblock.member_uuids[number]


def _joining_record(
    device: BlockDevice, number: int, generation: Generation
) -> JoiningRecord | None:
    """Return the record that an interrupted repair of this member left, or None."""
    if device.size_bytes < JOINING_OFFSET_BYTES + JOINING_BYTES:
        return None
    record = JoiningRecord.decode(device.read(JOINING_OFFSET_BYTES, JOINING_BYTES))
    expected = generation.superblock.volume_uuid, number
    found = record is not None and (record.volume_uuid, record.member_number) == expected
    return record if found else None


def _write_record(device: BlockDevice, record: bytes) -> None:
    device.write(JOINING_OFFSET_BYTES, record)
    device.flush()
