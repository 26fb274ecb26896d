"""The datasets of a volume as a mount shows them, numbered.

The root directory shows the newest version of every dataset, and any version under NAME@VERSION.
Each version that is looked up gets a number, which it keeps as long as the volume is mounted. Its
sample directory is loaded when something below it is first requested. The list of datasets is read
from the volume again when a request for the root finds it older than a second, so imports and
removals by other processes become visible. While the devices do not answer, it stays as it is. It
is also read every five seconds without a request, so that devices that left the volume are closed.

A removed dataset fails with ESTALE from then on, and is closed with the last file that is open on
it.

Threads: one, the FUSE loop (trio). Worker threads wait for devices. Loading datasets has a limiter
of its own, so a dataset on a slow device delays neither the root nor loaded datasets.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, Protocol
from uuid import UUID

import trio

from dlfs.dataset import Dataset
from dlfs.errors import DeviceError, DlfsError, LimitError, NotFoundError, StaleError
from dlfs.format.location import unpack_location
from dlfs.format.names import parse_dataset
from dlfs.mount.kept import DatasetNumbers
from dlfs.mount.tree import DatasetTree
from dlfs.staging.inode_numbers import DATASET_MAX
from dlfs.store.info import DatasetInfo
from dlfs.wording import quote

ROOT_SECONDS = 1.0
"""Greatest age of the list of datasets, and of root entries in the kernel's cache, in seconds."""
IDLE_SECONDS = 5.0
"""Time between two reads of that list for which no request asks, in seconds."""
LOADS_MAX = 8
"""Most datasets that are loaded at the same time; others wait."""

_log = logging.getLogger(__name__)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class SampleAttributes(NamedTuple):
    """Length and checksum of a sample, from which the attributes of its file are made."""

    length_bytes: int
    crc32c: int


class ShownVolume(Protocol):
    """A volume to mount: a ``Volume``, or that of a node service, whose datasets are shared."""

    def refresh(self) -> None:
        """Read the newest generation from the members."""

    def datasets(self) -> list[DatasetInfo]:
        """Return all versions of all datasets."""

    def dataset(self, name: str | bytes, version: int, /) -> Dataset:
        """Open a dataset."""


