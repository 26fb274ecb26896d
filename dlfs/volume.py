"""A volume: what datasets it holds, writing new ones, removing old ones, checking all of it.

A ``Volume`` sees the generation it was opened at until ``refresh``, or until a write of its own. It
holds its devices read-only; a writer opens them again, for itself. In a forked child it opens
itself anew on first use. Any thread may use it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self
from uuid import UUID

from dlfs.arguments import Engine, Layout
from dlfs.connection import (
    NO_DATASETS,
    Connection,
    DatasetIdentity,
    LocalConnection,
    LocalVolume,
    OpenOptions,
    VolumeSession,
    no_such_dataset,
)
from dlfs.dataset import Dataset
from dlfs.errors import ClosedError, NotFoundError, UsageError
from dlfs.forks import OwnerProcess
from dlfs.format.catalog import DatasetRecord
from dlfs.format.names import DatasetName, dataset_name_bytes, new_dataset_name, parse_dataset
from dlfs.format.paths import display
from dlfs.store.info import DatasetInfo, MemberInfo, VolumeInfo, describe_dataset
from dlfs.store.members import split_uris
from dlfs.store.transaction import Generation, Transaction, check_writable
from dlfs.units import parse_bytes
from dlfs.verification import Finding, verify_volume
from dlfs.wording import list_names
from dlfs.writer import DatasetDescription, DatasetWriter

MEMORY_VARIABLE = "DLFS_MEMORY"
"""Environment variable with the default of ``memory_bytes``."""


def open(
    members: str | Sequence[str],
    *,
    memory_bytes: int | None = None,
    depth: int = 128,
    engine: Engine = "auto",
) -> Volume:
    """Open a volume.

    A volume with replicas is opened for reading although members are missing or degraded, as long
    as fewer are than there are copies; ``members`` of the result and the log ``dlfs`` say which.

    Args:
        members: URIs of its members, in any order; or one text with commas between them. A
            discovery controller's stands for all of them that it lists.
        memory_bytes: budget of each open dataset in each process, in bytes: samples that are
            cached, read ahead and lent to batches; at least four chunks. By default the
            environment variable DLFS_MEMORY, such as ``1GiB``, or 256 MiB. ``Volume`` says what a
            training script takes in all.
        depth: operations in flight per member and thread, 1..4096.
        engine: of file devices: ``auto`` (io_uring where the kernel allows it), ``uring``,
            ``threads``.

    Raises:
        NotFoundError: a device is missing, or a member.
        UsageError: a member is foreign, or given twice.
        FormatError: a device holds no volume, or it is damaged.
        DeviceError: a device cannot be read.
    """
    if memory_bytes is None:
        memory_bytes = _default_memory_bytes()
    options = OpenOptions(memory_bytes=memory_bytes, depth=depth, engine=engine)
    return Volume(LocalConnection(split_uris(members), options))


def _default_memory_bytes() -> int:
    text = os.environ.get(MEMORY_VARIABLE)
    if not text:
        return OpenOptions().memory_bytes
    try:
        return parse_bytes(text)
    except UsageError as error:
        raise UsageError(f"read the environment variable {MEMORY_VARIABLE}: {error}") from error


class Volume:
    """An open volume. A context manager; ``dlfs.open`` makes one.

    Memory: each ``Dataset`` object has a budget of ``memory_bytes`` for samples in each process
    that reads from it, taken as it fills, and given back when it is closed. A training script with
    D datasets and W worker processes takes up to D * W * ``memory_bytes``: 2 GiB for two datasets,
    four workers and the default of 256 MiB. A training process that reads from them itself, too,
    takes D * ``memory_bytes`` more. The same dataset opened twice has two budgets. Processes of
    one machine share the sample directories, which are not part of a budget. Behind
    ``dlfs.connect`` all clients share the memory of the service (``dlfs serve --cache``).

    What an epoch has read stays in that memory for later epochs, of ``Dataset.batches`` and of what
    is built on it: single samples, or whole chunks where an epoch takes them whole. Of an epoch
    that takes n bytes (of all ranks together, each sample once):

    - With memory for all of it, later epochs read nothing. A cached sample takes 12 bytes more than
      its own and up to 43 in an index (at least 16 KiB); at most one sample in 33 is lost at the
      ends of the pieces of memory that samples are packed in, or in small memories five. Each
      stream, one for every ``batches`` under way, needs four chunks and two of its largest samples
      besides.
    - With memory for less, each later epoch reads less by the share (memory - reserve) / n of what
      it would read without. A stream's reserve is what it needs above, and room for batches and
      reads under way for the samples that are not cached: as many batches as the consumer holds at
      a time (at least two), or reads for twice ``depth``, at most an eighth of the memory. With
      ``shuffle="chunk"`` it is the window's chunks that are not cached, and chunks read ahead (8
      MiB, or an eighth of the memory). More memory never reads more, within a few chunks, in the
      second epoch and later; the first one may read up to a quarter more where the memory takes the
      whole dataset, for it then reads whole chunks.
    - Two samples nearer than 16 KiB are read by one request, with what lies between them: it counts
      as taken by the epoch.
    - Samples below 2 KiB in a global order of the whole dataset are read by whole chunks where that
      costs less than one request each. With memory for a share s of the data an epoch then reads
      several times the data: up to 1.6 / s times below s = 0.5, up to 9 * (1 - s) times above
      (measured with 512 bytes). This falls with memory, too, but exceeds (1 - s).
    - Draws with ``weights`` differ from epoch to epoch, and so do a rank's samples where each rank
      has a memory of its own: with memory for all that any rank may draw, each sample is read once.
    - After another ``where``, the new selection replaces what the old one left within about three
      epochs. Memory of which three quarters are still in use stays as it is.

    Args:
        connection: what opens it.

    Raises:
        DlfsError: as ``dlfs.open``.

    Threads: any at once; ``close`` by one.
    """

    def __init__(self, connection: Connection) -> None:
        self._mutex = threading.Lock()
        self._closed = False
        self._owner = OwnerProcess()
        self._access: VolumeSession | None = connection.open_volume()
        self._connection = self._access.connection

    def __repr__(self) -> str:
        access = self._access
        label = f" {access.superblock.label!r}" if access and access.superblock.label else ""
        state = ", closed" if self._closed else ""
        way = "through" if self.uri.startswith("unix:") else "on"
        return f"<Volume{label} {way} {self.uri}{state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Volume, (self._connection,)

    # ---- opening ---------------------------------------------------------------------------------

    def _opened(self) -> VolumeSession:
        access = self._access
        if self._closed:
            raise ClosedError(f"use volume {self.uri}: it is closed")
        if access is not None and self._owner.is_current():
            return access
        return self._reopen()

    def _reopen(self) -> VolumeSession:
        """In a forked child: open anew; the parent's handles stay as they are."""
        self._mutex = threading.Lock()
        self._inherited = self._access
        self._access = self._connection.open_volume()
        self._owner = OwnerProcess()
        return self._access

    def refresh(self) -> None:
        """See the newest generation, and members that are back; open datasets stay as they are.

        Raises:
            DlfsError: as ``dlfs.open``.
        """
        access = self._opened()  # in a forked child, with a lock of its own
        with self._mutex:
            access.refresh()

    @property
    def access(self) -> VolumeSession:
        """What this object stands on, in this process: for a service of the volume."""
        return self._opened()

    def close(self) -> None:
        """Close the devices. Idempotent; datasets that were opened stay open."""
        access, self._access = self._access, None
        self._closed = True
        if access is not None and self._owner.is_current():
            access.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- what it is ------------------------------------------------------------------------------

    @property
    def uri(self) -> str:
        """What opens the volume again: the members' URIs, with commas between."""
        return self._connection.uri

    @property
    def uuid(self) -> UUID:
        """Of the volume."""
        return self._opened().superblock.volume_uuid

    @property
    def label(self) -> str:
        """For people."""
        return self._opened().superblock.label

    @property
    def generation(self) -> int:
        """The generation that this object sees."""
        return self._opened().superblock.generation

    @property
    def members(self) -> tuple[MemberInfo, ...]:
        """In order of their numbers."""
        return self.info().members

    @property
    def chunk_bytes(self) -> int:
        """The unit of layout."""
        return self._opened().superblock.geometry.chunk_bytes

    @property
    def capacity_bytes(self) -> int:
        """Of all chunks."""
        return self._opened().superblock.geometry.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """Of the chunks that nothing holds."""
        return self._opened().catalog.free_chunks * self.chunk_bytes

    def info(self) -> VolumeInfo:
        """All of it, with the state of every superblock copy as found at opening."""
        return self._opened().describe()

    # ---- datasets --------------------------------------------------------------------------------

    def datasets(self) -> list[DatasetInfo]:
        """All versions of all datasets, by name and version."""
        access = self._opened()
        return [describe_dataset(r, access.superblock.geometry) for r in access.catalog.datasets]

    def dataset(self, name: str | bytes | None = None, version: int | None = None) -> Dataset:
        """Open a dataset.

        Args:
            name: the dataset, or ``NAME@VERSION``; may be left out when there is only one name.
            version: the newest by default; with it, ``name`` is the name alone.

        Raises:
            NotFoundError: there is no such dataset or version.
            UsageError: no name was given, and there are several.
            StaleError: it was removed since this volume was opened or refreshed.
            FormatError: its directory is damaged.
        """
        record = self._find(name, version)[-1]
        return Dataset(self._connection, DatasetIdentity.of(record, self.uuid)).open()

    def __getitem__(self, name: str | bytes) -> Dataset:
        """Open the newest version of a dataset, or that of ``NAME@VERSION``; see ``dataset``."""
        return self.dataset(name)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str | bytes):
            return False
        return bool(self._matching(self._parsed(name)))

    def versions(self, name: str | bytes) -> list[DatasetInfo]:
        """The versions of a dataset, by number; of ``NAME@VERSION`` only that one.

        Raises:
            NotFoundError: there is no such dataset or version.
            UsageError: the name can be no dataset's.
        """
        geometry = self._opened().superblock.geometry
        return [describe_dataset(record, geometry) for record in self._find(name, None)]

    def _wanted(self, name: str | bytes, version: int | None) -> DatasetName:
        """Read a name, which may carry its version where none is given beside it."""
        if version is None:
            wanted = self._parsed(name)
            name, version = wanted.name, wanted.version
        return DatasetName(dataset_name_bytes(name), version)

    def _parsed(self, name: str | bytes) -> DatasetName:
        return parse_dataset(name, {record.name for record in self._opened().catalog.datasets})

    def _matching(self, wanted: DatasetName) -> list[DatasetRecord]:
        """The versions that a name means, in order; may be none."""
        return [record for record in self._opened().catalog.datasets if _is_meant(record, wanted)]

    def _find(self, name: str | bytes | None, version: int | None) -> list[DatasetRecord]:
        """The versions of a dataset that are meant, in order; at least one."""
        records = self._opened().catalog.datasets
        if name is None:
            names = {record.name for record in records}
            if len(names) > 1:
                raise UsageError(
                    f"open a dataset of {self.uri}: expected a name, one of: "
                    f"{list_names(map(display, names))}"
                )
            raw = next(iter(names), None)
            if raw is None:
                raise NotFoundError(f"find a dataset on {self.uri}: {NO_DATASETS}")
            wanted = DatasetName(raw, version)
        else:
            wanted = self._wanted(name, version)
        found = self._matching(wanted)
        if not found:
            raise no_such_dataset(records, wanted.name, wanted.version, where=self.uri)
        return found

    # ---- changes ---------------------------------------------------------------------------------

    def writer(
        self,
        name: str | bytes,
        *,
        layout: Layout = "shuffled",
        seed: int = 0,
        source_shuffled: bool = False,
        expected_bytes: int = 0,
        expected_samples: int = 0,
        stage_bytes: int | None = None,
        uuid: UUID | None = None,
    ) -> DatasetWriter:
        """Start a new version of a dataset; the volume is locked until the writer ends.

        Its number is above every version that the volume has or had of this name, so that
        ``NAME@VERSION`` never means other samples again.

        Args:
            name: of the dataset; an existing one gets a new version, the old ones stay. 1 to 244
                bytes of UTF-8 without ``/``, ``@`` and control characters, no space at either end,
                no ``-`` at the beginning, and not ``.``, ``..`` or ``incoming``.
            layout: ``shuffled``: packed in an order permuted by the seed; ``path``: as they are
                added, which should be in path order. The index of a sample does not depend on it.
            seed: of the shuffled order, 64 bits.
            source_shuffled: samples are added in a shuffled order already; nothing is held back.
            expected_bytes: sum of the samples' lengths, if known: space is checked now.
            expected_samples: likewise their number.
            stage_bytes: how much is held back to be shuffled; 256 MiB by default.
            uuid: of the new version, for who must know it before it is sealed; random by default.

        Raises:
            LockedError: another writer holds the volume; the message names it.
            SpaceError: what is expected does not fit.
            UsageError: the name or another argument is not allowed.
            DeviceError: a device cannot be written.
        """
        raw = new_dataset_name(name)
        transaction = self._transaction(f"dlfs writing dataset {display(raw)!r}")
        try:
            description = DatasetDescription(
                name=raw,
                version=transaction.next_version(raw),
                layout=layout,
                seed=seed,
                source_shuffled=source_shuffled,
            )
            return DatasetWriter(
                transaction,
                description,
                expected_bytes=expected_bytes,
                expected_samples=expected_samples,
                stage_bytes=stage_bytes,
                uuid=uuid,
                on_end=self._written,
            )
        except BaseException:
            transaction.close()
            raise

    def _written(self, generation: Generation | None) -> None:
        if generation is not None and not self._closed:
            self.refresh()

    def remove(self, name: str | bytes, version: int | None = None) -> None:
        """Remove a dataset. Its space is free for later writers; readers of it get StaleError then.

        Args:
            name: the dataset, or ``NAME@VERSION``.
            version: the one to remove; all by default.

        Raises:
            NotFoundError: there is no such dataset or version.
            LockedError: a writer holds the volume; the message names it.
            DeviceError: a device failed.
        """
        self.refresh()
        self._find(name, version)
        wanted = self._wanted(name, version)
        with self._transaction(f"dlfs removing dataset {wanted}") as transaction:
            records = transaction.base.catalog.datasets
            transaction.commit([record for record in records if not _is_meant(record, wanted)])
        self.refresh()

    def check_writable(self) -> None:
        """Check that a writer could open the volume now; takes no lock and writes nothing.

        Raises:
            UsageError: it was opened through a service, or this code may only read it.
            DegradedError: a member is missing, stale or cannot be opened for writing.
            DeviceError: no member can be opened for writing.
        """
        connection = self._local("write to").connection
        check_writable(
            connection.uris,
            volume_uuid=self.uuid,
            engine=connection.options.engine,
            opener=connection.options.opener,
        )

    def _transaction(self, holder: str) -> Transaction:
        connection = self._local("change").connection
        return Transaction(
            connection.uris,
            volume_uuid=self.uuid,
            holder=holder,
            engine=connection.options.engine,
            opener=connection.options.opener,
        )

    def _local(self, action: str) -> LocalVolume:
        """The devices, for what needs them.

        Raises:
            UsageError: they are not this process's.
        """
        access = self._opened()
        if not isinstance(access, LocalVolume):
            members = ",".join(member.uri for member in self.members)
            why = (
                "a service is read-only"
                if action == "change"
                else "this reads the devices themselves"
            )
            raise UsageError(
                f"{action} volume {self.label or self.uuid} through {self.uri}: {why}; open the "
                f"volume itself: {members}"
            )
        return access

    # ---- checking --------------------------------------------------------------------------------

    def verify(
        self,
        name: str | bytes | None = None,
        version: int | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[Finding]:
        """Check superblocks, catalog, directories and every sample, as they are on media now.

        Args:
            name: of one dataset, or ``NAME@VERSION``; all by default.
            version: of that dataset; all by default.
            progress: told bytes done and bytes in all, as it goes.

        Yields:
            What is wrong, as it is found. Nothing: all is well.

        Raises:
            NotFoundError: there is no such dataset.
            DlfsError: as ``refresh``.
        """
        self.refresh()
        access = self._local("verify")
        records = list(access.catalog.datasets) if name is None else self._find(name, version)
        return verify_volume(access.generation, records, progress or (lambda _done, _total: None))


def _is_meant(record: DatasetRecord, wanted: DatasetName) -> bool:
    return record.name == wanted.name and wanted.version in (None, record.version)
