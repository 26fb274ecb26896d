"""The volumes of a node service and the cache of its open datasets, for all clients and the mount.

``ServedVolume`` is a volume of the service. ``DatasetCache`` opens a dataset on its first
``acquire``, with its directory in a file that can be shared. The datasets of a volume, and their
readers of some fields, share the volume's memory for samples (``ServiceMemory``), by need. After
its last ``release`` a dataset stays open, with what it has in memory until others need that. At
most ``UNUSED_MAX`` unused datasets are open: the cache closes the least recently used ones, and
those that were removed from the volume.

Threads: any at once; opening one dataset does not block the others.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from dlfs.attributes import load_attributes_whole
from dlfs.base.closing import Closing
from dlfs.base.forks import Lock
from dlfs.connection.connection import (
    Connection,
    DatasetSession,
    LocalConnection,
    LocalVolume,
    OpenOptions,
    VolumeSession,
)
from dlfs.connection.identity import DatasetIdentity
from dlfs.dataset.dataset import Dataset
from dlfs.directory import FrozenDirectory
from dlfs.directory.sharing import Part
from dlfs.errors import ClosedError, NotFoundError, StaleError
from dlfs.format.catalog import DatasetRecord
from dlfs.format.names import dataset_name_bytes
from dlfs.reader import follow
from dlfs.reader.field_readers import sum_members
from dlfs.service.import_steps import ServedImports
from dlfs.service.memory import ServiceMemory
from dlfs.service.sockets import AllowList
from dlfs.store.info import DatasetInfo
from dlfs.store.members import split_uris
from dlfs.store.records import no_such_dataset
from dlfs.store.transaction import Generation
from dlfs.volume.volume import Volume

UNUSED_MAX = 16
"""Most open datasets that are not in use: each has its directory in memory, and its devices."""
UNUSED_STEPS_MAX = 4
"""Most open steps of unfinished imports that are not in use: others may read them a little later.
"""

_log = logging.getLogger(__name__)


_Key = tuple[UUID, UUID, int | None]
"""Volume and dataset, and the number of a step of the import that makes the dataset. The UUID of a
dataset alone is not enough: its volume's writers choose it, so another volume's could name it to
have its samples read by their own rights."""


@dataclass(eq=False)
class _Entry:
    """A dataset that is open or being opened."""

    key: _Key
    identity: DatasetIdentity
    opening: Lock = field(default_factory=Lock)
    loading: Lock = field(default_factory=Lock)
    """Held while ``attributes`` is read from the devices, by those that wait for it alone."""
    dataset: Dataset | None = None
    attributes: Part | None = None
    users: int = 0
    used_at_s: float = 0.0
    removed: bool = False


class DatasetCache:
    """The open datasets of a node service.

    Args:
        cache_bytes: memory for the samples of all datasets, in bytes.
        expects_volumes: leave memory to volumes that will be attached.

    Attributes:
        memory: that memory.
    """

    def __init__(self, cache_bytes: int, *, expects_volumes: bool = False) -> None:
        self.memory = ServiceMemory(cache_bytes, expects_volumes=expects_volumes)
        self._mutex = Lock()
        self._places: dict[_Key, _Entry] = {}

    def acquire(
        self, volume: ServedVolume, record: DatasetRecord, step: int | None = None
    ) -> Dataset:
        """Return a dataset, opened if need be. The caller must ``release`` it.

        Args:
            volume: its volume.
            record: its record.
            step: number of a step of the import that makes it, which is to be opened instead.

        Raises:
            DlfsError: the dataset cannot be opened.
        """
        identity = DatasetIdentity.of(record, volume.uuid)
        key = volume.uuid, record.uuid, step
        with self._mutex:
            entry = self._places.setdefault(key, _Entry(key, identity))
            entry.users += 1
        try:
            with entry.opening:
                if entry.dataset is None:
                    connection = volume.connection_of(step)
                    entry.dataset = Dataset(connection, entry.identity).open()
                    if step is None:
                        _log.info("dataset %r version %d is open", identity.name, identity.version)
            return entry.dataset
        except BaseException:
            self.release(*key)
            raise

    def release(self, volume_uuid: UUID, uuid: UUID, step: int | None = None) -> None:
        """End one use of a dataset; it stays open unless it was removed, or many are unused."""
        with self._mutex:
            entry = self._places[volume_uuid, uuid, step]
            entry.users -= 1
            entry.used_at_s = time.monotonic()
            ended = not entry.users and (entry.removed or entry.dataset is None)
            evicted = [self._places.pop(entry.key)] if ended else self._take_excess()
        _close(evicted)

    def attributes(self, volume_uuid: UUID, uuid: UUID) -> Part:
        """Return the attribute segment of an acquired dataset, in memory that can be shared.

        Raises:
            NotFoundError: the dataset has no attributes.
            StaleError: the dataset was removed, and its chunks are in use again.
            DlfsError: the segment cannot be read.
        """
        with self._mutex:
            entry = self._places[volume_uuid, uuid, None]
        with entry.loading:
            if entry.attributes is None and entry.dataset is not None:
                dataset = entry.dataset
                entry.attributes = follow(lambda: dataset.session, _load_attributes)
        if entry.attributes is None:
            raise NotFoundError(f"find attributes of dataset {entry.identity.name!r}: none")
        return entry.attributes

    def remove_others(
        self, volume_uuid: UUID, uuids: Iterable[UUID], imports: Iterable[UUID] = ()
    ) -> None:
        """Remove the datasets of a volume that are not listed; those in use, on their last release.

        Args:
            volume_uuid: UUID of the volume.
            uuids: the datasets that the volume's newest generation has.
            imports: the datasets that its unfinished imports make.
        """
        existing, unfinished = set(uuids), set(imports)
        with self._mutex:
            for entry in self._places.values():
                if entry.key[0] == volume_uuid:
                    found = existing if entry.key[2] is None else unfinished
                    entry.removed = entry.identity.uuid not in found
            evicted = [p for p in self._places.values() if p.removed and not p.users]
            for entry in evicted:
                del self._places[entry.key]
        _close(evicted)

    def follow(self, volume_uuid: UUID) -> None:
        """Open the datasets of a volume anew whose members have left it, so that these are closed.

        Raises:
            DlfsError: one cannot be opened.
        """
        with self._mutex:
            entries = [p for p in self._places.values() if p.key[0] == volume_uuid]
        for entry in entries:
            if entry.dataset is not None and entry.dataset.present_session is None:
                with contextlib.suppress(ClosedError):  # evicted by another thread meanwhile
                    entry.dataset.directory.load_names()  # else devices stay open for them

    def is_used(self, volume_uuid: UUID) -> bool:
        """Return True if a dataset of a volume is in use."""
        with self._mutex:
            return any(p.users for p in self._places.values() if p.key[0] == volume_uuid)

    def close(self) -> None:
        """Close all datasets; none may be in use."""
        with self._mutex:
            entries, self._places = self._places, {}
        _close(entries.values())

    def statistics(self) -> list[dict[str, Any]]:
        """Return an entry of each open dataset, with the counters of its reader and members.

        The open steps of an import have one entry together, with version 0.
        """
        with self._mutex:
            entries = list(self._places.values())
        found: list[tuple[_Key, dict[str, Any]]] = []
        for entry in entries:
            with contextlib.suppress(ClosedError):  # evicted by another thread meanwhile
                if entry.dataset is not None:
                    found.append((entry.key, _statistics_of(entry, entry.dataset)))
        return _merge_steps(found)

    def _take_excess(self) -> list[_Entry]:
        """Take out the unused datasets and steps beyond the limits, those used longest ago."""
        excess: list[_Entry] = []
        unused = [p for p in self._places.values() if not p.users and p.dataset is not None]
        unused.sort(key=lambda entry: entry.used_at_s)
        for is_step, most in ((False, UNUSED_MAX), (True, UNUSED_STEPS_MAX)):
            some = [p for p in unused if (p.key[2] is not None) == is_step]
            excess += some[: max(0, len(some) - most)]
        for entry in excess:
            del self._places[entry.key]
        return excess


def _load_attributes(session: DatasetSession) -> Part | None:
    return load_attributes_whole(
        session.sources, session.geometry, session.record, diagnose=session.reader.diagnose
    )


def _statistics_of(entry: _Entry, dataset: Dataset) -> dict[str, Any]:
    """Return the statistics of an entry's dataset.

    Raises:
        ClosedError: the dataset was closed meanwhile.
    """
    reader = dataset.stats()
    return {
        "volume": str(entry.key[0]),
        "dataset": entry.identity.name,
        "version": entry.identity.version,
        "uuid": str(entry.identity.uuid),
        "users": entry.users,
        "cache_bytes": reader["held_bytes"],
        "reader": reader,
        "members": dataset.member_stats(),
    }


def _merge_steps(found: Iterable[tuple[_Key, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return statistics with one entry for all open steps of an import."""
    merged: dict[_Key, dict[str, Any]] = {}
    for (volume, uuid, step), each in found:
        key = volume, uuid, None if step is None else 0
        total = merged.setdefault(key, each)
        if total is not each:
            for name in ("users", "cache_bytes"):
                total[name] += each[name]
            total["reader"] = {
                name: n + each["reader"][name] for name, n in total["reader"].items()
            }
            total["members"] = sum_members([total["members"], each["members"]])
    return list(merged.values())


