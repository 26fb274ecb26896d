"""Makes datasets of what was written below ``incoming``, one at a time, in order of the requests.

While a dataset is sealed nothing in it can be changed; ``changing`` is what every change passes
through. Sealing is the ordinary import of a folder, in a thread, under the volume's writer lock; it
ends with the dataset sealed and gone from the spool, or open again with the reason in its status.
A mount that ends gives up a seal under way; the spool keeps it.

Threads: the FUSE loop owns everything here; ``_work`` and what it calls run in a thread.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID, uuid4
from weakref import WeakKeyDictionary

import trio
from pyfuse3 import FUSEError

from dlfs.errors import ClosedError, DlfsError
from dlfs.format.paths import display
from dlfs.ingest.formats.folder import FolderSource
from dlfs.ingest.importer import ImportReport, import_dataset
from dlfs.ingest.progress import Progress
from dlfs.staging.area import Spool
from dlfs.staging.inode_table import Node
from dlfs.staging.protocol import SealOptions, SealStatus, StagedContents
from dlfs.store.info import DatasetInfo
from dlfs.units import format_bytes
from dlfs.volume import Volume

OPEN, WAITING, SEALING, SEALED, UNDECIDED = "open", "waiting", "sealing", "sealed", "undecided"

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Dataset:
    """One that is not sealed.

    Attributes:
        name: its name.
        status: what programs are told.
        options: of the seal that was asked for.
        changes: under way.
        idle: set when the last of them has ended, while a seal waits for that.
        uuid: of an undecided seal.
    """

    name: bytes
    status: SealStatus = field(default_factory=lambda: SealStatus(OPEN))
    options: SealOptions = field(default_factory=SealOptions)
    changes: int = 0
    idle: trio.Event | None = None
    uuid: UUID | None = None


class _Undecided(Exception):
    """Whether the dataset of a UUID was sealed cannot be told now."""

    def __init__(self, uuid: UUID, reason: str) -> None:
        super().__init__(reason)
        self.uuid = uuid


class Sealer:
    """Seals the datasets of a spool.

    Args:
        volume: to write to; borrowed.
        spool: borrowed; recovered already.
        on_gone: called with the node and the name of a dataset that left the spool.
    """

    def __init__(
        self, volume: Volume, spool: Spool, on_gone: Callable[[Node, bytes], None]
    ) -> None:
        self._volume = volume
        self._spool = spool
        self._on_gone = on_gone
        self._datasets: dict[bytes, _Dataset] = {}
        self._ended: WeakKeyDictionary[Node, SealStatus] = WeakKeyDictionary()
        self._give, self._take = trio.open_memory_channel[tuple[Node, _Dataset]](math.inf)
        self._rubbish = trio.Event()
        self._rubbish.set()  # an earlier server may have left some
        self._ending = False

    # ---- changes ---------------------------------------------------------------------------------

    @contextmanager
    def changing(self, *nodes: Node) -> Iterator[None]:
        """Change something in the datasets that nodes lie in.

        Raises:
            FUSEError: EBUSY: one of them is being sealed.
            StaleError: one of them is gone.
        """
        datasets = [self._dataset(_name(node)) for node in nodes]
        if any(dataset.status.state != OPEN for dataset in datasets):
            raise FUSEError(errno.EBUSY)
        for dataset in datasets:
            dataset.changes += 1
        try:
            yield
        finally:
            for dataset in datasets:
                dataset.changes -= 1
                if not dataset.changes and dataset.idle is not None:
                    dataset.idle.set()

    def gone(self, name: bytes) -> None:
        """Note that a dataset was renamed or removed."""
        self._datasets.pop(name, None)
        self._rubbish.set()

    def status(self, dataset: Node) -> SealStatus:
        """How the sealing of a dataset goes."""
        return self._dataset(_name(dataset)).status

    def ended(self, node: Node) -> SealStatus | None:
        """How the sealing of a dataset that is gone went."""
        return self._ended.get(node)

    # ---- requests --------------------------------------------------------------------------------

    async def request(
        self, node: Node, options: SealOptions, unready: Callable[[], Awaitable[str | None]]
    ) -> None:
        """Freeze a dataset and have it sealed, some time after this returns.

        Args:
            node: its directory.
            options: how.
            unready: says why it cannot be sealed yet, or None; asked once nothing can change.

        Raises:
            FUSEError: EBUSY: it is being sealed already, or it is unready; the status says why.
        """
        dataset = await self._freeze(node, "seal", unready)
        dataset.options = options
        self._give.send_nowait((node, dataset))

    async def discard(self, node: Node, unready: Callable[[], Awaitable[str | None]]) -> None:
        """Take a dataset out of the spool, unsealed.

        Raises:
            FUSEError: EBUSY: it is being sealed, or a file in it is open for writing.
        """
        dataset = await self._freeze(node, "discard", unready)
        try:
            await trio.to_thread.run_sync(self._spool.let_go, dataset.name)
        except OSError as error:
            dataset.status = SealStatus(OPEN, error=f"discard {display(dataset.name)!r}: {error}")
            raise
        _log.info("incoming: %r was discarded", display(dataset.name))
        self._leave(node, dataset, SealStatus(OPEN, error="it was discarded"))

    async def _freeze(
        self, node: Node, action: str, unready: Callable[[], Awaitable[str | None]]
    ) -> _Dataset:
        """Let nothing change a dataset any more, and wait for what does."""
        dataset = self._dataset(_name(node))
        before = dataset.status.state
        if before not in (OPEN, UNDECIDED):
            raise FUSEError(errno.EBUSY)
        dataset.status = SealStatus(WAITING)
        while dataset.changes:
            dataset.idle = trio.Event()
            await dataset.idle.wait()
            dataset.idle = None
        if dataset.name != _name(node):
            raise FUSEError(errno.EBUSY)  # it was renamed meanwhile
        reason = await unready()
        if reason is not None:
            dataset.status = SealStatus(
                before, error=f"{action} {display(dataset.name)!r}: {reason}"
            )
            raise FUSEError(errno.EBUSY)
        return dataset

    # ---- in the background -----------------------------------------------------------------------

    async def run(self) -> None:
        """Tell what is not sealed, and seal what is asked for, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_with_us)
            nursery.start_soon(self._delete_rubbish)
            nursery.start_soon(self._tell_leftovers)
            async for node, dataset in self._take:
                await self._seal(node, dataset)

    async def _end_with_us(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self._ending = True

    async def _tell_leftovers(self) -> None:
        """Say in the log what an earlier server left unsealed."""
        for name in self._spool.names():
            try:
                found = await trio.to_thread.run_sync(
                    self._spool.contents, name, abandon_on_cancel=True
                )
            except OSError as error:
                _log.warning("incoming: %r is not sealed: %s", display(name), error)
                continue
            _log.warning("incoming: %r is not sealed: %s", display(name), describe(found))

    async def _delete_rubbish(self) -> None:
        while True:
            await self._rubbish.wait()
            self._rubbish = trio.Event()
            try:
                await trio.to_thread.run_sync(self._spool.empty_removed, abandon_on_cancel=True)
            except OSError as error:
                _log.error("incoming: delete what was sealed: %s", error)

    async def _seal(self, node: Node, dataset: _Dataset) -> None:
        name = display(dataset.name)
        dataset.status = SealStatus(SEALING)
        try:
            status = await trio.to_thread.run_sync(self._work, dataset)
        except _Undecided as error:
            _log.error("incoming: whether %r was sealed cannot be told: %s", name, str(error))
            dataset.uuid = error.uuid
            dataset.status = SealStatus(UNDECIDED, error=str(error))
        except (DlfsError, OSError, MemoryError) as error:
            reason = str(error).replace(self._spool.path(dataset.name), name)
            _log.error("incoming: %r was not sealed: %s", name, reason)
            dataset.status = SealStatus(OPEN, error=reason, kind=_kind(error))
        else:
            _log.info("incoming: sealed %s@%s: %d samples", name, status.version,
                      status.samples_done)  # fmt: skip
            self._leave(node, dataset, status)

    def _leave(self, node: Node, dataset: _Dataset, status: SealStatus) -> None:
        self._ended[node] = status
        self.gone(dataset.name)
        if not self._ending:
            self._on_gone(node, dataset.name)

    # ---- in a thread -----------------------------------------------------------------------------

    def _work(self, dataset: _Dataset) -> SealStatus:
        """Seal a dataset; when this fails it is as it was, unless the error is _Undecided."""
        name = dataset.name
        if dataset.uuid is not None:
            info = self._find(dataset.uuid)
            if info is not None:
                return self._finish(name, dataset.uuid, _sealed_status(info))
        dataset.uuid = None
        uuid = uuid4()
        self._spool.begin_seal(name, uuid)
        try:
            status = _report_status(self._import(dataset, uuid))
        except (DlfsError, OSError, MemoryError):
            info = self._find(uuid)
            if info is None:
                self._spool.cancel_seal(name)
                raise
            status = _sealed_status(info)
        return self._finish(name, uuid, status)

    def _import(self, dataset: _Dataset, uuid: UUID) -> ImportReport:
        options = dataset.options
        folder = self._spool.path(dataset.name)
        with closing(FolderSource(folder, links=options.links)) as source:
            return import_dataset(
                self._volume,
                source,
                display(dataset.name),
                layout=options.layout,
                seed=options.seed,
                uuid=uuid,
                allow_empty=options.allow_empty,
                progress=lambda progress: self._note(dataset, progress),
            )

    def _note(self, dataset: _Dataset, progress: Progress) -> None:
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
        """The dataset of a UUID, if the volume has it.

        Raises:
            _Undecided: the volume does not say.
        """
        try:
            self._volume.refresh()
            return next((info for info in self._volume.datasets() if info.uuid == uuid), None)
        except (DlfsError, OSError) as error:
            raise _Undecided(uuid, str(error)) from error

    def _finish(self, name: bytes, uuid: UUID, status: SealStatus) -> SealStatus:
        try:
            self._spool.let_go(name)
        except OSError as error:
            reason = f"it was sealed, but cannot be taken out of the spool: {error}"
            raise _Undecided(uuid, reason) from error
        return status

    # ---- inside ----------------------------------------------------------------------------------

    def _dataset(self, name: bytes) -> _Dataset:
        return self._datasets.setdefault(name, _Dataset(name))


def describe(found: StagedContents) -> str:
    """What a dataset holds, for people."""
    since = datetime.fromtimestamp(found.since, UTC).isoformat(sep=" ", timespec="seconds")
    return f"{found.files:,} files, {format_bytes(found.file_bytes)}, since {since}"


def _name(dataset: Node) -> bytes:
    """The name of the dataset that a node lies in."""
    places = dataset.dataset().places
    return places[-1][1]


def _kind(error: Exception) -> str | None:
    return type(error).__name__ if isinstance(error, DlfsError) else None


def _report_status(report: ImportReport) -> SealStatus:
    return SealStatus(
        SEALED,
        samples_done=report.sample_count,
        samples_total=report.sample_count,
        bytes_done=report.sample_bytes,
        bytes_total=report.sample_bytes,
        seconds=report.seconds,
        version=report.dataset.version,
        skipped=dict(report.skipped),
        empty_directories=report.empty_directories,
    )


def _sealed_status(info: DatasetInfo) -> SealStatus:
    return SealStatus(
        SEALED,
        samples_done=info.sample_count,
        samples_total=info.sample_count,
        bytes_done=info.sample_bytes,
        bytes_total=info.sample_bytes,
        version=info.version,
    )
