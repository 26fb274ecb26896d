"""The volumes of a service and the datasets that it has open, once for all clients and the mount.

A dataset is opened when it is first borrowed, with its directory and its samples in memory that can
be shared, and stays open when nobody has it any more, until its memory is wanted for another, or it
was removed.

One budget holds for the samples of all of them. A dataset takes what its data needs of what is
left; datasets that nobody uses give way to one that would get less, used longest ago first. Where
too little is left even so, a dataset gets ``CACHE_BYTES_MIN`` beyond the budget.

Threads: any at once; opening one dataset does not keep others waiting.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self
from uuid import UUID

from dlfs.attributes import load_attributes_whole
from dlfs.connection import (
    DatasetIdentity,
    LocalConnection,
    OpenOptions,
    find_record,
    no_such_dataset,
)
from dlfs.dataset import Dataset
from dlfs.directory.sharing import Part
from dlfs.errors import ClosedError, NotFoundError, StaleError
from dlfs.format.catalog import DatasetRecord
from dlfs.format.names import dataset_name_bytes
from dlfs.store.info import DatasetInfo, VolumeInfo
from dlfs.store.members import split_uris
from dlfs.units import GIB, MIB
from dlfs.volume import Volume

CACHE_BYTES = 4 * GIB
CACHE_BYTES_MIN = 64 * MIB
"""Of an open dataset, unless its data needs less."""
SPARE_CHUNKS = 16
"""Beyond a dataset's own and a quarter more, with which the reader keeps all of it."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Place:
    """A dataset that is open, or about to be."""

    volume_uuid: UUID
    identity: DatasetIdentity
    opening: threading.Lock = field(default_factory=threading.Lock)
    dataset: Dataset | None = None
    attributes: Part | None = None
    cache_bytes: int = 0
    users: int = 0
    used_at_s: float = 0.0
    removed: bool = False


