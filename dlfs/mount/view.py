"""One volume as a mount shows it: the list of its datasets, and the loaded ones.

A directory shows the newest version of every dataset, and any version under NAME@VERSION. It is the
root of the mount, or in a mount of several volumes the directory of this one (``mount_view``). The
list is read from the volume again when a request for the directory finds it older than a second, so
imports and removals by other processes become visible. While the devices do not answer, it stays as
it is. It is also read every five seconds without a request, so that devices that left the volume
are closed.

A dataset's sample directory is loaded when something below it is first requested. A removed dataset
fails with ESTALE from then on, and is closed with the last file that is open on it.

Threads: one, the FUSE loop (trio). Worker threads wait for devices. Loading datasets has a limiter
of its own for each volume, so a dataset on a slow device delays neither the list nor loaded
datasets nor other volumes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Protocol
from uuid import UUID

import trio

from dlfs.base.forks import cached_property
from dlfs.base.wording import quote
from dlfs.dataset.dataset import Dataset
from dlfs.directory import FrozenDirectory
from dlfs.errors import DeviceError, DlfsError, NotFoundError, StaleError
from dlfs.format.names import parse_dataset
from dlfs.store.info import DatasetInfo

ROOT_SECONDS = 1.0
"""Greatest age of the list of datasets, and of its entries in the kernel's cache, in seconds."""
IDLE_SECONDS = 5.0
"""Time between two reads of that list for which no request asks, in seconds."""
LOADS_MAX = 8
"""Most datasets of a volume that are loaded at the same time; others wait."""

_log = logging.getLogger(__name__)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class ShownVolume(Protocol):
    """A volume to mount: a ``Volume``, or that of a node service, whose datasets are shared."""

    @property
    def uuid(self) -> UUID:
        """UUID of the volume."""

    @property
    def label(self) -> str:
        """Human-readable name given when the volume was formatted; may be empty."""

    @property
    def capacity_bytes(self) -> int:
        """Size of all chunks, in bytes."""

    @property
    def free_bytes(self) -> int:
        """Size of the unused chunks, in bytes."""

    def refresh(self) -> None:
        """Read the newest generation from the members."""

    def datasets(self) -> list[DatasetInfo]:
        """Return all versions of all datasets."""

    def dataset(self, name: str | bytes, version: int, /) -> Dataset:
        """Open a dataset."""


