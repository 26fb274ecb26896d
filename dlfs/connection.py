"""Connections to volumes: what ``Volume`` and ``Dataset`` are opened from, and read through.

A ``Connection`` is small and picklable. It opens a ``VolumeSession`` or a ``DatasetSession``, which
belongs to one process and has all that reading needs. ``LocalConnection``, here, opens the devices
themselves; ``dlfs.service.client`` has the connection to a node service.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol
from uuid import UUID

import numpy as np

from dlfs.arguments import ENGINES, Engine, check_choice, check_integer
from dlfs.attributes import AttributesLater, AttributeTable, load_attributes
from dlfs.block import BlockDevice, MissingDevice, open_device
from dlfs.directory import (
    DirectoryIdentity,
    DirectorySizes,
    FrozenDirectory,
    load_directory,
)
from dlfs.directory.sharing import SHARED_ROOT
from dlfs.errors import (
    DeviceError,
    DlfsError,
    FormatError,
    NotFoundError,
    StaleError,
    UsageError,
)
from dlfs.format.catalog import Catalog, DatasetRecord
from dlfs.format.geometry import DataSpace, Geometry
from dlfs.format.paths import display
from dlfs.format.superblock import Superblock
from dlfs.reader import (
    DEPTH_MAX,
    ReaderOptions,
    SampleReader,
    Where,
    make_native_reader,
    read_timeout_ms,
)
from dlfs.store.chunk_reader import Choice, alternatives, read_into
from dlfs.store.discovered import resolve_uris
from dlfs.store.info import VolumeInfo, describe_volume
from dlfs.store.losses import report_loss, report_members, report_return
from dlfs.store.members import Opener, close_devices, find_foreign, open_members
from dlfs.store.transaction import Generation, load_generation
from dlfs.units import MIB, format_bytes, format_count
from dlfs.wording import list_names, list_numbers, quote

_log = logging.getLogger("dlfs")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """How a volume and its datasets are opened.

    Attributes:
        memory_bytes: budget of each open dataset in each process, in bytes: samples that are
            cached, read ahead and lent to batches.
        depth: operations in flight per member and thread.
        engine: of file devices: ``auto``, ``uring`` or ``threads``.
        opener: of devices.
        shared: directories and sample memory lie in files without a name, whose descriptors a
            service may pass on.
    """

    memory_bytes: int = 256 * MIB
    depth: int = 128
    engine: Engine = "auto"
    opener: Opener = open_device
    shared: bool = False

    def __post_init__(self) -> None:
        check_choice(self.engine, ENGINES, option="engine", action="open a volume")
        for option, low, high in (("memory_bytes", 0, None), ("depth", 1, DEPTH_MAX)):
            value = getattr(self, option)
            number = check_integer(value, low, high, option=option, action="open a volume")
            object.__setattr__(self, option, number)


@dataclass(frozen=True, slots=True)
class DatasetIdentity:
    """Which version of which dataset, and what errors call it."""

    uuid: UUID
    name: str
    version: int
    volume_uuid: UUID | None = None
    """UUID of its volume; None when it is not known, and not checked then."""

    @classmethod
    def of(cls, record: DatasetRecord, volume_uuid: UUID | None = None) -> DatasetIdentity:
        """Of a dataset in a catalog."""
        return cls(record.uuid, display(record.name), record.version, volume_uuid)

    def stale(self, reason: str = "it was removed") -> StaleError:
        """The error of a dataset that is not there any more."""
        return StaleError(
            f"read dataset {self.name!r} version {self.version} ({self.uuid}): {reason}"
        )

    def missing_from(self, devices: Sequence[BlockDevice]) -> StaleError:
        """The error of a dataset that a volume's devices do not have (any more), with the cause."""
        other = None if self.volume_uuid is None else _swapped(devices, self.volume_uuid)
        return self.stale() if other is None else self.stale(other)


# ---- what a connection gives --------------------------------------------------------------------


class VolumeSession(Protocol):
    """A process's way to a volume, as it was when it was last looked at."""

    @property
    def superblock(self) -> Superblock:
        """Of the generation seen."""

    @property
    def catalog(self) -> Catalog:
        """Of the generation seen."""

    @property
    def connection(self) -> Connection:
        """What opens the same volume again, with nothing left to be discovered."""

    def describe(self) -> VolumeInfo:
        """All of it, for users."""

    def refresh(self) -> None:
        """See the newest generation.

        Raises:
            DlfsError: as ``Connection.open_volume``; what was seen stays.
        """

    def close(self) -> None:
        """Give up what is open."""


