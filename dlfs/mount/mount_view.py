"""The datasets and volumes that a mount shows, with their numbers.

The root shows the datasets of the only volume. In a nested mount it shows a directory for each
volume, below which are the volume's datasets. The directory has the volume's label as its name, or
its UUID where the label is empty, no file name, or taken. Volumes come and go while the mount is
served.

The **list directories** are those above the datasets: the root, and those of volumes. Each volume
directory and each version of a dataset that is looked up gets a number from one sequence, which it
keeps as long as the mount exists. A number is never used twice. Number 0 is the root.

What a nested root shows is known without a device, so a volume that does not answer delays no
other: its directory appears with what is known after a short wait.

Threads: one, the FUSE loop (trio).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol, TypeAlias
from uuid import UUID

import trio

from dlfs.base.wording import quote
from dlfs.dataset.dataset import Dataset
from dlfs.errors import LimitError, NotFoundError, StaleError
from dlfs.mount.errnos import report_failure
from dlfs.mount.inode_numbers import DATASET_MAX
from dlfs.mount.supervise.inherited import DatasetNumbers
from dlfs.mount.view import (
    IDLE_SECONDS,
    ROOT_SECONDS,
    ShownDataset,
    ShownVolume,
    VolumeView,
)
from dlfs.store.info import DatasetInfo

ROOT_DIRECTORY = 0
"""Number of the root among the list directories."""
EXPIRY_SECONDS = ROOT_SECONDS + 0.1
"""Time after which the kernel has no old entry of the root, in seconds; it counts in ticks."""
REFRESH_WAIT_SECONDS = 1.0
"""Longest wait of a request for a volume's directory until the volume's list is read again."""

Shown: TypeAlias = ShownDataset | VolumeView


class Space(NamedTuple):
    """The space of a volume, or of several together."""

    capacity_bytes: int
    free_bytes: int
    sample_count: int


class ViewServer(Protocol):
    """The server of a mount, which follows the changes of its view; its own tasks call it."""

    def add(self, dataset: ShownDataset) -> None:
        """Note a dataset that is shown for the first time."""

    async def withdraw(self, dataset: ShownDataset) -> None:
        """Stop using a dataset that was removed from its volume, or with it from the mount."""


class MountView:
    """Volumes and datasets that a mount shows, by name and by number.

    Args:
        volumes: the volumes; each must outlive its place in the view.
        nested: show each volume in a directory of its own, also if it is the only one.
        numbers: the numbers that earlier servers of this mount have given, to be continued.

    Attributes:
        nested: as given.
        server: the server that shows the view; None: it is not mounted.
        nursery: nursery of the server, for work that no request waits for; None likewise.
    """

    def __init__(
        self,
        volumes: Iterable[ShownVolume],
        *,
        nested: bool = False,
        numbers: DatasetNumbers | None = None,
    ) -> None:
        self.nested = nested
        self.server: ViewServer | None = None
        self.nursery: trio.Nursery | None = None
        self._numbers = numbers
        # Number n at index n-1; None: shown by an earlier server, and removed since.
        self._shown: list[Shown | None] = []
        self._volumes: list[VolumeView] = []
        self._refreshes: dict[VolumeView, trio.Event] = {}  # those that tasks of the server run
        for volume in volumes:
            self._enter(volume)

    # ---- volumes ---------------------------------------------------------------------------------

    @property
    def volumes(self) -> list[VolumeView]:
        """The volumes."""
        return list(self._volumes)

    async def add(self, volume: ShownVolume) -> VolumeView:
        """Show one more volume, in a nested view.

        Raises:
            LimitError: this mount has shown as many datasets and volumes as it can.
        """
        view = self._enter(volume)
        try:
            self._number_volume(view)
        except BaseException:
            self._volumes.remove(view)
            raise
        await self._forget()
        return view

    async def hide(self, volume: VolumeView) -> None:
        """Have no more programs find a volume of a nested view; what is open goes on."""
        volume.hidden = True
        await self._forget()

    async def unhide(self, volume: VolumeView) -> None:
        """Undo ``hide``."""
        volume.hidden = False
        await self._forget()

    async def remove(self, volume: VolumeView) -> None:
        """Stop showing a volume. What is open in it fails with ESTALE from now on.

        When it returns, no thread of the view uses the volume. Open datasets of it are closed soon.
        """
        self._volumes.remove(volume)
        if not volume.hidden:
            await self._forget()
        await volume.remove()
        for shown in self.shown_of(volume):
            if isinstance(shown, ShownDataset):
                await self._withdraw(shown)

    def shown_of(self, volume: VolumeView) -> list[Shown]:
        """Return the directory of a volume and its datasets that this server has shown."""
        return [
            shown
            for shown in self._shown
            if shown is volume or (isinstance(shown, ShownDataset) and shown.volume is volume)
        ]

    # ---- list directories -----------------------------------------------------------------------

    def directory(self, number: int) -> VolumeView | None:
        """Return the volume whose datasets a list directory shows; None: it shows the volumes.

        Raises:
            StaleError: this mount has no list directory of that number, or its volume was removed.
        """
        if number == ROOT_DIRECTORY:
            return None if self.nested else self._volumes[0]
        volume = self._at(number)
        if not isinstance(volume, VolumeView) or volume.removed:
            raise StaleError(f"find directory number {number}: no volume of this mount has it")
        return volume

    def is_volume(self, number: int) -> bool:
        """Return True if a number is that of a volume's directory, even if it was removed."""
        return isinstance(self.shown(number), VolumeView)

    def generation(self, number: int) -> int:
        """Return what distinguishes a list directory from one of that number elsewhere."""
        volume = self._at(number) if number != ROOT_DIRECTORY else None
        return 0 if volume is None else volume.generation

    async def refresh(self, number: int = ROOT_DIRECTORY) -> None:
        """Read what a list directory shows again, if that is old.

        Raises:
            StaleError: it was removed.
            DlfsError: the devices do not answer, and nothing is known.
        """
        volume = self.directory(number)
        if volume is not None:
            await volume.refresh()

    async def refresh_soon(self, number: int = ROOT_DIRECTORY) -> None:
        """Read the list of datasets again on which a number depends; wait briefly in a nested view.

        A look-up in a nested root must not wait for devices: meanwhile the kernel lets no volume
        come or go. A request for the nested root itself waits for none of the lists.

        Args:
            number: of a list directory or a dataset.

        Raises:
            StaleError: it was removed.
            DlfsError: as ``refresh``, if the view is not nested.
        """
        if not self.nested:
            await self._volumes[0].refresh()
            return
        if self.nursery is None:
            return
        refreshes = [self._start_refresh(volume, self.nursery) for volume in self._below(number)]
        if number != ROOT_DIRECTORY:
            with trio.move_on_after(REFRESH_WAIT_SECONDS):
                await refreshes[0].wait()

    def entries(self, number: int = ROOT_DIRECTORY) -> list[tuple[bytes, Shown]]:
        """Return the entries that a list directory lists, in byte order of their names.

        Raises:
            StaleError: it was removed.
            LimitError: this mount has shown as many datasets and volumes as it can.
        """
        volume = self.directory(number)
        if volume is not None:
            return [(name, volume.child(name)) for name in volume.names()]
        shown = [volume for volume in self._volumes if not volume.hidden]
        return sorted(((each.name, each) for each in shown), key=lambda entry: entry[0])

    async def child(self, name: bytes, number: int = ROOT_DIRECTORY) -> Shown:
        """Find a name in a list directory: a volume, a dataset, or a version of a dataset.

        Raises:
            NotFoundError: there is no such entry.
            StaleError: the directory was removed.
            LimitError: this mount has shown as many datasets and volumes as it can.
        """
        volume = self.directory(number)
        if volume is not None:
            await volume.refresh()
            return volume.child(name)
        for each in self._volumes:
            if each.name == name and not each.hidden:
                await self.refresh_soon(each.number)
                return each
        raise NotFoundError(f"look {quote(name)} up in the mount: no such volume")

    def modified_ns(self, number: int = ROOT_DIRECTORY) -> int:
        """Return the creation time of the youngest dataset below in ns since 1970; 0 without one.

        Raises:
            StaleError: the directory was removed.
        """
        return max((each.modified_ns() for each in self._below(number)), default=0)

    def space(self, number: int = ROOT_DIRECTORY) -> Space:
        """Return the space of the volume of a list directory or dataset; of all for the root.

        Raises:
            StaleError: this mount has no such number, or it was removed.
        """
        below = self._below(number)
        return Space(
            sum(each.volume.capacity_bytes for each in below),
            sum(each.volume.free_bytes for each in below),
            sum(each.sample_total() for each in below),
        )

    async def keep_current(self) -> None:
        """Follow the volumes without requests, each by a task of the server's nursery."""
        while True:
            await trio.sleep(IDLE_SECONDS)
            for volume in self._volumes:
                if self.nursery is not None and not volume.is_followed:
                    self.nursery.start_soon(volume.keep_current)

    def expire(self) -> None:
        """Have the next request for each list of datasets read it again."""
        for volume in self._volumes:
            volume.expire()

    async def restore(self) -> list[Shown | None]:
        """Show what earlier servers of this mount have shown, by the same numbers.

        A later call adds what an earlier server has shown since the one before. Volumes that have
        no number get one.

        Returns:
            What has a number, from 1 on; None stands for what was removed before this server.
        """
        known = len(self._shown)
        uuids = [] if self._numbers is None else list(self._numbers)[known:]
        volumes = {volume.volume.uuid: volume for volume in self._volumes if self.nested}
        if set(uuids) - set(volumes):
            self.expire()
            for volume in self._volumes:
                await volume.refresh()
        infos = {
            uuid: (volume, info)
            for volume in self._volumes
            for uuid, info in volume.infos().items()
        }
        for number, uuid in enumerate(uuids, known + 1):
            if uuid in volumes:
                volumes[uuid].number = number
                self._shown.append(volumes[uuid])
            elif uuid in infos:
                volume, info = infos[uuid]
                volume.by_uuid[uuid] = dataset = ShownDataset(volume, info, number)
                self._shown.append(dataset)
            else:
                self._shown.append(None)
        for volume in volumes.values():
            if not volume.number:
                self._number_volume(volume)
        return list(self._shown)

    # ---- datasets --------------------------------------------------------------------------------

    def dataset(self, number: int) -> ShownDataset:
        """Return a dataset by its number.

        Raises:
            StaleError: this mount has no dataset of that number, or it was removed.
        """
        dataset = self._at(number)
        if not isinstance(dataset, ShownDataset):
            raise StaleError(f"find dataset number {number}: it is the directory of a volume")
        dataset.check()
        return dataset

    async def load(self, dataset: ShownDataset) -> Dataset:
        """Load a dataset, unless it is loaded already: see ``VolumeView.load``."""
        return await dataset.volume.load(dataset)

    def shown(self, number: int) -> Shown | None:
        """Return what a number stands for, even if it was removed; None if that is not known."""
        return self._shown[number - 1] if 0 < number <= len(self._shown) else None

    def close(self) -> None:
        """Close every dataset."""
        for shown in self._shown:
            if isinstance(shown, ShownDataset):
                shown.close()

    # ---- inside ----------------------------------------------------------------------------------

    def _enter(self, volume: ShownVolume) -> VolumeView:
        """Add a volume that has no number yet."""
        name = self._free_name(volume) if self.nested else b""
        view = VolumeView(volume, name, self._numbered, self._on_removed)
        if self.nested:
            view.take_list()  # its directory has a time before the devices are asked again
        self._volumes.append(view)
        return view

    def _free_name(self, volume: ShownVolume) -> bytes:
        label = volume.label.encode("utf-8", "surrogateescape")
        taken = [each.name for each in self._volumes]
        unusable = label in (b"", b".", b"..", *taken) or b"/" in label or b"\0" in label
        return str(volume.uuid).encode() if unusable else label

    def _at(self, number: int) -> Shown:
        shown = self.shown(number)
        if shown is None:
            raise StaleError(f"use number {number}: this mount has not shown it, or it was removed")
        return shown

    def _below(self, number: int) -> list[VolumeView]:
        if number == ROOT_DIRECTORY:
            return self._volumes
        shown = self._at(number)
        volume = shown.volume if isinstance(shown, ShownDataset) else shown
        if volume.removed:
            raise StaleError(f"use number {number}: its volume was removed")
        return [volume]

    def _number_volume(self, volume: VolumeView) -> None:
        name = volume.name.decode("utf-8", "replace")
        self._number(volume, volume.volume.uuid, f"volume {name!r}")

    def _numbered(self, volume: VolumeView, info: DatasetInfo) -> ShownDataset:
        """Return the dataset with its number; the first time, give it the next free number."""
        dataset = volume.by_uuid.get(info.uuid)
        if dataset is None:
            dataset = ShownDataset(volume, info)
            self._number(dataset, info.uuid, f"dataset {info.name!r}")
            volume.by_uuid[info.uuid] = dataset
            if self.server is not None:
                self.server.add(dataset)
        return dataset

    def _number(self, shown: Shown, uuid: UUID, label: str) -> None:
        """Show something by the next free number."""
        if len(self._shown) == DATASET_MAX:
            raise LimitError(
                f"show {label}: expected at most {DATASET_MAX} datasets in the life of a mount; "
                "mount the volume anew"
            )
        self._shown.append(shown)
        shown.number = len(self._shown)
        if self._numbers is not None:
            self._numbers.set(shown.number, uuid)

    def _start_refresh(self, volume: VolumeView, nursery: trio.Nursery) -> trio.Event:
        """Have a task read a volume's list, unless one does; return the event of its end."""
        ended = self._refreshes.get(volume)
        if ended is None:
            ended = self._refreshes[volume] = trio.Event()
            nursery.start_soon(self._refresh_quietly, volume)
        return ended

    async def _refresh_quietly(self, volume: VolumeView) -> None:
        """Read a volume's list again; a failure is logged, and the list stays as it is."""
        try:
            await volume.refresh()
        except StaleError:
            pass  # the volume was removed meanwhile
        except Exception as error:  # noqa: BLE001
            report_failure(error)
        finally:
            self._refreshes.pop(volume).set()

    def _on_removed(self, dataset: ShownDataset) -> None:
        if self.server is not None and self.nursery is not None:
            self.nursery.start_soon(self.server.withdraw, dataset)

    async def _forget(self) -> None:
        """Return when the kernel has forgotten what was in the root, or missing there, before."""
        if self.nursery is not None:
            await trio.sleep(EXPIRY_SECONDS)

    async def _withdraw(self, dataset: ShownDataset) -> None:
        """Have the server stop using a dataset; it does not end before that has.

        Raises:
            DlfsError: the server could not stop using it.
        """
        server, nursery = self.server, self.nursery
        if server is None or nursery is None:
            return

        async def run(task_status: trio.TaskStatus[None]) -> None:
            with trio.CancelScope(shield=True):  # also if the caller ends
                await server.withdraw(dataset)
            task_status.started()

        await nursery.start(run)