def _close(entries: Iterable[_Entry]) -> None:
    for entry in entries:
        if entry.attributes is not None:
            entry.attributes.release()
        if entry.dataset is not None:
            entry.dataset.close()


class ServedVolume(Closing):
    """A volume that the service serves.

    Args:
        uri: the volume, as ``dlfs.open`` takes it.
        cache: cache that opens the volume's datasets.
        options: options for opening the volume's devices.
        find_rule: returns the rule of the opened volume: who may read it; None: all that may use
            the service.
        memory_bytes: memory for its samples alone, if it has a rule; None: a share.

    Attributes:
        members: the volume's URIs, as given.
        uuid: UUID of the volume.
        label: label of the volume.
        rule: users and groups that may read it, in addition to root and the service's user; None:
            all that may use the service.
        memory: memory for its samples, which other volumes may share if it has no rule.
        memory_bytes: size of that memory, as given.
        imports: its unfinished imports.
        for_sockets: True if it is detached with the last socket that is published for it.

    Raises:
        LimitError: the service has no memory left for it.
        DlfsError: the same errors as ``dlfs.open``.

    Threads: any at once; ``close`` by one.
    """

    def __init__(
        self,
        uri: str | Sequence[str],
        cache: DatasetCache,
        options: OpenOptions,
        find_rule: Callable[[Volume], AllowList | None] = lambda _volume: None,
        memory_bytes: int | None = None,
    ) -> None:
        self._cache = cache
        self._closed = False
        self.members = split_uris(uri)
        self.memory_bytes = memory_bytes
        self.for_sockets = False
        self.volume = Volume(LocalConnection(self.members, options))
        try:
            self.rule = find_rule(self.volume)
            self.memory = cache.memory.add_volume(
                self.volume.chunk_bytes,
                self.volume.uri,
                own=self.rule is not None,
                capacity_bytes=self.volume.capacity_bytes,
                part_bytes=memory_bytes,
            )
        except BaseException:
            self.volume.close()
            raise
        self.uuid = self.volume.uuid
        self.label = self.volume.label
        self.imports = ServedImports(self.volume)

    @property
    def capacity_bytes(self) -> int:
        """Size of all chunks, in bytes."""
        return self.volume.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """Size of the unused chunks, in bytes."""
        return self.volume.free_bytes

    @property
    def connection(self) -> LocalConnection:
        """Connection that opens datasets of this volume in the service's memory."""
        connection = self.volume.session.connection
        assert isinstance(connection, LocalConnection)  # a service serves no other service
        options = replace(
            connection.options, memory_bytes=self.memory.size_bytes, memory=self.memory
        )
        return replace(connection, options=options)

    def connection_of(self, step: int | None) -> Connection:
        """Return what opens datasets, or a step of the imports that make them by its number."""
        return self.connection if step is None else _StepConnection(self, step)

    def refresh(self) -> None:
        """Load the newest generation and remove datasets that it no longer has.

        Raises:
            DlfsError: the same errors as ``dlfs.open``.
        """
        self.volume.refresh()
        catalog = self.volume.session.catalog
        imports = [record.uuid for record in catalog.unfinished]
        self.imports.forget_others(imports)
        self._cache.remove_others(self.uuid, [info.uuid for info in self.datasets()], imports)

    def keep_current(self) -> None:
        """Refresh without a request, so that no device stays open that has left the volume.

        Raises:
            DlfsError: the same errors as ``dlfs.open``.
        """
        self.refresh()
        self._cache.follow(self.uuid)

    def datasets(self) -> list[DatasetInfo]:
        """Return what ``Volume.datasets`` returns."""
        return self.volume.datasets()

    def generation(self) -> Generation:
        """Return the loaded generation, which a refresh by another thread does not change."""
        session = self.volume.session
        assert isinstance(session, LocalVolume)
        return session.generation

    def acquire(self, uuid: UUID) -> Dataset:
        """Return an open dataset of the loaded generation; ``close`` releases it.

        Raises:
            StaleError: the volume has no such dataset any more.
            DlfsError: the dataset cannot be opened.
        """
        record = self.volume.session.catalog.find_uuid(uuid)
        if record is None:
            raise StaleError(f"open dataset {uuid} of volume {self.uuid}: it was removed")
        return self._acquire(record, None)

    def acquire_step(self, uuid: UUID, number: int) -> Dataset:
        """Return an open step of an unfinished import; ``close`` releases it.

        Args:
            uuid: UUID of the dataset that the import makes.
            number: number of the step.

        Raises:
            DlfsError: as ``ServedImports.open_step``.
        """
        return self._acquire(self.imports.record(uuid), number)

    def _acquire(self, record: DatasetRecord, step: int | None) -> Dataset:
        return Dataset(
            self.connection_of(step),
            DatasetIdentity.of(record, self.uuid),
            shared=self._cache.acquire(self, record, step),
            release=lambda: self._cache.release(self.uuid, record.uuid, step),
        )

    def dataset(self, name: str | bytes, version: int, /) -> Dataset:
        """Return an open dataset by name and version; ``close`` releases it.

        Raises:
            NotFoundError: the volume has no such dataset.
            DlfsError: the same errors as ``acquire``.
        """
        raw = dataset_name_bytes(name)
        catalog = self.volume.session.catalog
        for record in catalog.find(raw, version):
            return self.acquire(record.uuid)
        raise no_such_dataset(catalog, raw, version, where=self.volume.uri)

    def close(self) -> None:
        """Close the volume; the cache closes its datasets. Idempotent."""
        if not self._closed:
            self._closed = True
            self._cache.memory.remove_volume(self.memory)
        self.volume.close()


@dataclass(frozen=True)
class _StepConnection:
    """Opens a step of an unfinished import, for a ``Dataset`` of the cache.

    Args:
        volume: volume of the import.
        number: number of the step.
    """

    volume: ServedVolume
    number: int

    @property
    def uri(self) -> str:
        return self.volume.connection.uri

    def open_volume(self) -> VolumeSession:
        return self.volume.connection.open_volume()

    def open_dataset(
        self, identity: DatasetIdentity, directory: FrozenDirectory | None
    ) -> DatasetSession:
        del directory  # the step brings its own
        options = self.volume.connection.options
        return self.volume.imports.open_step(identity.uuid, self.number, options)
