"""Connections to volumes, which ``Volume`` and ``Dataset`` open and read through.

A ``Connection`` is small and picklable. It opens a ``VolumeSession`` or a ``DatasetSession``, which
belongs to one process and owns what reading needs: devices or a service's channels, the directory
and the reader. ``LocalConnection`` opens the devices in this process;
``dlfs.service.client.ServiceConnection`` opens a volume of a node service.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol
from uuid import UUID

from dlfs.attributes import AttributesLater, AttributeTable, load_attributes
from dlfs.base.arguments import check_integer
from dlfs.base.closing import LiveObjects, LiveValues, Uses
from dlfs.base.deadlines import is_over, limit_call, limit_device, share_for
from dlfs.base.units import MIB, format_bytes, format_count
from dlfs.block import BlockDevice, MissingDevice, is_silent, open_device
from dlfs.connection.arriving import Arrival, ArrivedStep, find_record, record_of_step
from dlfs.connection.identity import DatasetIdentity
from dlfs.connection.placement import LocalPlacement
from dlfs.connection.segment_loading import load_segment
from dlfs.connection.unfinished import load_step
from dlfs.directory import FrozenDirectory
from dlfs.directory.sharing import SHARED_ROOT
from dlfs.errors import (
    DeviceError,
    NotFoundError,
    StaleError,
    UsageError,
)
from dlfs.fabric.watching import DiscoveryWatch, watch_discovery
from dlfs.fields import FieldSpan
from dlfs.format.catalog import Catalog, DatasetRecord
from dlfs.format.geometry import Geometry
from dlfs.format.paths import display
from dlfs.format.superblock import Superblock
from dlfs.reader import (
    DEPTH_MAX,
    MOVES_MAX,
    FieldReaders,
    MemoryBudget,
    MovedError,
    ReaderOptions,
    SampleReader,
    Where,
    make_native_reader,
    read_timeout_ms,
)
from dlfs.reader.field_readers import OpenParts
from dlfs.store.discovered import resolve_uris
from dlfs.store.info import VolumeInfo, describe_volume
from dlfs.store.journal import Step, read_steps
from dlfs.store.losses import report_change, report_members
from dlfs.store.members import (
    Identified,
    Opener,
    close_devices,
    describe_swapped,
)
from dlfs.store.newest import (
    REOPEN_PAUSE_S,
    REOPEN_TIMEOUT_S,
    close_removed,
    load_again,
    load_joined,
)
from dlfs.store.places import opener_for
from dlfs.store.recorded import open_members, remember_members
from dlfs.store.transaction import Generation, load_generation

_log = logging.getLogger("dlfs")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """Options for opening a volume and its datasets.

    Attributes:
        memory_bytes: sample memory of the volume in each process, in bytes. It holds samples that
            are cached, read ahead, or pinned by batches.
        depth: most operations in flight per member and thread.
        opener: opens a device: ``open_device``, perhaps with an I/O engine of file devices.
        memory: the memory itself, which all datasets of the volume share; made by default. That of
            a service lies in an unnamed file, as directories do then, whose descriptor it passes to
            its clients.
    """

    memory_bytes: int = 256 * MIB
    depth: int = 128
    opener: Opener = open_device
    memory: MemoryBudget | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for option, low, high in (("memory_bytes", 0, None), ("depth", 1, DEPTH_MAX)):
            value = getattr(self, option)
            number = check_integer(value, low, high, option=option, action="open a volume")
            object.__setattr__(self, option, number)
        if self.memory is None or self.memory.size_bytes != self.memory_bytes:
            object.__setattr__(self, "memory", MemoryBudget(self.memory_bytes))

    @property
    def shared(self) -> bool:
        """True if other processes can map the memory."""
        return self.memory is not None and self.memory.shared


class VolumeSession(Protocol):
    """A volume that one process has open, at the generation that it loaded last."""

    @property
    def superblock(self) -> Superblock:
        """Superblock of the loaded generation."""

    @property
    def catalog(self) -> Catalog:
        """Catalog of the loaded generation."""

    @property
    def connection(self) -> Connection:
        """Connection that opens the same volume again without discovering its members."""

    def describe(self) -> VolumeInfo:
        """Return a description of the volume for users."""

    def refresh(self) -> None:
        """Load the newest generation.

        Raises:
            DlfsError: the same errors as ``Connection.open_volume``. The loaded generation stays.
        """

    def read_steps(self, record: DatasetRecord, known: Sequence[Step]) -> Sequence[Step]:
        """Return all steps of an unfinished import of the loaded generation.

        Args:
            record: record of the import.
            known: the first of its steps, which are not read again.

        Raises:
            FormatError: the journal is malformed, or is that of another generation.
            StaleError: a service has no such import any more.
            DeviceError: a device cannot be read.
        """

    def open_step(self, arrival: Arrival, step: ArrivedStep) -> DatasetSession:
        """Open the samples of a step of an unfinished import.

        The session must be closed before this one is.

        Args:
            arrival: what has arrived of the import at the loaded generation.
            step: one of its steps.

        Raises:
            FormatError: its journal is malformed, or is that of another generation.
            StaleError: a service has no such import any more.
            DeviceError: a device cannot be read.
            LimitError: a service has no memory left for this client.
        """

    def close(self) -> None:
        """Close the devices or the connection."""


@dataclass(eq=False, kw_only=True)
class DatasetSession:
    """A dataset that one process has open.

    Attributes:
        record: the dataset's catalog record.
        geometry: geometry of the volume.
        members: URIs of the volume's members, in order.
        directory: the sample directory.
        reader: the reader of the samples.
        open_parts: opens a reader of parts of the samples.
        sources: devices of the members, in order; empty if a service reads them.
        release: closes the devices or the connection to the service.
        uses: calls under way that read the directory or the columns from the devices.
        load_attributes: opens the dataset's columns; called once, on their first use.
        is_lost: returns True if the session can no longer be used and must be opened again.
        attributes: the dataset's columns, for the dataset and the batches of its reader.
    """

    record: DatasetRecord
    geometry: Geometry
    members: tuple[str, ...]
    directory: FrozenDirectory
    reader: SampleReader
    open_parts: OpenParts
    sources: Sequence[BlockDevice] = ()
    release: Callable[[], None]
    uses: Uses
    load_attributes: Callable[[], AttributeTable]
    is_lost: Callable[[], bool] = lambda: False
    attributes: AttributesLater = field(init=False)
    readers: FieldReaders = field(init=False)

    def __post_init__(self) -> None:
        self.attributes = self.reader.attributes = AttributesLater(self.load_attributes)
        name = display(self.record.name)
        self.readers = FieldReaders(self.reader, self.attributes, self.open_parts, name)

    def close(self, *, with_directory: bool) -> None:
        """Close the session, with its directory on request.

        Epochs and calls under way keep what they use of devices and directory until they end.
        """
        self.attributes.close()
        self.readers.close()
        self.uses.close(lambda: self._release(with_directory))

    def _release(self, with_directory: bool) -> None:
        try:
            self.release()
        finally:
            if with_directory:
                self.directory.close()


class Connection(Protocol):
    """Opens a volume and its datasets."""

    @property
    def uri(self) -> str:
        """URI of the volume or service, as users write it."""

    def open_volume(self) -> VolumeSession:
        """Open the volume at its newest generation.

        Raises:
            DlfsError: the same errors as ``dlfs.open``.
        """

    def open_dataset(
        self, identity: DatasetIdentity, directory: FrozenDirectory | None
    ) -> DatasetSession:
        """Open a dataset.

        Args:
            identity: identity of the dataset.
            directory: directory of the dataset, if this process has loaded it already.

        Raises:
            StaleError: the dataset was removed.
            FormatError: the volume or the directory is damaged.
            DeviceError: a device cannot be read.
        """


# ---- local devices -------------------------------------------------------------------------------

_loaded: LiveValues[UUID | None, Generation] = LiveValues()
"""Generation of each volume that this process opened last: its catalog is not read again when one
of its datasets is opened."""


@dataclass(frozen=True)
class LocalConnection:
    """A connection that opens the volume's devices in this process.

    Args:
        uris: URIs of the members, in any order.
        options: options for opening them.
    """

    uris: tuple[str, ...]
    options: OpenOptions = OpenOptions()

    @property
    def uri(self) -> str:
        """URIs of the members, separated by commas."""
        return ",".join(self.uris)

    def open_volume(self) -> LocalVolume:
        """Open the members and find the newest generation."""
        options = self.options
        with limit_call():
            uris = resolve_uris(self.uris, opener=options.opener)
            options = replace(options, opener=opener_for(self.uris, uris, options.opener))
            generation = LocalConnection(uris, options)._open_generation(uris)
        volume = LocalVolume(generation, options, watch_discovery(self.uris))
        _log.debug(
            "opened volume %s at generation %d: %s, %s",
            volume.superblock.volume_uuid,
            volume.superblock.generation,
            format_count(len(uris), "member"),
            format_count(len(volume.catalog.datasets), "dataset"),
        )
        return volume

    def _open_generation(
        self, uris: Sequence[str], identity: DatasetIdentity | None = None
    ) -> Generation:
        options = self.options
        identified: Identified = {}
        devices = open_members(
            uris,
            volume_uuid=None if identity is None else identity.volume_uuid,
            opener=options.opener,
            identified=identified,
        )
        try:
            known = None if identity is None else _loaded.get(identity.volume_uuid)
            generation = load_joined(
                devices,
                opener=options.opener,
                load=partial(load_generation, known=known, identified=identified),
            )
        except BaseException as error:
            other = None
            if isinstance(error, UsageError) and identity is not None and identity.volume_uuid:
                other = describe_swapped(devices, identity.volume_uuid)
            close_devices(devices)
            if identity is not None and other is not None:
                raise identity.stale(other) from error
            raise
        close_removed(generation, devices)
        report_members(generation)
        _loaded.put(generation.superblock.volume_uuid, generation)
        return generation

    def open_dataset(
        self, identity: DatasetIdentity, directory: FrozenDirectory | None
    ) -> DatasetSession:
        """Open the members for this dataset alone, its directory and a reader.

        It does so again while the dataset is moved, or a device cannot be opened for the moment.
        """
        deadline = time.monotonic() + REOPEN_TIMEOUT_S
        moves = 0
        with limit_call():
            while True:
                try:
                    return self._open_dataset(identity, directory)
                except MovedError:  # while it was opened
                    moves += 1
                    if moves == MOVES_MAX:
                        raise
                except DeviceError as error:
                    over = is_over() or time.monotonic() > deadline
                    if over or not error.retryable or any(map(is_silent, self.uris)):
                        raise
                    time.sleep(REOPEN_PAUSE_S)

    def _open_dataset(
        self, identity: DatasetIdentity, directory: FrozenDirectory | None
    ) -> DatasetSession:
        generation = self._open_generation(self.uris, identity)
        options = self.options
        uses = Uses(f"use dataset {identity.name!r}: it is closed")
        try:
            record = generation.catalog.find_uuid(identity.uuid)
            if record is None:
                raise identity.missing_from(generation.devices)
            directory = directory or load_segment(
                generation,
                record,
                shared=not options.shared,
                opener=options.opener,
                uses=uses,
            )
            placement = LocalPlacement(generation, record, identity, options.opener, uses)
            make_reader = partial(self._make_reader, generation, identity, record, placement)
            reader = make_reader(directory)
            placement.lost_members = reader.native.lost_members
            placement.member_code = reader.native.member_code
            _log.debug(
                "opened dataset %s@%d: %s, at most %s of memory for them, %d operations in flight",
                identity.name,
                identity.version,
                format_count(record.sample_count, "sample"),
                format_bytes(options.memory_bytes),
                options.depth,
            )
        except BaseException:
            close_devices(generation.devices)
            raise

        def release() -> None:
            placement.closed = True
            close_devices(generation.devices)

        return DatasetSession(
            record=record,
            geometry=generation.geometry,
            members=tuple(device.uri for device in generation.devices),
            directory=directory,
            reader=reader,
            open_parts=make_reader,
            sources=generation.sources,
            release=release,
            uses=uses,
            is_lost=lambda: placement.moved,
            load_attributes=lambda: load_attributes(
                generation.sources,
                generation.geometry,
                record,
                volume_uuid=generation.superblock.volume_uuid,
                diagnose=placement.diagnose,
                uses=uses,
                root=None if self.options.shared else SHARED_ROOT,
            ),
        )

    def _make_reader(
        self,
        generation: Generation,
        identity: DatasetIdentity,
        record: DatasetRecord,
        placement: LocalPlacement,
        directory: FrozenDirectory,
        span: FieldSpan = (),
    ) -> SampleReader:
        timeout_ms = read_timeout_ms(generation.sources)
        native = make_native_reader(
            [None if isinstance(s, MissingDevice) else s.native for s in generation.sources],
            generation.geometry,
            record.data_runs,
            directory,
            ReaderOptions(
                memory=self.options.memory,
                depth=self.options.depth,
                gap_bytes=max(device.gap_bytes for device in generation.sources),
                timeout_ms=timeout_ms,
                parts=bool(span),
            ),
        )
        return SampleReader(
            native,
            generation.geometry,
            directory,
            Where(
                identity.name, tuple(device.uri for device in generation.devices), span, timeout_ms
            ),
            placement,
            lambda number, reason: report_change(generation, number, reason),
        )


class LocalVolume:
    """The open members of a volume.

    Args:
        generation: the loaded generation; this object owns its devices from now on.
        options: options with which the devices were opened.
        watch: gives the devices the paths that are discovered later; closed with them.
    """

    def __init__(
        self, generation: Generation, options: OpenOptions, watch: DiscoveryWatch | None = None
    ) -> None:
        self.generation = generation
        self.options = options
        self._watch = watch
        self._steps: LiveObjects[LocalPlacement] = LiveObjects()

    @property
    def superblock(self) -> Superblock:
        """Superblock of the loaded generation."""
        return self.generation.superblock

    @property
    def catalog(self) -> Catalog:
        """Catalog of the loaded generation."""
        return self.generation.catalog

    @property
    def connection(self) -> LocalConnection:
        """Connection to the members that were found."""
        return LocalConnection(self.generation.uris, self.options)

    def describe(self) -> VolumeInfo:
        """Return a description of the volume, with the state of every superblock copy."""
        return describe_volume(self.generation)

    def read_steps(self, record: DatasetRecord, known: Sequence[Step]) -> Sequence[Step]:
        """Read the headers of all steps of an import; see ``VolumeSession``."""
        return read_steps(self.generation, record, known)

    def open_step(
        self, arrival: Arrival, step: ArrivedStep, options: OpenOptions | None = None
    ) -> DatasetSession:
        """Open the samples of a step, with the devices of this volume; see ``VolumeSession``.

        Args:
            arrival: what has arrived of the import at the loaded generation.
            step: one of its steps.
            options: options for reading it; by default those of this volume.
        """
        assert step.committed is not None
        generation, options = self.generation, options or self.options
        connection = LocalConnection(generation.uris, options)
        name, uuid = arrival.record.name, arrival.record.uuid
        chunk_bytes = generation.geometry.chunk_bytes

        def find(catalog: Catalog) -> DatasetRecord | None:
            found = find_record(catalog, name, uuid)
            return None if found is None else record_of_step(found, step, chunk_bytes)

        committed, shared = step.committed, options.shared
        directory, table = load_step(generation, arrival.record, committed, shared=shared)
        record = record_of_step(arrival.record, step, chunk_bytes)
        identity = DatasetIdentity.of(record, self.superblock.volume_uuid)
        uses = Uses(f"use the import of {identity.name!r}: it is closed")
        placement = LocalPlacement(generation, record, identity, options.opener, uses, find)
        self._steps.add(placement)
        if not set(map(id, generation.devices)) <= set(map(id, self.generation.devices)):
            placement.moved = True  # another thread has refreshed the volume meanwhile
        make_reader = partial(connection._make_reader, generation, identity, record, placement)
        reader = make_reader(directory)
        placement.lost_members = reader.native.lost_members
        placement.member_code = reader.native.member_code

        def release() -> None:
            placement.closed = True

        return DatasetSession(
            record=record,
            geometry=generation.geometry,
            members=tuple(device.uri for device in generation.devices),
            directory=directory,
            reader=reader,
            open_parts=make_reader,
            sources=generation.sources,
            release=release,
            uses=uses,
            is_lost=lambda: placement.moved,
            load_attributes=lambda: table,
        )

    def refresh(self, committed: Generation | None = None) -> None:
        """Load the newest generation, and open members that were missing and are back.

        Args:
            committed: generation that this process has just committed, whose catalog is known.
        """
        opened = self.generation
        part = share_for(len(opened.members), opened.copies_left)
        with limit_call(), limit_device(part):
            self._refresh(opened, committed or opened)
        remember_members(opened.members, self.superblock, self.generation.members)
        report_members(self.generation)

    def _refresh(self, opened: Generation, known: Generation) -> None:
        before = opened.devices
        devices = [self._reopen(device) for device in before]
        try:
            load = partial(self._newest, known=known)
            self.generation = load_again(opened, devices, opener=self.options.opener, load=load)
        except BaseException:
            close_devices([device for device in devices if device not in before])
            raise
        _loaded.put(self.superblock.volume_uuid, self.generation)
        if set(map(id, before)) - set(map(id, self.generation.devices)):
            for placement in self._steps:
                placement.moved = True  # its reader has devices that are closed now
        close_removed(self.generation, devices)

    def _newest(self, devices: Sequence[BlockDevice], known: Generation) -> Generation:
        """Load the newest generation of the same volume.

        Raises:
            StaleError: a device holds another volume now.
        """
        expected = self.superblock.volume_uuid
        try:
            newest = load_generation(devices, known)
            if newest.superblock.volume_uuid == expected:
                return newest
        except UsageError as error:
            other = describe_swapped(devices, expected)
            if other is None:
                raise
            raise StaleError(f"refresh volume {expected}: {other}") from error
        raise StaleError(f"refresh volume {expected}: {describe_swapped(devices, expected)}")

    def _reopen(self, device: BlockDevice) -> BlockDevice:
        """Return a device; a missing one is opened if it is back."""
        if not isinstance(device, MissingDevice) or not device.given or device.refused:
            return device
        try:
            return self.options.opener(device.uri, writable=False)
        except (DeviceError, NotFoundError) as error:
            return MissingDevice(device.uri, error)

    def close(self) -> None:
        """Close the devices."""
        if self._watch is not None:
            self._watch.close()
        close_devices(self.generation.devices)