@dataclass(eq=False, kw_only=True)
class DatasetSession:
    """A process's way to a dataset.

    Attributes:
        record: its catalog record.
        geometry: of its volume.
        members: URIs of the members, in order.
        directory: of samples.
        reader: of samples.
        sources: what to read the members from, in order; none where a service does it.
        release: gives up what else is open.
        load_attributes: opens the dataset's columns; called once, when they are first asked for.
        is_lost: whether this way is gone for good, and another one has to be made.
        attributes: the dataset's columns, for this object and its reader's batches.
    """

    record: DatasetRecord
    geometry: Geometry
    members: tuple[str, ...]
    directory: FrozenDirectory
    reader: SampleReader
    sources: Sequence[BlockDevice] = ()
    release: Callable[[], None]
    load_attributes: Callable[[], AttributeTable]
    is_lost: Callable[[], bool] = lambda: False
    attributes: AttributesLater = field(init=False)

    def __post_init__(self) -> None:
        self.attributes = self.reader.attributes = AttributesLater(self.load_attributes)

    def close(self, *, with_directory: bool) -> None:
        """Give up all, or all but the directory.

        Epochs and calls that are under way keep the devices, and the last of them closes those.
        """
        self.attributes.close()
        self.reader.close(lambda: self._let_go(with_directory))

    def _let_go(self, with_directory: bool) -> None:
        try:
            self.release()
        finally:
            if with_directory:
                self.directory.close()


class Connection(Protocol):
    """What opens a volume and its datasets."""

    @property
    def uri(self) -> str:
        """What people call it."""

    def open_volume(self) -> VolumeSession:
        """Open the volume at its newest generation.

        Raises:
            DlfsError: as ``dlfs.open``.
        """

    def open_dataset(
        self, identity: DatasetIdentity, directory: FrozenDirectory | None
    ) -> DatasetSession:
        """Open a dataset.

        Args:
            identity: of the dataset.
            directory: of the same dataset, when this process has it already.

        Raises:
            StaleError: the dataset was removed.
            FormatError: volume or directory are damaged.
            DeviceError: a device cannot be read.
        """


# ---- the devices themselves ----------------------------------------------------------------------


@dataclass(frozen=True)
class LocalConnection:
    """A volume's own devices, opened by this process.

    Args:
        uris: of the members, in any order.
        options: how to open.
    """

    uris: tuple[str, ...]
    options: OpenOptions = OpenOptions()

    @property
    def uri(self) -> str:
        """What opens the volume again: the members' URIs, with commas between."""
        return ",".join(self.uris)

    def open_volume(self) -> LocalVolume:
        """Open the members and find the newest generation."""
        options = self.options
        uris = resolve_uris(self.uris, engine=options.engine, opener=options.opener)
        volume = LocalVolume(self._open_generation(uris), options)
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
        devices = open_members(uris, engine=self.options.engine, opener=self.options.opener)
        try:
            generation = load_generation(devices)
        except BaseException as error:
            other = None
            if isinstance(error, UsageError) and identity is not None and identity.volume_uuid:
                other = _swapped(devices, identity.volume_uuid)
            close_devices(devices)
            if identity is not None and other is not None:
                raise identity.stale(other) from error
            raise
        report_members(generation)
        return generation

    def open_dataset(
        self, identity: DatasetIdentity, directory: FrozenDirectory | None
    ) -> DatasetSession:
        """Open the members, for this dataset alone, its directory and a reader."""
        generation = self._open_generation(self.uris, identity)
        try:
            record = find_record(generation.catalog, identity.uuid)
            if record is None:
                raise identity.missing_from(generation.devices)
            directory = directory or load_segment(
                generation, record, shared=not self.options.shared
            )
            reader = self._make_reader(generation, record, identity, directory)
            _log.debug(
                "opened dataset %s@%d: %s, at most %s of memory for them, %d operations in flight",
                identity.name,
                identity.version,
                format_count(record.sample_count, "sample"),
                format_bytes(self.options.memory_bytes),
                self.options.depth,
            )
        except BaseException:
            close_devices(generation.devices)
            raise
        return DatasetSession(
            record=record,
            geometry=generation.geometry,
            members=tuple(device.uri for device in generation.devices),
            directory=directory,
            reader=reader,
            sources=generation.sources,
            release=lambda: close_devices(generation.devices),
            load_attributes=lambda: load_attributes(
                generation.sources,
                generation.geometry,
                record,
                volume_uuid=generation.superblock.volume_uuid,
                diagnose=lambda: _diagnose(generation.devices, identity),
                root=None if self.options.shared else SHARED_ROOT,
            ),
        )

    def _make_reader(
        self,
        generation: Generation,
        record: DatasetRecord,
        identity: DatasetIdentity,
        directory: FrozenDirectory,
    ) -> SampleReader:
        native = make_native_reader(
            [None if isinstance(s, MissingDevice) else s.native for s in generation.sources],
            generation.geometry,
            record.data_runs,
            directory,
            ReaderOptions(
                memory_bytes=self.options.memory_bytes,
                depth=self.options.depth,
                gap_bytes=max(device.gap_bytes for device in generation.sources),
                timeout_ms=read_timeout_ms(generation.sources),
                shared=self.options.shared,
            ),
        )
        return SampleReader(
            native,
            generation.geometry,
            directory,
            Where(identity.name, tuple(device.uri for device in generation.devices)),
            lambda: _diagnose(generation.devices, identity),
            lambda number, reason: _report(generation, number, reason),
        )


