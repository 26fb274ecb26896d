"""Opens the volumes of a node service, with the API that ``dlfs.open`` gives (``dlfs.connect``).

``ServiceConnection`` holds the path of a service's socket. It opens a ``ServiceVolume`` and, for
each dataset, a ``DatasetSession`` with a ``ControlConnection``, the service's directory mapped
read-only, and a ``ClientReader``, whose samples lie in the service's memory. ``Volume``,
``Dataset`` and ``Epoch`` use these sessions like those of local devices.

If the service has reserved memory for the whole dataset, and no sample lies in two chunks, the
client reads chunks that the service has loaded without a request (``channel.h``). Such reads check
every millisecond that the service is alive.

When the service ends, every call under way raises ``ServiceLostError`` at once. A service that runs
but does not answer is given up after a timeout (``ANSWER_GRACE_S``). The next use connects again
and waits up to ``timeout_s`` for a service that is being restarted. Datasets keep their directory,
batches keep their bytes, and epochs continue with the next batch.

Threads: any at once.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dlfs._native.channel import ChannelDescriptors, ClientReader
from dlfs.attributes import AttributeTable
from dlfs.base.closing import Uses
from dlfs.base.forks import Lock
from dlfs.base.wording import quote, show_value
from dlfs.connection.arriving import Arrival, ArrivedStep, record_of_step
from dlfs.connection.connection import DatasetSession
from dlfs.connection.identity import DatasetIdentity
from dlfs.connection.unfinished import decode_step, split_segments
from dlfs.directory import FrozenDirectory, PartDirectory
from dlfs.errors import (
    DeviceError,
    DlfsError,
    FormatError,
    NotFoundError,
    ServiceLostError,
    StaleError,
    UsageError,
)
from dlfs.fields import FieldSpan
from dlfs.format.catalog import Catalog, DatasetRecord
from dlfs.format.geometry import Geometry
from dlfs.format.journal import STEP_HEADER_BYTES, StepHeader
from dlfs.format.superblock import Superblock
from dlfs.reader import SampleReader, Where
from dlfs.service import protocol
from dlfs.service.control import TIMEOUT_S, ControlConnection
from dlfs.service.generation_file import read_generation
from dlfs.service.import_steps import read_headers
from dlfs.service.sockets import SCHEME, parse_allow_list, path_of
from dlfs.store.info import VolumeInfo
from dlfs.store.journal import Step, list_steps
from dlfs.store.members import Members, split_uris
from dlfs.volume.volume import Volume

ATTACH_TIMEOUT_S = 60.0
"""Default of the longest time without a message from a service that attaches or detaches a volume,
in seconds."""
ANSWER_GRACE_S = 5.0
"""Longest wait for an answer, in addition to the time within which the service ends the call, in
seconds. A service that does not answer by then, for example one that is stopped, counts as lost."""

_log = logging.getLogger("dlfs")


def connect(uri: str, *, volume: str | None = None, timeout_s: float = TIMEOUT_S) -> Volume:
    """Open a volume through the node service that serves it.

    Args:
        uri: ``unix:`` and the path of the service's socket.
        volume: label or UUID; may be omitted if the service has only one volume.
        timeout_s: longest wait for a service that is not running, now and after it was lost, and
            for any message from a running one, in seconds. One that waits for devices says so.

    Returns:
        A volume whose datasets are read through the service. It cannot be written, repaired or
        verified; these need the devices (``dlfs.open``).

    Raises:
        ServiceLostError: nothing comes from a service within ``timeout_s``.
        NotFoundError: the service has no such volume.
        UsageError: the URI is malformed, or ``volume`` is missing and there are several volumes.
        DeviceError: this user may not use the service, or read the volume (EACCES).
    """
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise UsageError(
            f"connect to {uri}: expected a timeout above 0 s, got {show_value(timeout_s)}"
        )
    return Volume(ServiceConnection(os.path.abspath(path_of(uri)), volume, timeout_s))


def get_statistics(uri: str, *, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Get the counters of a service for the volumes that this user may read.

    See ``ServerState.snapshot``.

    Args:
        uri: ``unix:`` and the path of the service's socket.
        timeout_s: longest wait for the service and for any message from it, in seconds.

    Raises:
        DlfsError: the same errors as ``connect``.
    """
    with ControlConnection(os.path.abspath(path_of(uri)), timeout_s) as control:
        return control.request(protocol.GetStatistics(), protocol.Statistics)[0].values


