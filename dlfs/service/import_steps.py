"""The unfinished imports of a served volume, whose committed steps clients read.

``ServedImports`` knows the steps of each import that a client has asked for, from the headers in
its journal. It opens them with the devices of the volume. Clients get the headers in a file with
the bytes as on media, and read them with the decoder for media, which checks everything. So they
find windows and order by themselves (``dlfs.dataset.arrived_windows``).

Readers take no lock of the volume: no client can hold up an import.

Threads: any at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from uuid import UUID

from dlfs._native.handle import Descriptor
from dlfs.base.forks import Lock
from dlfs.base.wording import quote
from dlfs.connection.arriving import Arrival, ArrivedStep, find_arrival
from dlfs.connection.connection import DatasetSession, LocalVolume, OpenOptions
from dlfs.errors import DeviceError, FormatError, NotFoundError, StaleError
from dlfs.format.catalog import Catalog, DatasetRecord
from dlfs.format.journal import (
    STEP_HEADER_BYTES,
    StepHeader,
    decode_step_header,
    encode_step_header,
)
from dlfs.store.journal import read_steps
from dlfs.volume.volume import Volume

HEADERS_MAX = 1024
"""Most headers of steps in one answer."""


class ServedImports:
    """The unfinished imports of a volume.

    Args:
        volume: the volume, open in the service.

    Threads: any at once.
    """

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._lock = Lock()
        self._arrivals: dict[UUID, Arrival] = {}

    def record(self, uuid: UUID) -> DatasetRecord:
        """Return the record of an unfinished import of the loaded generation.

        Args:
            uuid: UUID of the dataset that it makes.

        Raises:
            StaleError: there is no such import any more.
        """
        return _find_record(self._session.catalog, uuid)

    def headers(self, uuid: UUID, first: int) -> list[StepHeader]:
        """Return headers of steps in the order in which they were committed.

        Args:
            uuid: UUID of the dataset that the import makes.
            first: number of the first one.

        Returns:
            At most ``HEADERS_MAX`` headers.

        Raises:
            StaleError: there is no such import any more.
            DlfsError: the journal cannot be read.
        """
        journal = self._arrival(uuid).journal
        return [step.header for step in journal[first : first + HEADERS_MAX]]

    def step_bytes(self, uuid: UUID, number: int) -> int:
        """Return the length of the directory and the columns of a step; raises as ``headers``."""
        found = _find_step(self._arrival(uuid), number)
        return 0 if found.committed is None else found.committed.header.step_bytes

    def open_step(self, uuid: UUID, number: int, options: OpenOptions) -> DatasetSession:
        """Open a step with the devices of the volume.

        Args:
            uuid: UUID of the dataset that the import makes.
            number: number of the step.
            options: options for reading it.

        Raises:
            StaleError: there is no such import any more.
            NotFoundError: it has no such step, or not all before it.
            DlfsError: as ``VolumeSession.open_step``.
        """
        while True:
            session = self._session
            generation = session.generation
            try:
                arrival = self._arrival(uuid)
                return session.open_step(arrival, _find_step(arrival, number), options)
            except (FormatError, DeviceError):
                if session.generation is generation:
                    raise

    def forget_others(self, uuids: Iterable[UUID]) -> None:
        """Forget the imports that are not listed."""
        existing = set(uuids)
        with self._lock:
            self._arrivals = {u: found for u, found in self._arrivals.items() if u in existing}

    @property
    def _session(self) -> LocalVolume:
        session = self._volume.session
        assert isinstance(session, LocalVolume)  # a service serves no other service
        return session

    def _arrival(self, uuid: UUID) -> Arrival:
        with self._lock:
            generation = self._session.generation  # not older than that of what is known
            record = _find_record(generation.catalog, uuid)
            found = find_arrival(
                generation.catalog,
                record.name,
                uuid,
                self._arrivals.get(uuid),
                chunk_bytes=generation.geometry.chunk_bytes,
                read_steps=partial(read_steps, generation),
            )
            assert found is not None
            self._arrivals[uuid] = found
            return found


def _find_record(catalog: Catalog, uuid: UUID) -> DatasetRecord:
    for record in catalog.unfinished:
        if record.uuid == uuid:
            return record
    raise StaleError(f"read the import of dataset {uuid} while it goes on: it has ended")


def _find_step(arrival: Arrival, number: int) -> ArrivedStep:
    for step in arrival.steps:
        if step.committed is not None and step.committed.header.number == number:
            return step
    raise NotFoundError(
        f"open step {number} of the import of {quote(arrival.record.name)}: it has not arrived"
    )


@contextmanager
def headers_file(headers: Sequence[StepHeader], uuid: UUID) -> Iterator[int]:
    """Write headers of steps to a memfd; yield its descriptor, and close it at the end."""
    with Descriptor() as file:
        descriptor = file.fill(os.memfd_create, "dlfs-steps", os.MFD_CLOEXEC)
        with open(descriptor, "wb", closefd=False) as out:
            out.writelines(encode_step_header(header, uuid) for header in headers)
        yield descriptor


def read_headers(
    descriptor: int, count: int, uuid: UUID, first: int, where: str
) -> dict[int, StepHeader]:
    """Read a file that ``headers_file`` wrote.

    Args:
        descriptor: descriptor of the file; the caller closes it.
        count: number of headers.
        uuid: UUID of the dataset that the import makes.
        first: number of the first step.
        where: origin of the file, for errors.

    Returns:
        The headers by the numbers of their steps.

    Raises:
        FormatError: the file does not hold them.
    """
    data = os.pread(descriptor, (min(count, HEADERS_MAX) + 1) * STEP_HEADER_BYTES, 0)
    if len(data) != count * STEP_HEADER_BYTES:
        raise FormatError(
            f"read headers of steps from {where}: expected {count} of {STEP_HEADER_BYTES} bytes, "
            f"got {len(data)} bytes"
        )
    found = {}
    for number in range(count):
        raw = data[number * STEP_HEADER_BYTES : (number + 1) * STEP_HEADER_BYTES]
        found[first + number] = decode_step_header(raw, uuid, first + number, where)
    return found
