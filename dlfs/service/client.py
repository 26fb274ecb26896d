"""``dlfs.connect``: the volumes of a node service, with the API of those that ``dlfs.open`` gives.

``ServiceConnection`` is the path of a service's socket. What it opens has a control connection,
the service's directory mapped read-only, and a reader whose samples lie in the service's memory.
``Volume``, ``Dataset`` and ``Epoch`` stand on that as on devices. Where the service has memory for
the whole dataset, and no sample of it is larger than a chunk, what it has read once is read from
its memory without asking it again (``channel.h``); such reads look every millisecond whether it is
still there.

When the service goes, every call under way raises ``ServiceLostError`` at once (a service that is
there and does not answer is given up after a time, below), and the next use makes a new connection:
it waits up to ``timeout_s`` for a service that is being restarted. Datasets keep the directory that
they have, batches keep their bytes, and epochs go on from where they stood.

Threads: any at once.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from dlfs._native.channel import ChannelDescriptors, ClientReader
from dlfs.attributes import AttributeTable
from dlfs.connection import DatasetIdentity, DatasetSession, find_record
from dlfs.directory import FrozenDirectory
from dlfs.errors import (
    DeviceError,
    DlfsError,
    FormatError,
    NotFoundError,
    ServiceLostError,
    StaleError,
    UsageError,
)
from dlfs.format.catalog import Catalog, DatasetRecord
from dlfs.format.superblock import Superblock
from dlfs.reader import SampleReader, Where
from dlfs.service.control import TIMEOUT_S, ControlConnection
from dlfs.service.protocol import (
    ChannelState,
    DatasetState,
    Diagnose,
    Diagnosis,
    Figures,
    GetPart,
    GetSnapshot,
    ListVolumes,
    LookAtVolume,
    OpenChannel,
    OpenDataset,
    Part,
    ServedVolume,
    Volumes,
    VolumeState,
)
from dlfs.service.snapshot import read_generation
from dlfs.service.sockets import SCHEME, path_of
from dlfs.store.info import VolumeInfo
from dlfs.volume import Volume
from dlfs.wording import quote, show_value

ANSWER_TIMEOUT_S = 90.0
"""For one batch, beyond what the service itself gives a device with all retries. A service that is
there and does not answer (stopped by a debugger) is then given up as lost."""

_log = logging.getLogger("dlfs")


def connect(uri: str, *, volume: str | None = None, timeout_s: float = TIMEOUT_S) -> Volume:
    """Open a volume through the node service that serves it.

    Args:
        uri: ``unix:`` and the path of the service's socket.
        volume: label or UUID; may be left out when the service has only one.
        timeout_s: how long to wait for a service that is not there, now and whenever it went away,
            and for each of its answers.

    Returns:
        A volume whose datasets are read through the service. It cannot be written to, repaired or
        verified: that needs the devices (``dlfs.open``).

    Raises:
        ServiceLostError: no service answers within that time.
        NotFoundError: it has no such volume.
        UsageError: the URI is none, or no volume was named and there are several.
        DeviceError: this user may not use the service (EACCES).
    """
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise UsageError(
            f"connect to {uri}: expected a timeout above 0 s, got {show_value(timeout_s)}"
        )
    return Volume(ServiceConnection(os.path.abspath(path_of(uri)), volume, timeout_s))


def look(uri: str, *, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """The figures of a service: see ``SampleServer.snapshot``.

    Args:
        uri: as of ``connect``.
        timeout_s: likewise.

    Raises:
        DlfsError: as ``connect``.
    """
    with closing(ControlConnection(os.path.abspath(path_of(uri)), timeout_s)) as control:
        answer, descriptors = control.request(GetSnapshot(), Figures)
        with descriptors:
            return answer.figures


@dataclass(frozen=True)
class ServiceConnection:
    """A volume of a node service.

    Args:
        path: of its socket.
        volume: label or UUID; None: the only one.
        timeout_s: as of ``connect``.
    """

    path: str
    volume: str | None
    timeout_s: float

    @property
    def uri(self) -> str:
        """The service's."""
        return SCHEME + self.path

    def connect(self) -> ControlConnection:
        """Make a new control connection."""
        return ControlConnection(self.path, self.timeout_s)

    def open_volume(self) -> ServiceVolume:
        """Connect and look at the volume."""
        control = self.connect()
        answer, _ = control.request(ListVolumes(), Volumes)
        chosen = self._choose(answer.volumes)
        _log.debug("connected to %s for volume %s", self.uri, chosen.uuid)
        return ServiceVolume(replace(self, volume=str(chosen.uuid)), control)

    def _choose(self, volumes: Sequence[ServedVolume]) -> ServedVolume:
        wanted = self.volume
        found = [v for v in volumes if wanted in (None, v.label, str(v.uuid))]
        if len(found) == 1:
            return found[0]
        told = ", ".join(f"{quote(v.label)} ({v.uuid})" for v in volumes) or "none"
        if found or wanted is None:
            raise UsageError(f"open a volume of {self.uri}: expected the name of one of: {told}")
        raise NotFoundError(
            f"open volume {quote(wanted)} of {self.uri}: no such volume; there are: {told}"
        )

    @property
    def volume_uuid(self) -> UUID:
        """Of a volume that was found."""
        return UUID(str(self.volume))

    def open_dataset(
        self, identity: DatasetIdentity, directory: FrozenDirectory | None
    ) -> DatasetSession:
        """Have the service open a dataset, over a connection for it alone."""
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
        request = OpenDataset(self.volume_uuid, identity.uuid)
        state, descriptors = control.request(request, DatasetState, 2)
        with descriptors:
            superblock, catalog = read_generation(descriptors[0], self.uri)
            record = find_record(catalog, identity.uuid)
            if record is None:
                raise identity.stale()
            directory = directory or self._load_directory(record, identity)
            native = ClientReader(
                descriptors[1],
                state.arena_bytes,
                lambda: _open_channel(control, identity),
                timeout_ms=int(ANSWER_TIMEOUT_S * 1000) + state.read_timeout_ms,
                service=self.uri,
                directory=directory.native,
            )
        reader = SampleReader(
            native,
            superblock.geometry,
            directory,
            Where(identity.name, state.members),
            lambda: _diagnose(control, identity),
            lambda number, reason: _report(self.uri, state.members[number], reason),
        )
        return DatasetSession(
            record=record,
            geometry=superblock.geometry,
            members=state.members,
            directory=directory,
            reader=reader,
            release=control.close,
            load_attributes=lambda: self._load_attributes(record, identity),
            is_lost=lambda: native.lost or control.is_lost,
        )

    # ---- parts in shared memory ------------------------------------------------------------------

    def _load_directory(self, record: DatasetRecord, identity: DatasetIdentity) -> FrozenDirectory:
        """Map the service's directory; its names when they are first needed."""
        return FrozenDirectory(
            self._map_part(identity, "entries", record.entries_bytes),
            lambda: self._map_part(identity, "names", record.names_bytes),
            label=f"the directory of dataset {identity.name!r} through {self.uri}",
        )

    def _load_attributes(self, record: DatasetRecord, identity: DatasetIdentity) -> AttributeTable:
        """Map the service's copy of the columns, which it has verified."""
        extent = record.attribute_extent
        if extent is None:
            return AttributeTable.empty(record.uuid, record.sample_count)
        segment = self._map_part(identity, "attributes", extent.segment_bytes)
        where = f"the attributes of dataset {identity.name!r} through {self.uri}"
        return AttributeTable.over(segment, extent.head_bytes, where=where, verify=False)

    def _map_part(self, identity: DatasetIdentity, part: str, size_bytes: int) -> NDArray[np.uint8]:
        """Map a part of a dataset, over a connection of its own: any may be lost by now."""
        control = self.connect()
        try:
            request = GetPart(self.volume_uuid, identity.uuid, part)
            answer, descriptors = control.request(request, Part, 1)
        finally:
            control.close()
        with descriptors:
            if answer.size_bytes != size_bytes:
                raise FormatError(
                    f"map the {part} of dataset {identity.name!r} from {self.uri}: expected "
                    f"{size_bytes} bytes, got {answer.size_bytes}"
                )
            memory = mmap.mmap(descriptors[0], size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        return np.frombuffer(memory, np.uint8)


def _open_channel(control: ControlConnection, identity: DatasetIdentity) -> ChannelDescriptors:
    _, descriptors = control.request(OpenChannel(identity.uuid), ChannelState, 2)
    return ChannelDescriptors(*descriptors)


def _diagnose(control: ControlConnection, identity: DatasetIdentity) -> DlfsError | None:
    """Why samples may have failed: the dataset was removed since, or a device was swapped."""
    try:
        answer, _ = control.request(Diagnose(identity.uuid), Diagnosis)
    except (ServiceLostError, FormatError, DeviceError, NotFoundError, UsageError):
        return None  # the samples' own errors say more
    return None if answer.reason is None else StaleError(answer.reason)


def _report(uri: str, member: str, code: str | None) -> None:
    """Tell of a member that the service lost, or has again."""
    if code is None:
        _log.info("%s: the service can read member %s again", uri, member)
    else:
        _log.warning("%s: the service lost member %s: %s", uri, member, code)


class ServiceVolume:
    """A volume as the service last described it.

    Args:
        connection: with the volume's UUID.
        control: to the service; this object's from now on.

    Raises:
        DlfsError: as ``refresh``.
    """

    def __init__(self, connection: ServiceConnection, control: ControlConnection) -> None:
        self._connection = connection
        self._control = control
        self._turn = threading.Lock()
        self.superblock: Superblock
        self.catalog: Catalog
        self._info: VolumeInfo
        self.refresh()

    @property
    def connection(self) -> ServiceConnection:
        """The service's socket, and which volume."""
        return self._connection

    def describe(self) -> VolumeInfo:
        """All of it, as the service described it when it was last asked."""
        return self._info

    def refresh(self) -> None:
        """Ask the service for the newest generation.

        Raises:
            ServiceLostError: it is gone, and was not back in time.
            DlfsError: it cannot read the volume.
        """
        with self._turn:
            if self._control.is_lost:
                self._control = self._connection.connect()
            request = LookAtVolume(self._connection.volume_uuid)
            state, descriptors = self._control.request(request, VolumeState, 1)
            with descriptors:
                found = read_generation(descriptors[0], self._connection.uri)
            (self.superblock, self.catalog), self._info = found, state.info

    def close(self) -> None:
        """Close the control."""
        self._control.close()