def attach(
    uri: str,
    volume: Members,
    *,
    allow: str | None = None,
    cache_bytes: int | None = None,
    timeout_s: float = ATTACH_TIMEOUT_S,
) -> protocol.Attached:
    """Have a running service serve one more volume, until it is detached or the service ends.

    Args:
        uri: ``unix:`` and the path of the service's socket.
        volume: the volume, as ``dlfs.open`` takes it; the service opens it with its own rights.
        allow: who may read it, in addition to root, the service's user and the clients of sockets
            that are published for it: ``user:NAME`` and ``group:NAME``, with commas. None: all that
            may use the service.
        cache_bytes: memory for its samples, with ``allow``, in bytes; None: a share of what the
            service has left.
        timeout_s: longest wait for any message from it, in seconds. A service that is not running
            is waited for up to 10 seconds.

    Returns:
        UUID and label of the volume, and its mount point if the service shows it on a mount.

    Raises:
        ExistsError: the service serves it already.
        LimitError: the service has no memory left for it.
        UsageError: ``allow`` is malformed, or the service shows its volumes on a mount.
        NotFoundError: ``allow`` names a user or group that does not exist.
        DeviceError: this user may not attach volumes (EACCES): only root and the service's user.
        DlfsError: the service cannot open or mount it, or the same errors as ``connect``.
    """
    readers = None
    if allow is not None:
        rule = parse_allow_list(allow)
        readers = protocol.Readers(tuple(sorted(rule.users)), tuple(sorted(rule.groups)))
    request = protocol.AttachVolume(split_uris(volume), readers, cache_bytes)
    path = os.path.abspath(path_of(uri))
    with ControlConnection(path, timeout_s, accept_s=TIMEOUT_S) as control:
        answer, _ = control.request(request, protocol.Attached)
    return answer


def detach(
    uri: str, volume: str, *, force: bool = False, timeout_s: float = ATTACH_TIMEOUT_S
) -> protocol.VolumeName:
    """Have a running service stop serving a volume and close its devices.

    Args:
        uri: ``unix:`` and the path of the service's socket.
        volume: label or UUID.
        force: take it from the processes that read it: their next calls fail with
            ``ServiceLostError`` or ``NotFoundError``.
        timeout_s: longest wait for any message from it, in seconds; as for ``attach``.

    Raises:
        NotFoundError: the service has no such volume.
        DeviceError: clients or programs on the mount use it (EBUSY); this user may not (EACCES).
        DlfsError: the same errors as ``connect``.
    """
    path = os.path.abspath(path_of(uri))
    with ControlConnection(path, timeout_s, accept_s=TIMEOUT_S) as control:
        answer, _ = control.request(protocol.ListVolumes(volume), protocol.Volumes)
        chosen = ServiceConnection(path, volume, timeout_s).choose(answer.volumes)
        control.request(protocol.DetachVolume(chosen.uuid, force), protocol.Detached)
    return chosen


