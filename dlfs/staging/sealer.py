"""Seals the datasets of a staging area, one at a time.

A seal takes the directory out of sight of programs, imports it like any folder, under the volume's
writer lock, and removes it. In the end the dataset is sealed and its directory gone, or it is back
in its place with the error in its status. A server that ends aborts a seal under way.

Threads: any; one call of ``settle``, ``seal`` and ``discard`` at a time.
"""

from __future__ import annotations

import logging
import os
from contextlib import closing
from dataclasses import dataclass, field, replace
from uuid import UUID, uuid4

from dlfs.errors import (
    ClosedError,
    DeviceError,
    DlfsError,
    ExistsError,
    LockedError,
    NotFoundError,
    write_error,
)
from dlfs.format.names import dataset_name_bytes, new_dataset_name
from dlfs.format.paths import display, to_bytes
from dlfs.ingest.importer import ImportReport, import_dataset
from dlfs.ingest.progress import Progress
from dlfs.staging.area import StagingArea
from dlfs.staging.protocol import (
    OPEN,
    SEALED,
    SEALING,
    UNDECIDED,
    WAITING,
    SealOptions,
    SealStatus,
    StagedContents,
    StagedDataset,
)
from dlfs.staging.source import StagedSource
from dlfs.store.info import DatasetInfo
from dlfs.volume.volume import Volume

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Seal:
    """A request to seal or to discard a dataset.

    Attributes:
        name: name of the dataset.
        owner: user to whom all of it must belong; None: it may belong to any.
        options: options of the seal.
        status: state of the dataset's sealing.
    """

    name: bytes
    owner: int | None
    options: SealOptions = field(default_factory=SealOptions)
    status: SealStatus = field(default_factory=lambda: SealStatus(WAITING))


class UndecidedError(DeviceError):
    """It is unknown now whether a dataset was sealed."""


