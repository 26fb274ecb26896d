"""What the mount shows at its root: the newest version of every dataset, and any version by name.

Each version of a dataset that is looked at gets a slot, a number that stays its own for as long as
the volume is mounted; its sample directory is loaded when something below it is first asked for.
The list of datasets is read from the volume again when the root is looked at and the list is older
than a second, so an import or a removal by another process shows by itself.

A dataset that was removed answers ESTALE from then on, and is closed when the last file on it is.

Threads: one, the FUSE loop (trio); what waits for a device runs in a worker thread. Loading has a
share of its own: datasets that take long, or whose devices do not answer, keep neither the root nor
what is loaded waiting.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, Protocol
from uuid import UUID

import trio

from dlfs.dataset import Dataset
from dlfs.errors import LimitError, NotFoundError, StaleError
from dlfs.format.location import unpack_location
from dlfs.format.names import parse_dataset
from dlfs.mount.tree import DatasetTree
from dlfs.staging.inode_numbers import SLOT_MAX
from dlfs.store.info import DatasetInfo
from dlfs.wording import quote

ROOT_SECONDS = 1.0
"""How long the list of datasets, and what the kernel knows of the root, may be old."""
LOADS_MAX = 8
"""Datasets that are loaded at the same time; others wait."""

_log = logging.getLogger(__name__)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Sample(NamedTuple):
    """What a file's attributes are made of."""

    length_bytes: int
    crc32c: int


class ShownVolume(Protocol):
    """What a mount shows: a ``Volume``, or one of a service, whose datasets are shared."""

    def refresh(self) -> None:
        """See the newest generation."""

    def datasets(self) -> list[DatasetInfo]:
        """All versions of all datasets."""

    def dataset(self, name: str | bytes, version: int, /) -> Dataset:
        """Open a dataset."""


class OpenDataset:
    """A dataset whose sample directory is loaded."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        directory = dataset.directory
        self.tree = DatasetTree(directory, label=f"dataset {dataset.name!r}")
        self._count = len(directory)
        self._locations = directory.locations

    def sample(self, index: int) -> Sample:
        """The length and CRC32C of a sample.

        Raises:
            StaleError: there is no such sample.
        """
        if index >= self._count:
            raise StaleError(f"find sample {index}: expected an index below {self._count}")
        _, length, crc = unpack_location(self._locations[index])
        return Sample(length, crc)

    def close(self) -> None:
        """Give its memory back."""
        del self._locations, self.tree  # views of the memory that the dataset unmaps
        self.dataset.close()


@dataclass(eq=False)
class Slot:
    """One version of one dataset in this mount."""

    number: int
    info: DatasetInfo
    modified_ns: int
    """When the dataset was made, since 1970."""
    opened: OpenDataset | None = None
    removed: bool = False
    use_count: int = 0
    """Open files, and readings under way."""
    turn: trio.Lock = field(default_factory=trio.Lock)
    """One at a time loads it."""

    @property
    def generation(self) -> int:
        """Tells this slot from one with the same number in another mount."""
        return int.from_bytes(self.info.uuid.bytes[:4], "little")

    def hold(self) -> None:
        """Keep the dataset open, even when it is removed."""
        self.use_count += 1

    def let_go(self) -> None:
        """Undo a ``hold``."""
        self.use_count -= 1
        self._close_if_unused()

    def remove(self) -> None:
        """Note that the dataset was removed from the volume."""
        self.removed = True
        self._close_if_unused()

    def close(self) -> None:
        """Give the dataset's memory back."""
        opened, self.opened = self.opened, None
        if opened is not None:
            opened.close()

    def _close_if_unused(self) -> None:
        if self.removed and not self.use_count:
            self.close()