class Shelf:
    """The open datasets.

    Args:
        cache_bytes: of sample memory, for all of them.
    """

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        self._cache_bytes = cache_bytes
        self._mutex = threading.Lock()
        self._places: dict[UUID, _Place] = {}

    def borrow(self, volume: ServedVolume, record: DatasetRecord) -> Dataset:
        """An open dataset; ``give_back`` it.

        Raises:
            DlfsError: it cannot be opened.
        """
        identity = DatasetIdentity.of(record, volume.uuid)
        with self._mutex:
            place = self._places.setdefault(record.uuid, _Place(volume.uuid, identity))
            place.users += 1
        try:
            with place.opening:
                if place.dataset is None:
                    place.dataset = self._open(volume, record, place)
            return place.dataset
        except BaseException:
            self.give_back(record.uuid)
            raise

    def give_back(self, uuid: UUID) -> None:
        """End a loan."""
        with self._mutex:
            place = self._places[uuid]
            place.users -= 1
            place.used_at_s = time.monotonic()
            ended = not place.users and (place.removed or place.dataset is None)
            gone = [self._places.pop(uuid)] if ended else []
        _close(gone)

    def attributes(self, uuid: UUID) -> Part:
        """The attribute segment of a dataset that is borrowed, in memory that can be shared.

        Raises:
            NotFoundError: it has none.
            DlfsError: it cannot be read.
        """
        with self._mutex:
            place = self._places[uuid]
        with place.opening:
            if place.attributes is None and place.dataset is not None:
                access = place.dataset.access
                place.attributes = load_attributes_whole(
                    access.sources, access.geometry, access.record
                )
        if place.attributes is None:
            raise NotFoundError(f"find attributes of dataset {place.identity.name!r}: none")
        return place.attributes

    def keep_only(self, volume_uuid: UUID, uuids: Iterable[UUID]) -> None:
        """Note which datasets a volume has now: others are closed when their last user goes."""
        kept = set(uuids)
        with self._mutex:
            for place in self._places.values():
                if place.volume_uuid == volume_uuid:
                    place.removed = place.identity.uuid not in kept
            gone = [p for p in self._places.values() if p.removed and not p.users]
            for place in gone:
                del self._places[place.identity.uuid]
        _close(gone)

    def close(self) -> None:
        """Close all datasets; nobody uses them any more."""
        with self._mutex:
            places, self._places = self._places, {}
        _close(places.values())

    def figures(self) -> list[dict[str, Any]]:
        """What is open, with the counters of every reader."""
        with self._mutex:
            places = list(self._places.values())
        found = []
        for place in places:
            with contextlib.suppress(ClosedError):  # it gave way to another meanwhile
                found += _figures_of(place)
        return found

    def _open(self, volume: ServedVolume, record: DatasetRecord, place: _Place) -> Dataset:
        needed_bytes = (record.data_chunks * 5 // 4 + SPARE_CHUNKS) * volume.volume.chunk_bytes
        cache_bytes = self._reserve(place, needed_bytes)
        try:
            dataset = Dataset(volume.connection(cache_bytes), place.identity).open()
        except BaseException:
            place.cache_bytes = 0
            raise
        _log.info(
            "dataset %r version %d is open, with %d MiB for samples",
            place.identity.name, place.identity.version, cache_bytes // MIB,
        )  # fmt: skip
        return dataset

    def _reserve(self, place: _Place, needed_bytes: int) -> int:
        """Take memory for a dataset out of the budget, closing others that nobody uses."""
        gone = []
        with self._mutex:
            idle = [p for p in self._places.values() if not p.users and p.dataset is not None]
            idle.sort(key=lambda p: p.used_at_s, reverse=True)
            while self._left_bytes() < needed_bytes and idle:
                gone.append(self._places.pop(idle.pop().identity.uuid))
            least_bytes = min(needed_bytes, CACHE_BYTES_MIN)
            place.cache_bytes = max(least_bytes, min(needed_bytes, self._left_bytes()))
        _close(gone)
        return place.cache_bytes

    def _left_bytes(self) -> int:
        return self._cache_bytes - sum(place.cache_bytes for place in self._places.values())


def _figures_of(place: _Place) -> list[dict[str, Any]]:
    """Of a place, if its dataset is open.

    Raises:
        ClosedError: it was closed meanwhile.
    """
    if place.dataset is None:
        return []
    return [
        {
            "volume": str(place.volume_uuid),
            "dataset": place.identity.name,
            "version": place.identity.version,
            "uuid": str(place.identity.uuid),
            "users": place.users,
            "cache_bytes": place.cache_bytes,
            "reader": place.dataset.stats(),
            "members": place.dataset.member_stats(),
        }
    ]


def _close(places: Iterable[_Place]) -> None:
    for place in places:
        if place.attributes is not None:
            place.attributes.release()
        if place.dataset is not None:
            place.dataset.close()


class LentDataset(Dataset):
    """A dataset of the shelf, in the hands of one borrower.

    Args:
        dataset: of the shelf.
        identity: of it.
        connection: of it.
        give_back: ends the loan; called once, by ``close``.
    """

    def __init__(
        self,
        dataset: Dataset,
        connection: LocalConnection,
        identity: DatasetIdentity,
        give_back: Callable[[], None],
    ) -> None:
        super().__init__(connection, identity)
        self._access = dataset.access
        self._give_back: Callable[[], None] | None = give_back

    def close(self) -> None:
        """End the loan. Idempotent."""
        self._closed, self._access = True, None
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class ServedVolume:
    """A volume of the service.

    Args:
        uri: what ``dlfs.open`` takes.
        shelf: for its datasets.
        options: of devices.

    Raises:
        DlfsError: as ``dlfs.open``.

    Threads: any at once; ``close`` by one.
    """

    def __init__(self, uri: str, shelf: Shelf, options: OpenOptions) -> None:
        self._shelf = shelf
        self._options = options
        self.volume = Volume(LocalConnection(split_uris(uri), options))
        self.uuid = self.volume.uuid
        self.label = self.volume.label

    def connection(self, cache_bytes: int) -> LocalConnection:
        """What opens datasets of this volume, with so much memory for samples, to be shared."""
        return LocalConnection(
            tuple(split_uris(self.volume.uri)),
            OpenOptions(
                memory_bytes=cache_bytes,
                depth=self._options.depth,
                engine=self._options.engine,
                opener=self._options.opener,
                shared=True,
            ),
        )

    def refresh(self) -> None:
        """See the newest generation.

        Raises:
            DlfsError: as ``dlfs.open``.
        """
        self.volume.refresh()
        self._shelf.keep_only(self.uuid, [info.uuid for info in self.volume.datasets()])

    def datasets(self) -> list[DatasetInfo]:
        """As ``Volume.datasets``."""
        return self.volume.datasets()

    def info(self) -> VolumeInfo:
        """As ``Volume.info``."""
        return self.volume.info()

    def borrow(self, uuid: UUID) -> Dataset:
        """A dataset of the generation seen, open; ``close`` it.

        Raises:
            StaleError: there is no such dataset.
            DlfsError: it cannot be opened.
        """
        record = find_record(self.volume.access.catalog, uuid)
        if record is None:
            raise StaleError(f"open dataset {uuid} of volume {self.uuid}: it was removed")
        dataset = self._shelf.borrow(self, record)
        identity = DatasetIdentity.of(record, self.uuid)
        return LentDataset(
            dataset, self.connection(0), identity, lambda: self._shelf.give_back(record.uuid)
        )

    def dataset(self, name: str | bytes, version: int, /) -> Dataset:
        """As ``Volume.dataset``, borrowed.

        Raises:
            NotFoundError: there is no such dataset.
            DlfsError: as ``borrow``.
        """
        raw = dataset_name_bytes(name)
        records = self.volume.access.catalog.datasets
        for record in records:
            if (record.name, record.version) == (raw, version):
                return self.borrow(record.uuid)
        raise no_such_dataset(records, raw, version, where=self.volume.uri)

    def attributes(self, uuid: UUID) -> Part:
        """As ``Shelf.attributes``."""
        return self._shelf.attributes(uuid)

    def close(self) -> None:
        """Close the volume; its datasets are the shelf's to close."""
        self.volume.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