def publish(
    uri: str,
    name: str,
    volumes: Sequence[str] = (),
    *,
    attach: Sequence[Members] = (),
    cache_bytes: int | None = None,
    note: str = "",
    timeout_s: float = ATTACH_TIMEOUT_S,
) -> str:
    """Have a running service listen at one more socket, whose clients may read some volumes.

    Whoever can reach the socket may read them, so its directory decides who that is. The next
    service with the same directory of sockets listens there again. A socket that is published for
    the same volumes already is left as it is.

    Args:
        uri: ``unix:`` and the path of the service's own socket.
        name: name of the socket: 1 to 64 letters, digits, ``.``, ``_`` and ``-``.
        volumes: label or UUID of each volume; each was attached or served with a rule of who may
            read it.
        attach: further volumes, each as ``dlfs.open`` takes it. One that the service does not serve
            is attached for ``user:root``, and detached with the last socket for it.
        cache_bytes: memory for the samples of each volume that is attached, in bytes; None: a share
            of what the service has left.
        note: text by which logs and ``dlfs top --json`` know the socket, such as a pod's name.
        timeout_s: longest wait for any message from the service, in seconds; as for ``attach``.

    Returns:
        Path of the socket: ``DIRECTORY/NAME/dlfs.sock``.

    Raises:
        NotFoundError: the service has no such volume.
        ExistsError: a socket of this name is published for other volumes.
        UsageError: the service publishes no sockets, a volume has no rule, or the name or note is
            malformed.
        LimitError: the service has as many sockets as it may, or no memory left for a volume.
        DeviceError: this user may not publish (EACCES), or the system refuses.
        DlfsError: the service cannot open a volume, or the same errors as ``connect``.
    """
    members = tuple(map(split_uris, attach))
    request = protocol.PublishSocket(name, tuple(volumes), note, members, cache_bytes)
    path = os.path.abspath(path_of(uri))
    with ControlConnection(path, timeout_s, accept_s=TIMEOUT_S) as control:
        return control.request(request, protocol.Published)[0].path


def unpublish(uri: str, name: str, *, timeout_s: float = ATTACH_TIMEOUT_S) -> None:
    """Have a running service close a published socket, and end its clients.

    Their next calls fail with ``ServiceLostError``; batches that they have keep their bytes.

    Args:
        uri: ``unix:`` and the path of the service's own socket.
        name: name of the socket.
        timeout_s: longest wait for any message from the service, in seconds; as for ``attach``.

    Raises:
        NotFoundError: the service has no such socket.
        DeviceError: this user may not (EACCES).
        DlfsError: the same errors as ``connect``.
    """
    path = os.path.abspath(path_of(uri))
    with ControlConnection(path, timeout_s, accept_s=TIMEOUT_S) as control:
        control.request(protocol.UnpublishSocket(name), protocol.Unpublished)


def connect_incoming(uri: str, *, timeout_s: float = TIMEOUT_S) -> socket.socket:
    """Connect to the server of a service's staging area, for ``dlfs.staging.client``.

    Args:
        uri: ``unix:`` and the path of the service's socket.
        timeout_s: longest wait for the service and for any message from it, in seconds.

    Raises:
        UsageError: the service has no staging area.
        DlfsError: the same errors as ``connect``.
    """
    with ControlConnection(os.path.abspath(path_of(uri)), timeout_s) as control:
        _, descriptors = control.request(protocol.ConnectIncoming(), protocol.Incoming, 1)
        with descriptors:
            return socket.socket(fileno=os.dup(descriptors[0]))