class Sealer:
    """Seals the datasets of a staging area.

    Args:
        volume: the volume into which datasets are sealed; must outlive the sealer.
        area: the staging area; must outlive the sealer.
    """

    def __init__(self, volume: Volume, area: StagingArea) -> None:
        self._volume = volume
        self._area = area
        self._errors: dict[bytes, SealStatus] = {}  # of the last attempts
        self._ending = False

    def end(self) -> None:
        """Have the seal under way, and all that follow, fail. Any thread, at any time."""
        self._ending = True

    def is_ending(self) -> bool:
        """Return True after ``end``."""
        return self._ending

    def settle(self) -> dict[bytes, DatasetInfo]:
        """Finish or undo the seals that a crash or a lost device has interrupted.

        Returns:
            The datasets that had been sealed, by name.

        Raises:
            DlfsError: the volume cannot be read.
            OSError: the staging area cannot be read or written.
        """
        left = self._area.taken()
        if not left:
            return {}
        self._volume.refresh()
        sealed = {info.uuid: info for info in self._volume.datasets()}
        finished = {}
        for uuid in left:
            info = sealed.get(uuid)
            if info is not None:
                self._area.remove(uuid)
                finished[to_bytes(info.name, "dataset name")] = info
                _log.info("incoming: %s@%d had been sealed", info.name, info.version)
                continue
            try:
                name = self._area.put_back(uuid)
            except ExistsError as error:
                _log.error("incoming: %s", error)
            else:
                _log.info("incoming: %r had not been sealed, and is back", display(name))
        return finished

    def seal(self, seal: Seal) -> SealStatus:
        """Seal a dataset. On any error but ``UndecidedError``, its directory is where it was.

        Raises:
            UsageError, LimitError: a new dataset may not have the name; see also ``StagedSource``.
            NotFoundError: there is no directory of the name.
            LockedError: a file is open for writing, or another writer has the volume's lock.
            ExistsError: it was not sealed, and another directory has its name now; both stay.
            DlfsError: as ``import_dataset``.
            UndecidedError: a device failed, and it is unknown whether the dataset was sealed.
        """
        name = new_dataset_name(seal.name)
        finished = self.settle()
        uuid = uuid4()
        try:
            directory = self._area.take(name, uuid, seal.owner)
        except NotFoundError:
            if name in finished:  # by an attempt whose outcome was unknown
                return _sealed_status(finished[name])
            raise
        try:
            status = self._import_or_undo(seal, uuid, directory)
        finally:
            os.close(directory)
        try:
            self._area.remove(uuid)
        except OSError as error:  # the next ``settle`` tries again
            _log.error("incoming: remove the files of %r: %s", display(name), error)
        self._errors.pop(name, None)
        _log.info("incoming: sealed %s@%s: %d samples", display(name), status.version,
                  status.samples_done)  # fmt: skip
        return status

    def discard(self, seal: Seal) -> None:
        """Remove a dataset without sealing it.

        Raises:
            UsageError, LimitError: it is no name of a directory, but a path.
            NotFoundError, DeviceError: as ``seal``.
            LockedError: a file in it is open for writing.
        """
        name = dataset_name_bytes(seal.name)
        self.settle()
        uuid = uuid4()
        directory = self._area.take(name, uuid, seal.owner)
        try:
            with closing(self._source(seal, directory, SealOptions(links="skip"))):
                pass  # no file is open for writing
        except (DlfsError, OSError, MemoryError):
            self._area.put_back(uuid)
            raise
        finally:
            os.close(directory)
        self._area.remove(uuid)
        self._errors.pop(name, None)
        _log.info("incoming: %r was discarded", display(name))

    def note_error(self, name: bytes, status: SealStatus) -> None:
        """Remember why a dataset was not sealed, for ``datasets``, as long as it is there."""
        names = set(self._area.names())
        self._errors[name] = status
        self._errors = {
            each: status
            for each, status in self._errors.items()
            if each in names or status.state == UNDECIDED
        }

    def datasets(self, owner: int | None, under_way: dict[bytes, Seal]) -> list[StagedDataset]:
        """Return the datasets that a user may seal; walks over all their files.

        Args:
            owner: user whose datasets are listed; None: all are.
            under_way: the requests that are waiting or running, by name.
        """
        found = []
        for name in sorted({*self._area.names(), *under_way, *self._errors}):
            request = under_way.get(name)
            status = request.status if request else self._errors.get(name, SealStatus(OPEN))
            try:
                if owner is not None and self._area.owner(name) != owner:
                    continue
                contents = self._area.contents(name)
            except FileNotFoundError:
                if owner is not None or status.state == OPEN:
                    continue  # it was sealed or renamed meanwhile
                contents = StagedContents(status.samples_total or 0, status.bytes_total or 0, 0.0)
            found.append(StagedDataset(os.fsdecode(name), contents, status))
        return found

    # ---- inside ----------------------------------------------------------------------------------

    def _import_or_undo(self, seal: Seal, uuid: UUID, directory: int) -> SealStatus:
        try:
            report = self._import(seal, uuid, directory)
        except (DlfsError, OSError, MemoryError) as error:
            info = self._find(uuid, error)
            if info is not None:
                return _sealed_status(info)
            try:
                self._area.put_back(uuid)
            except ExistsError as conflict:
                raise ExistsError(f"{error}; {conflict}") from error
            raise
        return replace(
            _sealed_status(report.dataset),
            seconds=report.seconds,
            skipped=dict(report.skipped),
            empty_directories=report.empty_directories,
        )

    def _import(self, seal: Seal, uuid: UUID, directory: int) -> ImportReport:
        with closing(self._source(seal, directory, seal.options)) as source:
            return import_dataset(
                self._volume,
                source,
                display(seal.name),
                layout=seal.options.layout,
                seed=seal.options.seed,
                uuid=uuid,
                allow_empty=seal.options.allow_empty,
                step_bytes=None,
                progress=lambda progress: self._report_progress(seal, progress),
            )

    def _source(self, seal: Seal, directory: int, options: SealOptions) -> StagedSource:
        return StagedSource(display(seal.name), directory, links=options.links, owner=seal.owner)

    def _report_progress(self, seal: Seal, progress: Progress) -> None:
        seal.status = SealStatus(
            SEALING,
            samples_done=progress.samples_done,
            samples_total=progress.samples_total,
            bytes_done=progress.bytes_done,
            bytes_total=progress.bytes_total,
            seconds=progress.seconds,
        )
        if self._ending:
            raise ClosedError(f"seal {display(seal.name)!r}: the mount was ended")

    def _find(self, uuid: UUID, cause: Exception) -> DatasetInfo | None:
        """Return the dataset of a UUID, or None if the volume has no such dataset.

        Raises:
            UndecidedError: the volume cannot be read.
        """
        try:
            self._volume.refresh()
            return next((info for info in self._volume.datasets() if info.uuid == uuid), None)
        except (DlfsError, OSError) as error:
            raise UndecidedError(
                f"{cause}; it is unknown whether the dataset was sealed: {error}; seal again, or "
                "mount again, when the volume can be read"
            ) from error


def failed_status(error: Exception) -> SealStatus:
    """Return the final status of a request that failed."""
    if isinstance(error, UndecidedError):
        return SealStatus(UNDECIDED, str(error), DeviceError.__name__, error.errno or 0)
    if isinstance(error, OSError) and not isinstance(error, DlfsError):
        error = write_error(str(error), error.errno or 0)
    kind = type(error).__name__ if isinstance(error, DlfsError) else None
    code = error.errno if isinstance(error, OSError) else None
    return SealStatus(OPEN, str(error) or type(error).__name__, kind, code or 0)


def busy(name: bytes, action: str) -> LockedError:
    """Return the error of a request for a dataset that is being sealed."""
    return LockedError(f"{action} {display(name)!r}: it is being sealed")


def _sealed_status(info: DatasetInfo) -> SealStatus:
    return SealStatus(
        SEALED,
        samples_done=info.sample_count,
        samples_total=info.sample_count,
        bytes_done=info.sample_bytes,
        bytes_total=info.sample_bytes,
        version=info.version,
    )
