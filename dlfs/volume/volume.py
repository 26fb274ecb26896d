"""``Volume``: lists, opens, writes, removes and verifies the datasets of a volume.

A ``Volume`` sees the generation at which it was opened, until ``refresh`` or a write of its own. It
has its devices open for reading; a writer opens them again. In a forked child it opens another
session on first use.

Threads: any at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from uuid import UUID

from dlfs.base.arguments import ENGINES, Engine, Layout, check_choice
from dlfs.base.closing import Closing
from dlfs.base.forks import Lock, OwnerProcess
from dlfs.base.memory_limit import opened_memory_bytes
from dlfs.base.wording import list_names
from dlfs.block import open_device
from dlfs.connection.connection import (
    Connection,
    LocalConnection,
    LocalVolume,
    OpenOptions,
    VolumeSession,
)
from dlfs.connection.identity import DatasetIdentity
from dlfs.connection.previous_version import PreviousVersion, load_previous_version
from dlfs.dataset.dataset import Dataset
from dlfs.dataset.writer import DatasetDescription, DatasetWriter
from dlfs.errors import ClosedError, NotFoundError, UsageError
from dlfs.format.catalog import Records
from dlfs.format.names import DatasetName, dataset_name_bytes, new_dataset_name, parse_dataset
from dlfs.format.paths import display
from dlfs.store.info import (
    DatasetInfo,
    MemberInfo,
    VolumeInfo,
    describe_datasets,
    free_bytes,
)
from dlfs.store.members import Members, split_uris
from dlfs.store.records import NO_DATASETS, no_such_dataset
from dlfs.store.transaction import Generation, Transaction, after_commit, check_writable
from dlfs.store.usage import VolumeUsage, measure_usage
from dlfs.volume.catalog_changes import CatalogChanges
from dlfs.volume.member_changes import MemberChanges
from dlfs.volume.verification import Finding, verify_volume


def open(
    members: Members,
    *,
    memory_bytes: int | None = None,
    depth: int = 128,
    engine: Engine = "auto",
) -> Volume:
    """Open a volume.

    A volume with replicas is opened for reading while fewer members are missing or degraded than
    there are copies. ``members`` of the result and the log ``dlfs`` name them.

    Args:
        members: URIs or paths of its members, in any order, or one text with commas between them.
            The URI of a discovery controller stands for all members that it lists.
        memory_bytes: sample memory of the volume in each process, in bytes: samples that are
            cached, read ahead and pinned by batches; at least four chunks. The workers of a
            ``DataLoader`` have equal parts of it. By default the environment variable DLFS_MEMORY,
            such as ``1GiB``; or 1 GiB, but at most an eighth of what the process may use (its
            control group's limit, or the machine's memory). ``Volume`` describes how it is shared.
        depth: operations in flight per member and thread, 1..4096.
        engine: engine for file devices: ``auto`` (io_uring if the kernel allows it), ``uring``,
            ``threads``.

    Raises:
        NotFoundError: a device or a member is missing.
        UsageError: a member is of another volume, or given twice.
        FormatError: a device has no volume, or a damaged one.
        DeviceError: a device cannot be read.
    """
    if memory_bytes is None:
        memory_bytes = opened_memory_bytes()
    check_choice(engine, ENGINES, option="engine", action="open a volume")
    opener = partial(open_device, engine=engine)
    options = OpenOptions(memory_bytes=memory_bytes, depth=depth, opener=opener)
    return Volume(LocalConnection(split_uris(members), options))


class Volume(CatalogChanges, MemberChanges, Closing):
    """An open volume. A context manager; ``dlfs.open`` makes one.

    Memory: the datasets of the volume, their choices of fields and their views share
    ``memory_bytes`` of sample memory in each process. The memory is allocated as it fills and freed
    with the last open dataset. Those that are read have equal shares of it, but none more than it
    needs; the others keep what is left. The workers of a ``DataLoader`` have equal parts of
    ``memory_bytes``; a training process that reads as well has ``memory_bytes`` more, and so has
    any other process. Batches that pin more than a share get memory of their own. Processes of one
    machine share the sample directories, which are not part of the sample memory. With
    ``dlfs.connect``, all clients share the memory of the service (``dlfs serve --cache``).

    Samples that an epoch has read stay in that memory for later epochs of ``Dataset.batches``:
    single samples, or whole chunks if the epoch needs whole chunks. For an epoch of n bytes (of all
    ranks together, each sample once):

    - With memory for all of it, later epochs read nothing. Of 64 MiB and more, the kernel may be
      slow to provide the memory. The first epoch does not wait for that, but reads samples by
      themselves, and the next one reads their chunks. A cached sample takes 12 bytes in
      addition to its own and up to 43 in an index (at least 16 KiB). At most one sample in 33 is
      lost at the ends of the memory blocks in which samples are packed, or five in small memories.
      Each stream, one for every ``batches`` in progress, needs four chunks and two of its largest
      samples in addition.
    - With less memory, each later epoch reads less by the share (memory - reserve) / n of what it
      would read without. The reserve of a stream is its need above, and space for the batches and
      reads in progress of samples that are not cached: as many batches as the consumer has at a
      time (at least two), or reads for twice ``depth``, at most an eighth of the memory. With
      ``shuffle="chunk"`` it is the chunks of the window that are not cached, and chunks read ahead
      (8 MiB, or an eighth of the memory). In the second epoch and later, more memory never reads
      more, within a few chunks. The first epoch may read up to a quarter more if the memory holds
      the whole dataset, because it then reads whole chunks.
    - Two samples nearer than 16 KiB are read by one request, with the bytes between them, which
      count as part of the epoch.
    - Samples below 2 KiB in a global order of the whole dataset are read by whole chunks if that
      costs less than one request each. With memory for a share s of the data, an epoch then reads
      several times the data: up to 1.6 / s times below s = 0.5, up to 9 * (1 - s) times above
      (measured with 512 bytes). This falls with memory, too, but exceeds (1 - s).
    - Draws with ``weights`` differ from epoch to epoch, and so do the samples of a rank if each
      rank has a memory of its own. With memory for all samples that any rank may draw, each is read
      once.
    - After another ``where``, the new selection replaces the old one in the memory within about
      three epochs. Memory of which three quarters are still in use is not replaced.

    Args:
        connection: opens the sessions of this volume.

    Raises:
        DlfsError: as ``dlfs.open``.

    Threads: any at once; ``close`` by one.
    """

    def __init__(self, connection: Connection) -> None:
        self._mutex = Lock()
        self._closed = False
        self._owner = OwnerProcess()
        self._inherited: VolumeSession | None = None
        self._session: VolumeSession | None = connection.open_volume()
        self._connection = self._session.connection

    def __repr__(self) -> str:
        session = self._session
        label = f" {session.superblock.label!r}" if session and session.superblock.label else ""
        state = ", closed" if self._closed else ""
        way = "through" if self.uri.startswith("unix:") else "on"
        return f"<Volume{label} {way} {self.uri}{state}>"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows: space, datasets and members."""
        from dlfs.notebook import show_volume

        return show_volume(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Volume, (self._connection,)

    # ---- opening ---------------------------------------------------------------------------------

    def _opened(self) -> VolumeSession:
        owner = self._owner  # read first: in a child, a parent's session is gone before it changes
        session = self._session
        if session is not None and owner.is_current():
            return session
        with self._mutex:
            if not self._owner.is_current():  # the parent's handles stay as they are
                self._inherited, self._session = self._session, None
                self._owner = OwnerProcess()
            if self._session is None and not self._closed:
                self._session = self._connection.open_volume()
            if self._closed:  # perhaps by another thread, which did not see this session
                self.close()
            session = self._session
        if session is None:
            raise ClosedError(f"use volume {self.uri}: it is closed")
        return session

    def refresh(self) -> None:
        """See the newest generation and returned members; open datasets do not change.

        Raises:
            DlfsError: as ``dlfs.open``.
        """
        session = self._opened()
        with self._mutex:
            session.refresh()
            self._connection = session.connection  # members may have come and gone

    @property
    def session(self) -> VolumeSession:
        """Session of this process, with its open devices and catalog."""
        return self._opened()

    def close(self) -> None:
        """Close the devices. Idempotent. Datasets that were opened stay open."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None and self._owner.is_current():
            session.close()

    # ---- properties ------------------------------------------------------------------------------

    @property
    def uri(self) -> str:
        """URI that opens the volume again: the members' URIs, with commas between."""
        return self._connection.uri

    @property
    def uuid(self) -> UUID:
        """UUID of the volume."""
        return self._opened().superblock.volume_uuid

    @property
    def label(self) -> str:
        """Human-readable name given when the volume was formatted; may be empty."""
        return self._opened().superblock.label

    @property
    def generation(self) -> int:
        """Generation that this object sees."""
        return self._opened().superblock.generation

    @property
    def members(self) -> tuple[MemberInfo, ...]:
        """Members of the volume, by number."""
        return self.info().members

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk, the unit of layout, in bytes."""
        return self._opened().superblock.geometry.chunk_bytes

    @property
    def capacity_bytes(self) -> int:
        """Size of all chunks, in bytes."""
        return self._opened().superblock.geometry.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """Size of the unused chunks, in bytes."""
        session = self._opened()
        return free_bytes(session.superblock.geometry, session.catalog)

    def info(self) -> VolumeInfo:
        """Describe the volume, with the state of every superblock copy as found at opening."""
        return self._opened().describe()

    # ---- datasets --------------------------------------------------------------------------------

    def datasets(self) -> list[DatasetInfo]:
        """List all versions of all datasets, by name and version."""
        session = self._opened()
        return describe_datasets(session.catalog.datasets, session.superblock.geometry)

    def dataset(self, name: str | bytes | None = None, version: int | None = None) -> Dataset:
        """Open a dataset.

        Args:
            name: name of the dataset, or ``NAME@VERSION``; optional if the volume has only one
                name.
            version: version to open, with a plain ``name``; by default the newest.

        Raises:
            NotFoundError: there is no such dataset or version.
            UsageError: no name was given, and there are several.
            StaleError: it was removed since this volume was opened or refreshed.
            FormatError: its directory is damaged.
        """
        record = self._find(name, version)[-1]
        return Dataset(self._connection, DatasetIdentity.of(record, self.uuid)).open()

    def __getitem__(self, name: str | bytes) -> Dataset:
        """Open the newest version of a dataset, or that of ``NAME@VERSION``."""
        return self.dataset(name)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str | bytes):
            return False
        requested = self._parsed(name)
        return bool(self._opened().catalog.find(requested.name, requested.version))

    def versions(self, name: str | bytes) -> list[DatasetInfo]:
        """List the versions of a dataset, by number; for ``NAME@VERSION`` only that one.

        Raises:
            NotFoundError: there is no such dataset or version.
            UsageError: the name is not allowed for a dataset.
        """
        geometry = self._opened().superblock.geometry
        return describe_datasets(self._find(name, None), geometry)

    def usage(self, name: str | bytes | None = None) -> VolumeUsage:
        """Return the space that datasets take: samples, chunks, replicas. No sample is read.

        Args:
            name: name of a dataset, or ``NAME@VERSION``; all datasets by default.

        Raises:
            NotFoundError: there is no such dataset or version.
        """
        session = self._opened()
        chosen = session.catalog.datasets if name is None else self._find(name, None)
        return measure_usage(session.superblock, chosen)

    def _parse_request(self, name: str | bytes, version: int | None) -> DatasetName:
        """Parse a name, which may contain a version if none is given separately."""
        if version is None:
            requested = self._parsed(name)
            name, version = requested.name, requested.version
        return DatasetName(dataset_name_bytes(name), version)

    def _parsed(self, name: str | bytes) -> DatasetName:
        return parse_dataset(name, self._opened().catalog)

    def _find(self, name: str | bytes | None, version: int | None) -> Records:
        """Return the records of a dataset, by version; at least one."""
        catalog = self._opened().catalog
        if name is None:
            names = catalog.dataset_names()
            if len(names) > 1:
                raise UsageError(
                    f"open a dataset of {self.uri}: expected a name, one of: "
                    f"{list_names(map(display, names))}"
                )
            if not names:
                raise NotFoundError(f"find a dataset on {self.uri}: {NO_DATASETS}")
            requested = DatasetName(names[0], version)
        else:
            requested = self._parse_request(name, version)
        found = catalog.find(requested.name, requested.version)
        if not found:
            raise no_such_dataset(catalog, requested.name, requested.version, where=self.uri)
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
        fields: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
        uuid: UUID | None = None,
    ) -> DatasetWriter:
        """Start a new version of a dataset. The volume is locked until the writer ends.

        The number of the version is above every version that the volume has or had of this name.
        ``NAME@VERSION`` therefore never means other samples.

        Args:
            name: name of the dataset; an existing dataset gets a new version, the old ones stay. 1
                to 244 bytes of UTF-8 without ``/``, ``@`` and control characters, no space at
                either end, no ``-`` at the beginning, and not ``.``, ``..`` or ``incoming``.
            layout: ``shuffled``: samples are packed in an order permuted by the seed; ``path``: in
                the order of the calls, which should be path order. Sample indices do not depend on
                it.
            seed: seed of the shuffled order, 64 bits.
            source_shuffled: True if samples are added in a shuffled order already; none is
                buffered.
            expected_bytes: sum of the samples' lengths, if known: free space is checked now.
            expected_samples: number of samples, if known: free space is checked now.
            stage_bytes: size of the buffer in which samples are shuffled; 256 MiB by default.
            fields: type of each field of the samples by name: ``bytes``, ``text``, or an array as
                ``<f4[?,128,3]`` or ``<i8[]``. By default the first sample determines the types.
            defaults: value of each attribute for samples that are added without it.
            uuid: UUID of the new version, for callers that need it before the seal; random by
                default.

        Raises:
            LockedError: another writer has locked the volume; the message names it.
            SpaceError: the expected samples do not fit.
            UsageError: the name or another argument is not allowed.
            DeviceError: a device cannot be written.
        """
        raw = new_dataset_name(name)
        with self._writing(f"dlfs writing dataset {display(raw)!r}") as transaction:
            return self._make_writer(
                transaction,
                raw,
                layout=layout,
                seed=seed,
                source_shuffled=source_shuffled,
                expected_bytes=expected_bytes,
                expected_samples=expected_samples,
                stage_bytes=stage_bytes,
                fields=fields,
                defaults=defaults,
                uuid=uuid,
            )

    def append(
        self,
        name: str | bytes,
        *,
        layout: Layout | None = None,
        seed: int = 0,
        source_shuffled: bool = False,
        expected_bytes: int = 0,
        expected_samples: int = 0,
        stage_bytes: int | None = None,
        defaults: Mapping[str, Any] | None = None,
        uuid: UUID | None = None,
    ) -> DatasetWriter:
        """Start a new version of a dataset that has all samples of an earlier version as well.

        The samples of the earlier version, which stays, are not copied: both versions use the same
        chunks, which become free when the last of them is removed. The directory is written anew.

        Args:
            name: name of the dataset, to append to its newest version, or ``NAME@VERSION``.
            layout: as in ``writer``, for the new samples; by default that of the earlier version.
            seed: as in ``writer``.
            source_shuffled: as in ``writer``.
            expected_bytes: sum of the new samples' lengths, if known.
            expected_samples: number of new samples, if known.
            stage_bytes: as in ``writer``.
            defaults: as in ``writer``, also for new attributes of the earlier samples.
            uuid: as in ``writer``.

        Returns:
            A writer. New samples have the fields of the earlier ones; ``add`` raises ExistsError
            for a path that the earlier version has.

        Raises:
            NotFoundError: there is no such dataset or version.
            FormatError: the directory or the attributes of the earlier version are damaged.
            LockedError, SpaceError, UsageError, DeviceError: as ``writer``.
        """
        requested = self._parsed(name)
        raw = new_dataset_name(requested.name)
        with self._writing(f"dlfs appending to dataset {display(raw)!r}") as transaction:
            base = transaction.base
            records = base.catalog.find(requested.name, requested.version)
            if not records:
                raise no_such_dataset(base.catalog, raw, requested.version, where=self.uri)
            return self._make_writer(
                transaction,
                raw,
                layout=layout or cast(Layout, records[-1].layout),
                seed=seed,
                source_shuffled=source_shuffled,
                expected_bytes=expected_bytes,
                expected_samples=expected_samples,
                stage_bytes=stage_bytes,
                defaults=defaults,
                previous=load_previous_version(base, records[-1]),
                uuid=uuid,
            )

    def _make_writer(
        self,
        transaction: Transaction,
        raw: bytes,
        *,
        layout: Layout,
        seed: int,
        source_shuffled: bool,
        expected_bytes: int,
        expected_samples: int,
        stage_bytes: int | None,
        uuid: UUID | None,
        defaults: Mapping[str, Any] | None,
        fields: Mapping[str, str] | None = None,
        previous: PreviousVersion | None = None,
    ) -> DatasetWriter:
        """Return a writer of the next version of a dataset, which ends the transaction."""
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
            fields=fields,
            defaults=defaults or {},
            previous=previous,
            uuid=uuid,
            on_end=self._written,
        )

    @contextmanager
    def _writing(self, holder: str) -> Iterator[Transaction]:
        """Start a transaction for a writer, which ends it; an exception ends it here."""
        transaction = self._transaction(holder)
        try:
            yield transaction
        except BaseException:
            transaction.close()
            raise

    def _written(self, generation: Generation | None) -> None:
        if generation is not None and not self._closed:
            self._refresh_after(generation)

    def _refresh_after(self, committed: Generation | None) -> None:
        """See the newest generation; an error of this says that the change was made, if it was."""
        session = self._local("change")
        with after_commit(committed.superblock if committed else None), self._mutex:
            session.refresh(committed)
            self._connection = session.connection

    def check_writable(self) -> None:
        """Check that a writer could open the volume now, without a lock and without writing.

        Raises:
            UsageError: it was opened through a service, or this release may only read it.
            DegradedError: a member is missing, stale or cannot be opened for writing.
            DeviceError: no member can be opened for writing.
        """
        connection = self._local("write to").connection
        check_writable(
            connection.uris,
            volume_uuid=self.uuid,
            opener=connection.options.opener,
        )

    def _transaction(self, holder: str) -> Transaction:
        session = self._local("change")
        connection = session.connection
        return Transaction(
            connection.uris,
            volume_uuid=self.uuid,
            holder=holder,
            known=session.generation,
            opener=connection.options.opener,
        )

    def _local(self, action: str) -> LocalVolume:
        """Return the session with the devices, for operations that need them.

        Raises:
            UsageError: the volume was opened through a service.
        """
        session = self._opened()
        if not isinstance(session, LocalVolume):
            members = ",".join(member.uri for member in self.members)
            reads = "this reads the devices themselves"
            why = "a service is read-only" if action == "change" else reads
            raise UsageError(
                f"{action} volume {self.label or self.uuid} through {self.uri}: {why}; open the "
                f"volume itself: {members}"
            )
        return session

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
            name: name of one dataset, or ``NAME@VERSION``; all by default.
            version: version of that dataset; all by default.
            progress: called with the bytes done and the total bytes.

        Yields:
            One finding for each defect; none if everything is valid.

        Raises:
            NotFoundError: there is no such dataset.
            DlfsError: as ``refresh``.
        """
        self.refresh()
        session = self._local("verify")
        records = list(session.catalog.datasets) if name is None else self._find(name, version)
        return verify_volume(session.generation, records, progress or (lambda _done, _total: None))