@dataclass(frozen=True)
class ServiceConnection:
    """The socket of a node service, and one of its volumes.

    Args:
        path: path of the service's socket.
        volume: label or UUID of the volume; None: the only one.
        timeout_s: longest wait for the service and for any message from it, in seconds.
    """

    path: str
    volume: str | None
    timeout_s: float

    @property
    def uri(self) -> str:
        """URI of the service."""
        return SCHEME + self.path

    def connect(self) -> ControlConnection:
        """Return a new control connection."""
        return ControlConnection(self.path, self.timeout_s)

    def open_volume(self) -> ServiceVolume:
        """Connect, choose the volume, and load its newest generation."""
        control = self.connect()
        try:
            wanted = protocol.ListVolumes(self.volume or "")
            answer, _ = control.request(wanted, protocol.Volumes)
            chosen = self.choose(answer.volumes)
            _log.debug("connected to %s for volume %s", self.uri, chosen.uuid)
            return ServiceVolume(replace(self, volume=str(chosen.uuid)), control)
        except BaseException:
            control.close()
            raise

    def choose(self, volumes: Sequence[protocol.VolumeName]) -> protocol.VolumeName:
        """Return the wanted one of a service's volumes.

        Raises:
            NotFoundError: it is not among them.
            UsageError: it is not clear which is wanted.
        """
        wanted = self.volume
        found = [v for v in volumes if wanted in (None, v.label, str(v.uuid))]
        if len(found) == 1:
            return found[0]
        listed = ", ".join(f"{quote(v.label)} ({v.uuid})" for v in volumes) or "none"
        if found or wanted is None:
            raise UsageError(f"open a volume of {self.uri}: expected the name of one of: {listed}")
        raise NotFoundError(
            f"open volume {quote(wanted)} of {self.uri}: no such volume; there are: {listed}"
        )

    @property
    def volume_uuid(self) -> UUID:
        """UUID of the volume, once ``open_volume`` has chosen it."""
        return UUID(str(self.volume))

    def open_dataset(
        self, identity: DatasetIdentity, directory: FrozenDirectory | None
    ) -> DatasetSession:
        """Have the service open a dataset, over a separate control connection."""
        control = self.connect()
        try:
            return self._open_dataset(control, identity, directory)
        except BaseException:
            control.close()
            raise

    def _open_dataset(
        self,
        control: ControlConnection,
        identity: DatasetIdentity,
        directory: FrozenDirectory | None,
    ) -> DatasetSession:
        request = protocol.OpenDataset(self.volume_uuid, identity.uuid)
        state, descriptors = control.request(request, protocol.DatasetState, 2)
        with descriptors:
            superblock, catalog = read_generation(descriptors[0], self.uri)
            record = catalog.find_uuid(identity.uuid)
            if record is None:
                raise identity.stale()
            directory = directory or self._load_directory(record, identity)
            reader = self._make_reader(
                control, identity, superblock.geometry, state, descriptors[1], directory
            )
        opened = [(control, reader)]

        def open_parts(parts: PartDirectory, span: FieldSpan) -> SampleReader | None:
            found = self._open_parts(identity, superblock.geometry, parts, span)
            opened.extend([found] if found else [])
            return found[1] if found else None

        def release() -> None:
            for used, _ in opened:
                used.close()

        return DatasetSession(
            record=record,
            geometry=superblock.geometry,
            members=state.members,
            directory=directory,
            reader=reader,
            open_parts=open_parts,
            release=release,
            uses=Uses(f"use dataset {identity.name!r}: it is closed"),
            load_attributes=lambda: self._load_attributes(record, identity),
            is_lost=lambda: any(_is_lost(*pair) for pair in opened),
        )

    def open_step(self, arrival: Arrival, step: ArrivedStep, geometry: Geometry) -> DatasetSession:
        """Have the service open a step of an unfinished import; see ``VolumeSession``.

        The directory and the columns of the step lie in memory of the service, which is mapped.
        """
        assert step.committed is not None
        record = record_of_step(arrival.record, step, geometry.chunk_bytes)
        identity = DatasetIdentity.of(record, self.volume_uuid)
        header = step.committed.header
        control = self.connect()
        try:
            request = protocol.OpenStep(self.volume_uuid, record.uuid, header.number)
            state, descriptors = control.request(request, protocol.DatasetState, 2)
            with descriptors:
                memory = _map_step(descriptors[0], header, self.uri)
                label = f"step {header.number} of the import of {identity.name!r} at {self.uri}"
                segments = split_segments(memory, header)
                directory, table = decode_step(segments, header, record.uuid, label)
                reader = self._make_reader(
                    control, identity, geometry, state, descriptors[1], directory
                )
        except BaseException:
            control.close()
            raise
        return DatasetSession(
            record=record,
            geometry=geometry,
            members=state.members,
            directory=directory,
            reader=reader,
            open_parts=lambda _parts, _span: None,
            release=control.close,
            uses=Uses(f"use the import of {identity.name!r}: it is closed"),
            load_attributes=lambda: table,
            is_lost=lambda: _is_lost(control, reader) or control.has_ended,
        )

    def _open_parts(
        self, identity: DatasetIdentity, geometry: Geometry, parts: PartDirectory, span: FieldSpan
    ) -> tuple[ControlConnection, SampleReader] | None:
        """Have the service open a reader of some fields, over a control connection of its own.

        Returns:
            The connection and the reader; None if the service reads whole samples instead.
        """
        control = self.connect()
        try:
            request = protocol.OpenDataset(self.volume_uuid, identity.uuid, span)
            state, descriptors = control.request(request, protocol.DatasetState, 2)
            with descriptors:
                if state.fields == span:
                    return control, self._make_reader(
                        control, identity, geometry, state, descriptors[1], parts
                    )
        except BaseException:
            control.close()
            raise
        control.close()
        return None

    def _make_reader(
        self,
        control: ControlConnection,
        identity: DatasetIdentity,
        geometry: Geometry,
        state: protocol.DatasetState,
        arena: int,
        directory: FrozenDirectory,
    ) -> SampleReader:
        """Make the client of a reader of the service, whose arena is mapped.

        Args:
            control: control connection on which the service has opened the dataset.
            identity: identity of the dataset.
            geometry: geometry of the volume.
            state: answer of the service.
            arena: descriptor of the arena.
            directory: directory of the samples, or of the parts of them that are read.
        """
        native = ClientReader(
            arena,
            state.arena_bytes,
            lambda: _open_channel(control, identity),
            timeout_ms=int(ANSWER_GRACE_S * 1000) + state.read_timeout_ms,
            service=self.uri,
            directory=directory,
            parts=bool(state.fields),
        )
        return SampleReader(
            native,
            geometry,
            directory,
            Where(identity.name, state.members, state.fields, state.read_timeout_ms),
            ServicePlacement(control, identity),
            lambda number, reason: _report(self.uri, state.members[number], reason),
        )

    # ---- segments in shared memory ---------------------------------------------------------------

    def _load_directory(self, record: DatasetRecord, identity: DatasetIdentity) -> FrozenDirectory:
        """Map the service's directory; its names are mapped when they are first needed."""
        return FrozenDirectory(
            self._map_segment(identity, "entries", record.entries_bytes),
            lambda: self._map_segment(identity, "names", record.names_bytes),
            label=f"the directory of dataset {identity.name!r} through {self.uri}",
        )

    def _load_attributes(self, record: DatasetRecord, identity: DatasetIdentity) -> AttributeTable:
        """Map the service's copy of the columns, which the service has verified."""
        extent = record.attribute_extent
        if extent is None:
            return AttributeTable.empty(record.uuid, record.sample_count)
        segment = self._map_segment(identity, "attributes", extent.segment_bytes)
        where = f"the attributes of dataset {identity.name!r} through {self.uri}"
        return AttributeTable.over(segment, extent.head_bytes, where=where, verify=False)

    def _map_segment(
        self, identity: DatasetIdentity, name: str, size_bytes: int
    ) -> NDArray[np.uint8]:
        """Map a segment of a dataset: ``entries``, ``names`` or ``attributes``.

        It uses a new control connection, since those of the dataset may be lost by then.
        """
        with self.connect() as control:
            request = protocol.GetSegment(self.volume_uuid, identity.uuid, name)
            answer, descriptors = control.request(request, protocol.Segment, 1)
        with descriptors:
            if answer.size_bytes != size_bytes:
                raise FormatError(
                    f"map the {name} of dataset {identity.name!r} from {self.uri}: expected "
                    f"{size_bytes} bytes, got {answer.size_bytes}"
                )
            memory = mmap.mmap(descriptors[0], size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        return np.frombuffer(memory, np.uint8)


def _map_step(descriptor: int, header: StepHeader, where: str) -> NDArray[np.uint8]:
    """Map the segments of a step of an import.

    Raises:
        FormatError: the file is shorter than they are.
    """
    size = header.step_bytes - STEP_HEADER_BYTES
    got = os.fstat(descriptor).st_size
    if got < size:
        raise FormatError(f"map a step of an import from {where}: expected {size} bytes, got {got}")
    memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
    return np.frombuffer(memory, np.uint8)


def _is_lost(control: ControlConnection, reader: SampleReader) -> bool:
    """Return True if a reader of the service can no longer be used."""
    native = reader.native
    return control.is_lost or reader.moved or (isinstance(native, ClientReader) and native.lost)


def _open_channel(control: ControlConnection, identity: DatasetIdentity) -> ChannelDescriptors:
    _, descriptors = control.request(protocol.OpenChannel(identity.uuid), protocol.ChannelState, 2)
    return ChannelDescriptors(*descriptors.owners[:2])


class ServicePlacement:
    """The chunks of a dataset that a service has open; the service checks them.

    Args:
        control: control connection that has opened the dataset.
        identity: identity of the dataset.

    Attributes:
        moved: True once the service has said that the dataset must be opened anew.
    """

    def __init__(self, control: ControlConnection, identity: DatasetIdentity) -> None:
        self.moved = False
        self._control = control
        self._identity = identity

    def diagnose(self) -> DlfsError | None:
        """Return the error that explains failed reads: dataset removed or moved, device swapped."""
        try:
            answer, _ = self._control.request(
                protocol.Diagnose(self._identity.uuid), protocol.Diagnosis
            )
        except (ServiceLostError, FormatError, DeviceError, NotFoundError, UsageError):
            return None  # the errors of the samples say more
        self.moved |= answer.moved
        if answer.moved:
            return self._identity.moved()
        return None if answer.reason is None else StaleError(answer.reason)


def _report(uri: str, member: str, code: str | None) -> None:
    """Log that the service lost a member or can read it again."""
    if code is None:
        _log.info("%s: the service can read member %s again", uri, member)
    else:
        _log.warning("%s: the service lost member %s: %s", uri, member, code)


class ServiceVolume:
    """A volume of a service, as of the generation that was loaded last.

    Args:
        connection: the service, with the volume's UUID.
        control: control connection to the service, which this object owns from now on.

    Raises:
        DlfsError: the same errors as ``refresh``.
    """

    def __init__(self, connection: ServiceConnection, control: ControlConnection) -> None:
        self.connection = connection
        self._control = control
        self._lock = Lock()
        self.superblock: Superblock
        self.catalog: Catalog
        self._info: VolumeInfo
        self.refresh()

    def describe(self) -> VolumeInfo:
        """Return the description of the volume at the loaded generation."""
        return self._info

    def refresh(self) -> None:
        """Load the newest generation from the service.

        Raises:
            ServiceLostError: the service is not running and did not return in time.
            DlfsError: the service cannot read the volume.
        """
        with self._lock:
            if self._control.has_ended:
                self._control.close()
                self._control = self.connection.connect()
            request = protocol.GetVolume(self.connection.volume_uuid)
            state, descriptors = self._control.request(request, protocol.VolumeState, 1)
            with descriptors:
                found = read_generation(descriptors[0], self.connection.uri)
            (self.superblock, self.catalog), self._info = found, state.info

    def read_steps(self, record: DatasetRecord, known: Sequence[Step]) -> Sequence[Step]:
        """Get the headers of the steps of an import from the service; see ``VolumeSession``."""
        read: dict[int, StepHeader] = {}

        def read_header(_address: int, number: int) -> StepHeader:
            if number not in read:
                read.clear()
                read.update(self._get_headers(record.uuid, number))
            return read[number]

        return list_steps(record, self.superblock.geometry.chunk_bytes, known, read_header)

    def _get_headers(self, uuid: UUID, first: int) -> dict[int, StepHeader]:
        request = protocol.GetSteps(self.connection.volume_uuid, uuid, first)
        with self._lock:
            answer, descriptors = self._control.request(request, protocol.Steps, 1)
        with descriptors:
            uri = self.connection.uri
            found = read_headers(descriptors[0], answer.count, uuid, first, uri)
        if not found:
            raise FormatError(f"read the steps of an import from {uri}: expected step {first}")
        return found

    def open_step(self, arrival: Arrival, step: ArrivedStep) -> DatasetSession:
        """Have the service open a step of an import; see ``VolumeSession``."""
        return self.connection.open_step(arrival, step, self.superblock.geometry)

    def close(self) -> None:
        """Close the control connection."""
        self._control.close()
