"""Seals the datasets of a staging area, one at a time, in the order of the requests.

While a dataset is sealed, nothing in it may change: every change runs within ``changing``. A seal
is an ordinary import of a folder, in a worker thread, under the volume's writer lock. In the end
the dataset is sealed and gone from the staging area, or open again with the error in its status. A
mount that ends aborts a seal under way; the files stay in the staging area.

Threads: the FUSE loop (trio) owns all state. ``_seal_or_undo`` and the methods it calls run in a
worker thread.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from uuid import UUID, uuid4
from weakref import WeakKeyDictionary

import trio

from dlfs.errors import ClosedError, DlfsError
from dlfs.format.paths import display
from dlfs.ingest.formats.folder import FolderSource
from dlfs.ingest.importer import ImportReport, import_dataset
from dlfs.ingest.progress import Progress
from dlfs.staging.area import StagingArea
from dlfs.staging.entries import refusal
from dlfs.staging.inode_table import Inode
from dlfs.staging.protocol import SealOptions, SealStatus, StagedContents
from dlfs.store.info import DatasetInfo
from dlfs.units import format_bytes
from dlfs.volume import Volume

OPEN, WAITING, SEALING, SEALED, UNDECIDED = "open", "waiting", "sealing", "sealed", "undecided"

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Dataset:
    """A dataset in the staging area.

    Attributes:
        name: name of the dataset.
        status: state of its sealing, as programs see it.
        options: options of the requested seal.
        uuid: UUID of an undecided seal.
    """

    name: bytes
    status: SealStatus = field(default_factory=lambda: SealStatus(OPEN))
    options: SealOptions = field(default_factory=SealOptions)
    uuid: UUID | None = None


class _Undecided(Exception):
    """It is unknown now whether the dataset of a UUID was sealed."""

    def __init__(self, uuid: UUID, reason: str) -> None:
        super().__init__(reason)
        self.uuid = uuid


class Sealer:
    """Seals the datasets of a staging area.

    Args:
        volume: the volume into which datasets are sealed; must outlive the sealer.
        area: the staging area, after ``recover``; must outlive the sealer.
        on_gone: called with inode and name of each dataset that left the staging area.
    """

    def __init__(
        self, volume: Volume, area: StagingArea, on_gone: Callable[[Inode, bytes], None]
    ) -> None:
        self._volume = volume
        self._area = area
        self._on_gone = on_gone
        self._datasets: dict[bytes, _Dataset] = {}
        self._changes: set[trio.Event] = set()
        self._ended: WeakKeyDictionary[Inode, SealStatus] = WeakKeyDictionary()
        self._requests, self._pending = trio.open_memory_channel[tuple[Inode, _Dataset]](math.inf)
        self._garbage = trio.Event()
        self._garbage.set()  # an earlier server may have left garbage
        self._ending = False

    # ---- changes ---------------------------------------------------------------------------------

    @contextmanager
    def changing(self, *inodes: Inode) -> Iterator[None]:
        """Run a block that changes the datasets of some inodes.

        Raises:
            OSError: EBUSY: one of the datasets is being sealed.
            StaleError: one of the inodes lies in no dataset any more.
        """
        datasets = [self._dataset(_name(inode)) for inode in inodes]
        if any(dataset.status.state != OPEN for dataset in datasets):
            raise refusal(errno.EBUSY)
        ended = trio.Event()
        self._changes.add(ended)
        try:
            yield
        finally:
            self._changes.remove(ended)
            ended.set()

    def forget(self, name: bytes) -> None:
        """Note that a dataset was renamed or removed."""
        self._datasets.pop(name, None)
        self._garbage.set()

    def status(self, dataset: Inode) -> SealStatus:
        """Return the state of a dataset's sealing."""
        return self._dataset(_name(dataset)).status

    def ended(self, inode: Inode) -> SealStatus | None:
        """Return the final status of a dataset that has left the staging area, or None."""
        return self._ended.get(inode)

    # ---- requests --------------------------------------------------------------------------------

    async def request(
        self, inode: Inode, options: SealOptions, find_obstacle: Callable[[], Awaitable[str | None]]
    ) -> None:
        """Freeze a dataset and queue it; the seal happens after this returns.

        Args:
            inode: directory of the dataset.
            options: options of the seal.
            find_obstacle: returns why the dataset cannot be sealed yet, or None; called when no
                change is under way.

        Raises:
            OSError: EBUSY: it is being sealed already, or it has an obstacle, which the status
                names.
        """
        dataset = await self._freeze(inode, "seal", find_obstacle)
        dataset.options = options
        self._requests.send_nowait((inode, dataset))

    async def discard(
        self, inode: Inode, find_obstacle: Callable[[], Awaitable[str | None]]
    ) -> None:
        """Remove a dataset from the staging area without sealing it.

        Raises:
            OSError: EBUSY: it is being sealed, or a file in it is open for writing.
        """
        dataset = await self._freeze(inode, "discard", find_obstacle)
        try:
            await trio.to_thread.run_sync(self._area.take_out, dataset.name)
        except OSError as error:
            dataset.status = SealStatus(OPEN, error=f"discard {display(dataset.name)!r}: {error}")
            raise
        _log.info("incoming: %r was discarded", display(dataset.name))
        self._close(inode, dataset, SealStatus(OPEN, error="it was discarded"))

    async def _freeze(
        self, inode: Inode, action: str, find_obstacle: Callable[[], Awaitable[str | None]]
    ) -> _Dataset:
        """Refuse further changes of a dataset, and wait for those under way.

        It waits for changes of all datasets: a directory may have been moved here during a change.
        """
        dataset = self._dataset(_name(inode))
        before = dataset.status.state
        if before not in (OPEN, UNDECIDED):
            raise refusal(errno.EBUSY)
        dataset.status = SealStatus(WAITING)
        for change in list(self._changes):
            await change.wait()
        if dataset.name != _name(inode):
            raise refusal(errno.EBUSY)  # it was renamed meanwhile
        try:
            reason = await find_obstacle()
        except (OSError, DlfsError) as error:
            dataset.status = SealStatus(
                before, error=f"{action} {display(dataset.name)!r}: {error}"
            )
            raise
        if reason is not None:
            dataset.status = SealStatus(
                before, error=f"{action} {display(dataset.name)!r}: {reason}"
            )
            raise refusal(errno.EBUSY)
        return dataset

    # ---- in the background -----------------------------------------------------------------------

    async def run(self) -> None:
        """Log the datasets of an earlier server, and seal requested datasets, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._note_end)
            nursery.start_soon(self._delete_garbage)
            nursery.start_soon(self._log_leftovers)
            async for inode, dataset in self._pending:
                await self._seal(inode, dataset)

    async def _note_end(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self._ending = True

    async def _log_leftovers(self) -> None:
        """Log the datasets that an earlier server left unsealed."""
        for name in self._area.names():
            try:
                found = await trio.to_thread.run_sync(
                    self._area.contents, name, abandon_on_cancel=True
                )
            except OSError as error:
                _log.warning("incoming: %r is not sealed: %s", display(name), error)
                continue
            _log.warning("incoming: %r is not sealed: %s", display(name), describe(found))

    async def _delete_garbage(self) -> None:
        while True:
            await self._garbage.wait()
            self._garbage = trio.Event()
            try:
                await trio.to_thread.run_sync(self._area.delete_removed, abandon_on_cancel=True)
            except OSError as error:
                _log.error("incoming: delete what was sealed: %s", error)

    async def _seal(self, inode: Inode, dataset: _Dataset) -> None:
        name = display(dataset.name)
        dataset.status = SealStatus(SEALING)
        try:
            status = await trio.to_thread.run_sync(self._seal_or_undo, dataset)
        except _Undecided as error:
            _log.error("incoming: it is unknown whether %r was sealed: %s", name, str(error))
            dataset.uuid = error.uuid
            dataset.status = SealStatus(UNDECIDED, error=str(error))
        except (DlfsError, OSError, MemoryError) as error:
            reason = str(error).replace(self._area.path(dataset.name), name)
            _log.error("incoming: %r was not sealed: %s", name, reason)
            kind = type(error).__name__ if isinstance(error, DlfsError) else None
            dataset.status = SealStatus(OPEN, error=reason, kind=kind)
        else:
            _log.info("incoming: sealed %s@%s: %d samples", name, status.version,
                      status.samples_done)  # fmt: skip
            self._close(inode, dataset, status)

    def _close(self, inode: Inode, dataset: _Dataset, status: SealStatus) -> None:
        self._ended[inode] = status
        self.forget(dataset.name)
        if not self._ending:
            self._on_gone(inode, dataset.name)

    # ---- in a thread -----------------------------------------------------------------------------

    def _seal_or_undo(self, dataset: _Dataset) -> SealStatus:
        """Seal a dataset. On any error but _Undecided, the dataset is as before."""
        name = dataset.name
        if dataset.uuid is not None:
            info = self._find(dataset.uuid)
            if info is not None:
                return self._take_out(name, dataset.uuid, _sealed_status(info))
        dataset.uuid = None
        uuid = uuid4()
        self._area.begin_seal(name, uuid)
        try:
            report = self._import(dataset, uuid)
            status = replace(
                _sealed_status(report.dataset),
                seconds=report.seconds,
                skipped=dict(report.skipped),
                empty_directories=report.empty_directories,
            )
        except (DlfsError, OSError, MemoryError):
            info = self._find(uuid)
            if info is None:
                self._area.cancel_seal(name)
                raise
            status = _sealed_status(info)
        return self._take_out(name, uuid, status)

    def _import(self, dataset: _Dataset, uuid: UUID) -> ImportReport:
        options = dataset.options
        folder = self._area.path(dataset.name)
        with closing(FolderSource(folder, links=options.links)) as source:
            return import_dataset(
                self._volume,
                source,
                display(dataset.name),
                layout=options.layout,
                seed=options.seed,
                uuid=uuid,
                allow_empty=options.allow_empty,
                progress=lambda progress: self._report_progress(dataset, progress),
            )

    def _report_progress(self, dataset: _Dataset, progress: Progress) -> None:
        dataset.status = SealStatus(
            SEALING,
            samples_done=progress.samples_done,
            samples_total=progress.samples_total,
            bytes_done=progress.bytes_done,
            bytes_total=progress.bytes_total,
            seconds=progress.seconds,
        )
        if self._ending:
            raise ClosedError(f"seal {display(dataset.name)!r}: the mount was ended")

    def _find(self, uuid: UUID) -> DatasetInfo | None:
        """Return the dataset of a UUID, or None if the volume has no such dataset.

        Raises:
            _Undecided: the volume cannot be read.
        """
        try:
            self._volume.refresh()
            return next((info for info in self._volume.datasets() if info.uuid == uuid), None)
        except (DlfsError, OSError) as error:
            raise _Undecided(uuid, str(error)) from error

    def _take_out(self, name: bytes, uuid: UUID, status: SealStatus) -> SealStatus:
        try:
            self._area.take_out(name)
        except OSError as error:
            reason = f"it was sealed, but cannot be taken out of the staging area: {error}"
            raise _Undecided(uuid, reason) from error
        return status

    # ---- inside ----------------------------------------------------------------------------------

    def _dataset(self, name: bytes) -> _Dataset:
        return self._datasets.setdefault(name, _Dataset(name))


def describe(found: StagedContents) -> str:
    """Describe the contents of a dataset in a message."""
    since = datetime.fromtimestamp(found.since, UTC).isoformat(sep=" ", timespec="seconds")
    return f"{found.files:,} files, {format_bytes(found.file_bytes)}, since {since}"


def _name(dataset: Inode) -> bytes:
    """Return the name of the dataset that an inode lies in."""
    return dataset.dataset().links[-1][1]


def _sealed_status(info: DatasetInfo) -> SealStatus:
    return SealStatus(
        SEALED,
        samples_done=info.sample_count,
        samples_total=info.sample_count,
        bytes_done=info.sample_bytes,
        bytes_total=info.sample_bytes,
        version=info.version,
    )