class LoadedDataset:
    """An open dataset and its directory tree."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        directory = dataset.directory
        self.tree = DatasetTree(directory, label=f"dataset {dataset.name!r}")
        self._count = len(directory)
        self._locations = directory.locations

    def sample(self, index: int) -> SampleAttributes:
        """Return the length and CRC32C of a sample.

        Raises:
            StaleError: there is no such sample.
        """
        if index >= self._count:
            raise StaleError(f"find sample {index}: expected an index below {self._count}")
        _, length, crc = unpack_location(self._locations[index])
        return SampleAttributes(length, crc)

    def close(self) -> None:
        """Close the dataset and free its memory."""
        del self._locations, self.tree  # views of memory that the dataset unmaps
        self.dataset.close()


@dataclass(eq=False)
class ShownDataset:
    """One version of a dataset in this mount."""

    number: int
    info: DatasetInfo
    modified_ns: int
    """Creation time of the dataset, in nanoseconds since 1970."""
    loaded: LoadedDataset | None = None
    removed: bool = False
    pin_count: int = 0
    """Open files and reads under way."""
    load_lock: trio.Lock = field(default_factory=trio.Lock)

    @functools.cached_property
    def generation(self) -> int:
        """Number that distinguishes it from a dataset of the same number in another mount."""
        return int.from_bytes(self.info.uuid.bytes[:4], "little")

    def pin(self) -> None:
        """Prevent the dataset from being closed, even if it is removed."""
        self.pin_count += 1

    def unpin(self) -> None:
        """Undo one ``pin``."""
        self.pin_count -= 1
        self._close_if_unused()

    def remove(self) -> None:
        """Note that the dataset was removed from the volume."""
        self.removed = True
        self._close_if_unused()

    def close(self) -> None:
        """Close the dataset and free its memory."""
        loaded, self.loaded = self.loaded, None
        if loaded is not None:
            loaded.close()

    def _close_if_unused(self) -> None:
        if self.removed and not self.pin_count:
            self.close()


class VolumeView:
    """The datasets of a volume, by name and by number.

    Args:
        volume: the volume; must outlive the view.
        numbers: the numbers that earlier servers of this mount have given, to be continued.
        on_removed: called with each dataset that was removed from the volume.
    """

    def __init__(
        self,
        volume: ShownVolume,
        *,
        numbers: DatasetNumbers | None = None,
        on_removed: Callable[[ShownDataset], None] = lambda _dataset: None,
    ) -> None:
        self._volume = volume
        self._numbers = numbers
        self._on_removed = on_removed
        self._refresh_lock = trio.Lock()
        self._load_limiter = trio.CapacityLimiter(LOADS_MAX)
        self._refresh_due = 0.0
        self._has_list = False
        self._logged = ""
        self._newest: dict[bytes, DatasetInfo] = {}
        self._versions: dict[tuple[bytes, int], DatasetInfo] = {}
        # Number n at index n-1; None: shown by an earlier server, and removed since.
        self._shown: list[ShownDataset | None] = []
        self._by_uuid: dict[UUID, ShownDataset] = {}

    # ---- the root --------------------------------------------------------------------------------

    async def names(self) -> list[bytes]:
        """Return the names of the datasets, in byte order."""
        await self._refresh()
        return sorted(self._newest)

    async def modified_ns(self) -> int:
        """Return the creation time of the youngest dataset in ns since 1970; 0 without datasets."""
        await self._refresh()
        return max((_created_ns(info) for info in self._newest.values()), default=0)

    async def sample_total(self) -> int:
        """Return the number of samples in the newest versions of all datasets."""
        await self._refresh()
        return sum(info.sample_count for info in self._newest.values())

    async def child(self, name: bytes) -> ShownDataset:
        """Find the newest version of a dataset, or a certain version by ``NAME@VERSION``.

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
        return self._numbered(info)

    async def restore(self) -> list[ShownDataset]:
        """Show the datasets that earlier servers of this mount have shown, by the same numbers.

        A later call adds what an earlier server has shown since the one before.

        Returns:
            Those that the volume still contains.
        """
        known = len(self._shown)
        uuids = [] if self._numbers is None else list(self._numbers)[known:]
        if uuids:
            self.expire()
            await self._refresh()
        infos = {info.uuid: info for info in self._versions.values()}
        for number, uuid in enumerate(uuids, known + 1):
            info = infos.get(uuid)
            shown = None if info is None else ShownDataset(number, info, _created_ns(info))
            self._shown.append(shown)
            if shown is not None:
                self._by_uuid[uuid] = shown
        return list(self._by_uuid.values())

    # ---- datasets --------------------------------------------------------------------------------

    def dataset(self, number: int) -> ShownDataset:
        """Return a dataset by its number.

        Raises:
            StaleError: this mount has no dataset of that number, or it was removed.
        """
        if not 0 < number <= len(self._shown):
            raise StaleError(f"find dataset number {number}: it was not shown by this mount")
        dataset = self._shown[number - 1]
        if dataset is None:
            raise StaleError(f"use dataset number {number}: it was removed")
        if dataset.removed:
            raise _removed(dataset)
        return dataset

    async def load(self, dataset: ShownDataset) -> LoadedDataset:
        """Load a dataset, unless it is loaded already.

        Raises:
            StaleError: it was removed before it was loaded.
            DlfsError: it cannot be loaded.
        """
        if dataset.loaded is None:
            async with dataset.load_lock:
                if dataset.loaded is None:
                    dataset.loaded = await self._load_in_thread(dataset)
        return dataset.loaded

    def shown(self, number: int) -> ShownDataset:
        """Return a dataset that this server has shown, even if it was removed."""
        dataset = self._shown[number - 1]
        assert dataset is not None
        return dataset

    def close(self) -> None:
        """Close every dataset."""
        for dataset in self._shown:
            if dataset is not None:
                dataset.close()

    async def keep_current(self) -> None:
        """Follow the volume without requests, so that no device stays open that has left it.

        While the devices do not answer, only requests read from them.
        """
        while True:
            await trio.sleep(IDLE_SECONDS)
            if self._logged:
                continue
            with suppress(DlfsError, OSError, MemoryError):  # the next request reports it
                await self._refresh()
                for shown in list(self._by_uuid.values()):
                    if shown.loaded is not None:  # it is opened anew if its members have left
                        dataset = shown.loaded.dataset
                        await trio.to_thread.run_sync(getattr, dataset, "session")

    def expire(self) -> None:
        """Have the next request for the root read the list of datasets again."""
        self._refresh_due = 0.0

    # ---- inside ----------------------------------------------------------------------------------

    async def _load_in_thread(self, dataset: ShownDataset) -> LoadedDataset:
        self.dataset(dataset.number)
        load = functools.partial(self._load, dataset)
        loaded = await trio.to_thread.run_sync(load, limiter=self._load_limiter)
        try:
            self.dataset(dataset.number)
        except StaleError:  # it was removed meanwhile
            loaded.close()
            raise
        return loaded

    def _load(self, shown: ShownDataset) -> LoadedDataset:
        uuid = shown.info.uuid
        found = (info for info in self._volume.datasets() if info.uuid == uuid)
        info = next(found, None)  # others refresh the volume, too
        if info is None:
            raise _removed(shown)
        dataset = self._volume.dataset(info.name, info.version)  # it may have another name now
        if dataset.info.uuid != uuid:  # a new dataset has taken name and version
            dataset.close()
            raise _removed(shown)
        dataset.directory.lower_bound(b"")  # loads the names here, not later in the FUSE loop
        return LoadedDataset(dataset)

    async def _refresh(self) -> None:
        if trio.current_time() < self._refresh_due:
            return
        async with self._refresh_lock:
            if trio.current_time() < self._refresh_due:
                return
            try:
                infos = await trio.to_thread.run_sync(self._read_list)
            except (DeviceError, NotFoundError) as error:
                if not self._has_list:
                    raise
                self._log_once(error)
            else:
                self._update(infos)
                self._has_list, self._logged = True, ""
            self._refresh_due = trio.current_time() + ROOT_SECONDS

    def _log_once(self, error: DlfsError) -> None:
        """Log why the list cannot be read, unless it is the reason that was logged last."""
        if str(error) != self._logged:
            self._logged = str(error)
            _log.warning("the list of datasets stays as it was read last: %s", error)

    def _read_list(self) -> list[DatasetInfo]:
        self._volume.refresh()
        return self._volume.datasets()

    def _update(self, infos: list[DatasetInfo]) -> None:
        self._versions = {(_name(info), info.version): info for info in infos}
        self._newest = {}
        for info in sorted(infos, key=lambda info: info.version):
            self._newest[_name(info)] = info
        uuids = {info.uuid for info in infos}
        for uuid, dataset in list(self._by_uuid.items()):
            if uuid not in uuids:
                del self._by_uuid[uuid]
                _log.info(
                    "dataset %r version %d was removed", dataset.info.name, dataset.info.version
                )
                dataset.remove()
                self._on_removed(dataset)

    def _numbered(self, info: DatasetInfo) -> ShownDataset:
        """Return the dataset with its number; the first time, give it the next free number."""
        dataset = self._by_uuid.get(info.uuid)
        if dataset is None:
            if len(self._shown) == DATASET_MAX:
                raise LimitError(
                    f"show dataset {info.name!r}: expected at most {DATASET_MAX} datasets in the "
                    "life of a mount; mount the volume anew"
                )
            dataset = ShownDataset(len(self._shown) + 1, info, _created_ns(info))
            self._shown.append(dataset)
            self._by_uuid[info.uuid] = dataset
            if self._numbers is not None:
                self._numbers.set(dataset.number, info.uuid)
        return dataset


def _name(info: DatasetInfo) -> bytes:
    return info.name.encode("utf-8", "surrogateescape")


def _created_ns(info: DatasetInfo) -> int:
    return (info.created - _EPOCH) // timedelta(microseconds=1) * 1000


def _removed(dataset: ShownDataset) -> StaleError:
    name, version = dataset.info.name, dataset.info.version
    return StaleError(f"use dataset {name!r} version {version}: it was removed")