@dataclass(eq=False)
class ShownDataset:
    """One version of a dataset in this mount."""

    volume: VolumeView
    info: DatasetInfo
    number: int = 0
    """Number in the mount; 0: it has none yet."""
    loaded: Dataset | None = None
    directory: FrozenDirectory | None = None
    """That of the loaded dataset; needs no device."""
    removed: bool = False
    pin_count: int = 0
    """Open files and reads under way."""
    load_lock: trio.Lock = field(default_factory=trio.Lock)

    @property
    def name(self) -> bytes:
        """Name under which it was shown first."""
        return _name(self.info)

    @cached_property
    def generation(self) -> int:
        """Number that distinguishes it from a dataset of the same number in another mount."""
        return _generation(self.info.uuid)

    @cached_property
    def modified_ns(self) -> int:
        """Creation time of the dataset, in nanoseconds since 1970."""
        return created_ns(self.info)

    def check(self) -> None:
        """Check that the dataset was not removed.

        Raises:
            StaleError: it was.
        """
        if self.removed:
            raise _removed(self)

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
    """The datasets of a volume.

    Args:
        volume: the volume; must outlive the view.
        name: name of the volume's directory; empty: the root shows the volume.
        numbered: returns a dataset of this volume with its number in the mount.
        on_removed: called with each dataset that was removed from the volume.

    Attributes:
        volume: the volume.
        name: name of the volume's directory.
        number: number of the volume's directory; 0: the root, or it has none yet.
        hidden: the directory is found by no name any more, though what is open in it is served.
        removed: the mount does not show the volume any more.
    """

    def __init__(
        self,
        volume: ShownVolume,
        name: bytes,
        numbered: Callable[[VolumeView, DatasetInfo], ShownDataset],
        on_removed: Callable[[ShownDataset], None],
    ) -> None:
        self.volume = volume
        self.name = name
        self.number = 0
        self.hidden = False
        self.removed = False
        self.by_uuid: dict[UUID, ShownDataset] = {}
        self._numbered = numbered
        self._on_removed = on_removed
        self._refresh_lock = trio.Lock()
        self._follow_lock = trio.Lock()
        self._load_limiter = trio.CapacityLimiter(LOADS_MAX)
        self._refresh_due = 0.0
        self._has_list = False
        self._logged = ""
        self._newest: dict[bytes, DatasetInfo] = {}
        self._versions: dict[tuple[bytes, int], DatasetInfo] = {}

    @property
    def generation(self) -> int:
        """Number that distinguishes its directory from one of the same number in another mount."""
        return _generation(self.volume.uuid)

    @property
    def is_followed(self) -> bool:
        """True if ``keep_current`` is running."""
        return self._follow_lock.locked()

    # ---- the list --------------------------------------------------------------------------------

    def names(self) -> list[bytes]:
        """Return the names of the datasets, in byte order."""
        return sorted(self._newest)

    def modified_ns(self) -> int:
        """Return the creation time of the youngest dataset in ns since 1970; 0 without datasets."""
        return max((created_ns(info) for info in self._newest.values()), default=0)

    def sample_total(self) -> int:
        """Return the number of samples in the newest versions of all datasets."""
        return sum(info.sample_count for info in self._newest.values())

    def infos(self) -> dict[UUID, DatasetInfo]:
        """Return all versions of all datasets, by UUID."""
        return {info.uuid: info for info in self._versions.values()}

    def child(self, name: bytes) -> ShownDataset:
        """Find the newest version of a dataset, or a certain version by ``NAME@VERSION``.

        Raises:
            NotFoundError: there is no such dataset or version.
            LimitError: this mount has shown as many datasets as it can.
        """
        self._check()
        wanted = parse_dataset(name, self._newest)
        if wanted.version is None:
            info = self._newest.get(wanted.name)
        else:
            info = self._versions.get((wanted.name, wanted.version))
        if info is None:
            raise NotFoundError(f"look {quote(name)} up in the volume: no such dataset")
        return self._numbered(self, info)

    def take_list(self) -> None:
        """Use the list of datasets that the volume has in memory."""
        self._update(self.volume.datasets())
        self._has_list = True

    async def refresh(self) -> None:
        """Read the list of datasets again, if it is old.

        Raises:
            StaleError: the volume was removed from the mount.
            DeviceError, NotFoundError: the list cannot be read, and there is none yet.
        """
        if trio.current_time() < self._refresh_due:
            return
        async with self._refresh_lock:
            if trio.current_time() < self._refresh_due:
                return
            self._check()
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

    def expire(self) -> None:
        """Have the next ``refresh`` read the list of datasets again."""
        self._refresh_due = 0.0

    async def remove(self) -> None:
        """Show nothing any more, and return when no thread reads the list or follows the volume."""
        self.removed = True
        for dataset in self.by_uuid.values():
            dataset.remove()
        self.expire()
        async with self._follow_lock, self._refresh_lock:
            pass

    # ---- datasets --------------------------------------------------------------------------------

    async def load(self, dataset: ShownDataset) -> Dataset:
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

    async def keep_current(self) -> None:
        """Follow the volume without a request, so that no device stays open that has left it.

        While the devices do not answer, only requests read from them.
        """
        if self._logged:
            return
        with suppress(DlfsError, OSError, MemoryError):  # the next request reports it
            async with self._follow_lock:
                await self.refresh()
                for shown in list(self.by_uuid.values()):
                    if shown.loaded is not None:  # it is opened anew if its members have left
                        await trio.to_thread.run_sync(getattr, shown.loaded, "session")

    # ---- inside ----------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.removed:
            raise StaleError(f"use volume {self.volume.uuid}: it is not in the mount any more")

    async def _load_in_thread(self, dataset: ShownDataset) -> Dataset:
        dataset.check()
        load = functools.partial(self._load, dataset)
        loaded = await trio.to_thread.run_sync(load, limiter=self._load_limiter)
        try:
            dataset.check()
        except StaleError:  # it was removed meanwhile
            loaded.close()
            raise
        return loaded

    def _load(self, shown: ShownDataset) -> Dataset:
        uuid = shown.info.uuid
        found = (info for info in self.volume.datasets() if info.uuid == uuid)
        info = next(found, None)  # others refresh the volume, too
        if info is None:
            raise _removed(shown)
        dataset = self.volume.dataset(info.name, info.version)  # it may have another name now
        if dataset.info.uuid != uuid:  # a new dataset has taken name and version
            dataset.close()
            raise _removed(shown)
        shown.directory = dataset.directory
        shown.directory.load_names()  # here, not later in the FUSE loop
        return dataset

    def _log_once(self, error: DlfsError) -> None:
        """Log why the list cannot be read, unless it is the reason that was logged last."""
        if str(error) != self._logged:
            self._logged = str(error)
            _log.warning("the list of datasets stays as it was read last: %s", error)

    def _read_list(self) -> list[DatasetInfo]:
        self.volume.refresh()
        return self.volume.datasets()

    def _update(self, infos: list[DatasetInfo]) -> None:
        self._versions = {(_name(info), info.version): info for info in infos}
        self._newest = {}
        for info in sorted(infos, key=lambda info: info.version):
            self._newest[_name(info)] = info
        uuids = {info.uuid for info in infos}
        for uuid, dataset in list(self.by_uuid.items()):
            if uuid not in uuids:
                del self.by_uuid[uuid]
                _log.info(
                    "dataset %r version %d was removed", dataset.info.name, dataset.info.version
                )
                dataset.remove()
                self._on_removed(dataset)


def _name(info: DatasetInfo) -> bytes:
    return info.name.encode("utf-8", "surrogateescape")


def created_ns(info: DatasetInfo) -> int:
    """Return the creation time of a dataset, in nanoseconds since 1970."""
    return (info.created - _EPOCH) // timedelta(microseconds=1) * 1000


def _generation(uuid: UUID) -> int:
    return int.from_bytes(uuid.bytes[:4], "little")


def _removed(dataset: ShownDataset) -> StaleError:
    name, version = dataset.info.name, dataset.info.version
    return StaleError(f"use dataset {name!r} version {version}: it was removed")