class VolumeView:
    """The datasets of a volume as a mount shows them.

    Args:
        volume: borrowed.
        on_removed: told of slots whose dataset was removed.
    """

    def __init__(
        self, volume: ShownVolume, *, on_removed: Callable[[Slot], None] = lambda _slot: None
    ) -> None:
        self._volume = volume
        self._on_removed = on_removed
        self._turn = trio.Lock()
        self._loading = trio.CapacityLimiter(LOADS_MAX)
        self._due = 0.0
        self._newest: dict[bytes, DatasetInfo] = {}
        self._versions: dict[tuple[bytes, int], DatasetInfo] = {}
        self._slots: list[Slot] = []
        self._by_uuid: dict[UUID, Slot] = {}

    # ---- the root --------------------------------------------------------------------------------

    async def names(self) -> list[bytes]:
        """The datasets of the volume, in byte order."""
        await self._refresh()
        return sorted(self._newest)

    async def modified_ns(self) -> int:
        """When the youngest dataset was made, in nanoseconds since 1970; 0 without any."""
        await self._refresh()
        return max((_created_ns(info) for info in self._newest.values()), default=0)

    async def sample_total(self) -> int:
        """How many samples the newest versions have together."""
        await self._refresh()
        return sum(info.sample_count for info in self._newest.values())

    async def child(self, name: bytes) -> Slot:
        """The newest version of the dataset of that name, or for ``NAME@VERSION`` that version.

        Raises:
            NotFoundError: there is no such dataset or version.
            LimitError: this mount has shown as many datasets as it can.
        """
        await self._refresh()
        wanted = parse_dataset(name, self._newest)
        if wanted.version is None:
            info = self._newest.get(wanted.name)
        else:
            info = self._versions.get((wanted.name, wanted.version))
        if info is None:
            raise NotFoundError(f"look {quote(name)} up in the volume: no such dataset")
        return self._slot_of(info)

    # ---- slots -----------------------------------------------------------------------------------

    def slot(self, number: int) -> Slot:
        """A slot by its number.

        Raises:
            StaleError: there is no such slot in this mount, or its dataset was removed.
        """
        if not 0 < number <= len(self._slots):
            raise StaleError(f"find dataset number {number}: it was not shown by this mount")
        slot = self._slots[number - 1]
        if slot.removed:
            raise _removed(slot)
        return slot

    async def open(self, slot: Slot) -> OpenDataset:
        """The dataset of a slot, loaded.

        Raises:
            StaleError: it was removed before it was loaded.
            DlfsError: it cannot be loaded.
        """
        if slot.opened is None:
            async with slot.turn:
                if slot.opened is None:
                    slot.opened = await self._loaded(slot)
        return slot.opened

    def opened(self) -> list[OpenDataset]:
        """The datasets that are loaded."""
        return [slot.opened for slot in self._slots if slot.opened is not None]

    def close(self) -> None:
        """Close every dataset."""
        for slot in self._slots:
            slot.close()

    def expire(self) -> None:
        """Read the list of datasets again when the root is next looked at: it has changed."""
        self._due = 0.0

    # ---- inside ----------------------------------------------------------------------------------

    async def _loaded(self, slot: Slot) -> OpenDataset:
        self.slot(slot.number)
        load = functools.partial(self._load, slot)
        opened = await trio.to_thread.run_sync(load, limiter=self._loading)
        try:
            self.slot(slot.number)
        except StaleError:  # it was removed meanwhile
            opened.close()
            raise
        return opened

    def _load(self, slot: Slot) -> OpenDataset:
        uuid = slot.info.uuid
        if all(info.uuid != uuid for info in self._volume.datasets()):  # others refresh it, too
            raise _removed(slot)
        dataset = self._volume.dataset(slot.info.name, slot.info.version)
        if dataset.info.uuid != uuid:  # a new one has taken name and version
            dataset.close()
            raise _removed(slot)
        dataset.directory.lower_bound(b"")  # brings the names in: the loop must not wait for them
        return OpenDataset(dataset)

    async def _refresh(self) -> None:
        if trio.current_time() < self._due:
            return
        async with self._turn:
            if trio.current_time() < self._due:
                return
            self._show(await trio.to_thread.run_sync(self._read_list))
            self._due = trio.current_time() + ROOT_SECONDS

    def _read_list(self) -> list[DatasetInfo]:
        self._volume.refresh()
        return self._volume.datasets()

    def _show(self, infos: list[DatasetInfo]) -> None:
        self._versions = {(_name(info), info.version): info for info in infos}
        self._newest = {}
        for info in sorted(infos, key=lambda info: info.version):
            self._newest[_name(info)] = info
        uuids = {info.uuid for info in infos}
        for uuid, slot in list(self._by_uuid.items()):
            if uuid not in uuids:
                del self._by_uuid[uuid]
                _log.info("dataset %r version %d was removed", slot.info.name, slot.info.version)
                slot.remove()
                self._on_removed(slot)

    def _slot_of(self, info: DatasetInfo) -> Slot:
        slot = self._by_uuid.get(info.uuid)
        if slot is None:
            if len(self._slots) == SLOT_MAX:
                raise LimitError(
                    f"show dataset {info.name!r}: expected at most {SLOT_MAX} datasets in the life "
                    "of a mount; mount the volume anew"
                )
            slot = Slot(len(self._slots) + 1, info, _created_ns(info))
            self._slots.append(slot)
            self._by_uuid[info.uuid] = slot
        return slot


def _name(info: DatasetInfo) -> bytes:
    return info.name.encode("utf-8", "surrogateescape")


def _created_ns(info: DatasetInfo) -> int:
    return (info.created - _EPOCH) // timedelta(microseconds=1) * 1000


def _removed(slot: Slot) -> StaleError:
    return StaleError(f"use dataset {slot.info.name!r} version {slot.info.version}: it was removed")