class LocalVolume:
    """The members of a volume, open.

    Args:
        generation: with the devices, which this object owns from now on.
        options: they were opened with.
    """

    def __init__(self, generation: Generation, options: OpenOptions) -> None:
        self.generation = generation
        self.options = options

    @property
    def superblock(self) -> Superblock:
        """Of the generation seen."""
        return self.generation.superblock

    @property
    def catalog(self) -> Catalog:
        """Of the generation seen."""
        return self.generation.catalog

    @property
    def connection(self) -> LocalConnection:
        """The members that were found."""
        return LocalConnection(self.generation.uris, self.options)

    def describe(self) -> VolumeInfo:
        """All of it, with the state of every superblock copy as found at opening."""
        return describe_volume(self.generation)

    def refresh(self) -> None:
        """See the newest generation, and members that are back."""
        before = self.generation.devices
        devices = [self._opened_again(device) for device in before]
        try:
            self.generation = self._newest(devices)
        except BaseException:
            close_devices([device for device in devices if device not in before])
            raise
        report_members(self.generation)

    def _newest(self, devices: Sequence[BlockDevice]) -> Generation:
        """The newest generation of the same volume.

        Raises:
            StaleError: a device holds another volume now.
        """
        expected = self.superblock.volume_uuid
        try:
            newest = load_generation(devices)
            if newest.superblock.volume_uuid == expected:
                return newest
        except UsageError as error:
            other = _swapped(devices, expected)
            if other is None:
                raise
            raise StaleError(f"look at volume {expected}: {other}") from error
        raise StaleError(f"look at volume {expected}: {_swapped(devices, expected)}")

    def _opened_again(self, device: BlockDevice) -> BlockDevice:
        """A device, opened if it was missing and is not now."""
        if not isinstance(device, MissingDevice) or not device.given:
            return device
        try:
            return self.options.opener(device.uri, writable=False, engine=self.options.engine)
        except (DeviceError, NotFoundError) as error:
            return MissingDevice(device.uri, error)

    def close(self) -> None:
        """Close the devices."""
        close_devices(self.generation.devices)


def _diagnose(devices: Sequence[BlockDevice], identity: DatasetIdentity) -> DlfsError | None:
    """Why samples may have failed: the dataset was removed since, or a device was swapped."""
    try:
        newest = load_generation(devices)
        if find_record(newest.catalog, identity.uuid) is not None:
            return None
    except (FormatError, DeviceError, NotFoundError, UsageError):
        other = None
        if identity.volume_uuid is not None:
            other = _swapped(devices, identity.volume_uuid)
        return None if other is None else identity.stale(other)  # else the samples' errors say more
    return identity.missing_from(devices)


def _swapped(devices: Sequence[BlockDevice], volume_uuid: UUID) -> str | None:
    """Which device holds another volume than expected, for an error; None when none does."""
    foreign = find_foreign(devices, volume_uuid)
    if foreign is None:
        return None
    return (
        f"{foreign.device.uri} now holds volume {foreign.newest.volume_uuid}, expected volume "
        f"{volume_uuid}: it was formatted again, or is another device; open the volume anew"
    )


def _report(generation: Generation, number: int, reason: str | None) -> None:
    """Tell of a member that was lost, or is back."""
    if reason is None:
        report_return(generation, number)
    else:
        report_loss(generation, number, reason)


# ---- directories ---------------------------------------------------------------------------------


def find_record(catalog: Catalog, uuid: UUID) -> DatasetRecord | None:
    """The catalog record of a dataset; None when it was removed."""
    return next((r for r in catalog.datasets if r.uuid == uuid), None)


NO_DATASETS = "the volume has none yet; 'dlfs import' makes one"


def no_such_dataset(
    records: Sequence[DatasetRecord], name: bytes, version: int | None, *, where: str
) -> NotFoundError:
    """The error of a dataset or a version that there is not; it lists those that there are.

    Args:
        records: of the catalog.
        name: of the dataset that was asked for.
        version: likewise; None: any.
        where: what users call the volume.
    """
    number = "" if version is None else f" version {version}"
    what = f"find dataset {quote(name)}{number} on {where}"
    versions = [record.version for record in records if record.name == name]
    if versions:
        return NotFoundError(f"{what}: no such version; there are: {list_numbers(versions)}")
    if not records:
        return NotFoundError(f"{what}: {NO_DATASETS}")
    names = [display(record.name) for record in records]
    there = list_names(names, wanted=display(name))
    return NotFoundError(f"{what}: no such dataset; there are: {there}")


def check_present(devices: Sequence[BlockDevice], record: DatasetRecord, volume_uuid: UUID) -> None:
    """Find out whether what was just read can be trusted to be the dataset's.

    Raises:
        StaleError: the newest generation does not have the dataset any more.
        DlfsError: as ``load_generation``.
    """
    if find_record(load_generation(devices).catalog, record.uuid) is None:
        raise DatasetIdentity.of(record, volume_uuid).missing_from(devices)


def load_segment(
    generation: Generation, record: DatasetRecord, *, shared: bool = True, locked: bool = False
) -> FrozenDirectory:
    """Load a dataset's directory.

    Args:
        generation: with the open devices.
        record: of the dataset.
        shared: use the copy that other processes of the node may have; else what is on media now.
        locked: no writer can remove the dataset meanwhile, so this is not checked.

    Raises:
        FormatError: it is malformed (ChecksumError); names dataset, member and offset.
        StaleError: it was removed since.
        DeviceError: a read failed.
    """
    space = DataSpace(generation.geometry, record.directory_runs)
    member, offset_bytes = space.resolve(0)
    label = (
        f"the directory of dataset {display(record.name)!r} version {record.version}, "
        f"on {generation.devices[member].uri} from byte {offset_bytes} on"
    )

    def read_part(choice: Choice, address: int, memory: memoryview) -> None:
        part = np.frombuffer(memory, np.uint8)
        read_into(generation.sources, space, address, part, choice)
        # Names are read late, when the dataset may be gone and something else in its chunks.
        if address and not locked:
            check_present(generation.devices, record, generation.superblock.volume_uuid)

    readers = [partial(read_part, choice) for choice in alternatives(generation.geometry)]
    try:
        directory = load_directory(
            DirectoryIdentity(generation.superblock.volume_uuid, record.uuid, label),
            DirectorySizes(record.entries_bytes, record.names_bytes),
            readers[0],
            others=readers[1:],
            root=SHARED_ROOT if shared else None,
        )
    except FormatError:
        if locked:
            raise
        check_present(generation.devices, record, generation.superblock.volume_uuid)
        raise
    if (len(directory), directory.data_bytes) != (record.sample_count, record.data_bytes):
        got = len(directory), directory.data_bytes
        directory.close()
        raise FormatError(
            f"open {label}: expected {record.sample_count} samples in {record.data_bytes} bytes, "
            f"got {got[0]} in {got[1]}"
        )
    return directory
