"""``Volume``: lists, opens, writes, removes and verifies the datasets of a volume.

A ``Volume`` sees the generation at which it was opened, until ``refresh`` or a write of its own. It
has its devices open for reading; a writer opens them again. In a forked child it opens another
session on first use.

What only one method needs, such as the verification, is loaded by its first call: it took a tenth
of the time of opening a volume in a new process.

Threads: any at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, cast
from uuid import UUID

from dlfs.base.arguments import (
    ENGINES,
    Engine,
    Layout,
    check_choice,
    check_integer,
    check_keywords,
)
from dlfs.base.closing import Closing
from dlfs.base.forks import Lock, OwnerProcess
from dlfs.base.memory_limit import opened_memory_bytes
from dlfs.base.wording import list_names, quote
from dlfs.block import open_device
from dlfs.connection.connection import (
    Connection,
    LocalConnection,
    LocalVolume,
    OpenOptions,
    VolumeSession,
)
from dlfs.connection.identity import DatasetIdentity
from dlfs.dataset.dataset import Dataset
from dlfs.dataset.keywords import WriterKeywords
from dlfs.dataset.writer import DatasetWriter
from dlfs.errors import ClosedError, NotFoundError, StaleError, UsageError
from dlfs.format.catalog import Catalog, Records
from dlfs.format.names import DatasetName, dataset_name_bytes, new_dataset_name, parse_dataset
from dlfs.format.paths import display
from dlfs.store.fencing import end_import
from dlfs.store.info import (
    DatasetInfo,
    MemberInfo,
    UnfinishedInfo,
    VolumeInfo,
    describe_datasets,
    describe_unfinished,
    free_bytes,
)
from dlfs.store.members import Members, split_uris
from dlfs.store.records import NO_DATASETS, no_such_dataset
from dlfs.store.renaming import rename_records
from dlfs.store.transaction import Generation, Transaction, after_commit, check_writable
from dlfs.volume.imports import step_arguments

if TYPE_CHECKING:
    from dlfs.dataset.arriving import ArrivingDataset
    from dlfs.dataset.parts_writer import PartsWriter
    from dlfs.dataset.step_writer import StepWriter
    from dlfs.store.balancing import RebalanceReport
    from dlfs.store.shrinking import ShrinkReport
    from dlfs.store.usage import VolumeUsage
    from dlfs.volume.verification import Finding


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
            control group's limit, or the machine's memory). docs/performance.md says how it is
            shared.
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


class Volume(Closing):
    """An open volume. A context manager; ``dlfs.open`` makes one.

    The datasets of the volume, their choices of fields and their views share ``memory_bytes`` of
    sample memory in each process; with ``dlfs.connect``, all clients share the memory of the
    service. docs/performance.md says what stays in it from epoch to epoch.

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
        from dlfs.store.usage import measure_usage

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
        fields: Mapping[str, str] | None = None,
        **options: Unpack[WriterKeywords],
    ) -> DatasetWriter:
        """Start a new version of a dataset. The volume is locked until the writer ends.

        The number of the version is above every version that the volume has or had of this name.
        ``NAME@VERSION`` therefore never means other samples.

        Args:
            name: name of the dataset; an existing dataset gets a new version, the old ones stay. 1
                to 244 bytes of UTF-8 without ``/``, ``@`` and control characters, no space at
                either end, no ``-`` at the beginning, and not ``.``, ``..`` or ``incoming``.
            layout: ``shuffled``: samples are packed in an order permuted by the seed, within each
                ``stage_bytes`` of them: only imports and ``step_writer`` shuffle more than that as
                a whole. ``path``: in the order of the calls, which should be path order. Sample
                indices do not depend on it.
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
        check_keywords(Volume.writer, WriterKeywords, options)
        raw = new_dataset_name(name)
        with self._writing(f"dlfs writing dataset {display(raw)!r}") as transaction:
            return DatasetWriter(
                transaction,
                raw,
                transaction.next_version(raw),
                layout=layout,
                fields=fields,
                on_end=self._written,
                **options,
            )

    def append(
        self,
        name: str | bytes,
        *,
        layout: Layout | None = None,
        **options: Unpack[WriterKeywords],
    ) -> DatasetWriter:
        """Start a new version of a dataset that has all samples of an earlier version as well.

        The samples of the earlier version, which stays, are not copied: both versions use the same
        chunks, which become free when the last of them is removed. The directory is written anew.

        Args:
            name: name of the dataset, to append to its newest version, or ``NAME@VERSION``.
            layout: as in ``writer``, for the new samples; by default that of the earlier version.
            options: as in ``writer``: ``seed``, ``source_shuffled``, ``expected_bytes``,
                ``expected_samples`` and ``stage_bytes`` for the new samples, ``defaults`` also for
                new attributes of the earlier samples, and ``uuid``.

        Returns:
            A writer. New samples have the fields of the earlier ones; ``add`` raises ExistsError
            for a path that the earlier version has.

        Raises:
            NotFoundError: there is no such dataset or version.
            FormatError: the directory or the attributes of the earlier version are damaged.
            LockedError, SpaceError, UsageError, DeviceError: as ``writer``.
        """
        from dlfs.connection.previous_version import load_previous_version

        check_keywords(Volume.append, WriterKeywords, options)
        requested = self._parsed(name)
        raw = new_dataset_name(requested.name)
        with self._writing(f"dlfs appending to dataset {display(raw)!r}") as transaction:
            record = self._choose(transaction.base.catalog, requested)[-1]
            return DatasetWriter(
                transaction,
                raw,
                transaction.next_version(raw),
                layout=layout or cast(Layout, record.layout),
                previous=load_previous_version(transaction.base, record),
                on_end=self._written,
                **options,
            )

    def step_writer(
        self,
        name: str | bytes,
        origin: Mapping[str, Any],
        *,
        append: bool = False,
        **options: Any,
    ) -> StepWriter:
        """Start a new version of a dataset whose samples are committed in steps.

        Args:
            name: name of the dataset; see ``writer``.
            origin: describes the source; see ``StepWriter``.
            append: the version has all samples of the newest version as well; see ``append``.
            options: further arguments of ``StepWriter``.

        Raises:
            UsageError: an unfinished import of this name has another source.
            DlfsError: as ``writer``.
        """
        from dlfs.dataset.step_writer import StepWriter

        return StepWriter(**step_arguments(self, name, append=append), origin=origin, **options)

    def parts_writer(
        self, name: str | bytes, origin: Mapping[str, Any], *, append: bool = False, **options: Any
    ) -> PartsWriter:
        """Begin, or take over, a new version of a dataset that several workers import.

        Args:
            name: name of the dataset; see ``writer``.
            origin: describes the source; see ``StepWriter``.
            append: as in ``step_writer``.
            options: further arguments of ``PartsWriter``.

        Raises:
            DlfsError: as ``PartsWriter``.
        """
        from dlfs.dataset.parts_writer import PartsWriter

        return PartsWriter(**step_arguments(self, name, append=append), origin=origin, **options)

    def unfinished(self) -> list[UnfinishedInfo]:
        """List the imports that are not finished, by name."""
        session = self._opened()
        geometry = session.superblock.geometry
        return [describe_unfinished(record, geometry) for record in session.catalog.unfinished]

    def arriving(self, name: str | bytes) -> ArrivingDataset:
        """Open the samples of an import that goes on, or will; else of the newest version."""
        from dlfs.dataset.arriving import ArrivingDataset

        return ArrivingDataset(self._opened().connection, dataset_name_bytes(name))

    def abandon(self, name: str | bytes) -> UnfinishedInfo:
        """Free the space of an unfinished import.

        Args:
            name: name of the dataset that it would make.

        Raises:
            NotFoundError: there is none of this name.
            LockedError: a writer has locked the volume, or workers run this import.
            DeviceError: a device failed.
        """
        raw = dataset_name_bytes(name)
        with self._transaction(f"dlfs abandoning the import of {display(raw)!r}") as transaction:
            record, committed = end_import(transaction, raw, where=self.uri)
        self._refresh_after(committed)
        return describe_unfinished(record, transaction.geometry)

    @contextmanager
    def _writing(self, holder: str) -> Iterator[Transaction]:
        """Start a transaction for a writer, which ends it; an exception ends it here."""
        transaction = self._transaction(holder)
        try:
            yield transaction
        except BaseException:
            transaction.close()
            raise

    def remove(self, name: str | bytes, version: int | None = None) -> None:
        """Remove a dataset. Its space becomes free for writers; its readers then get StaleError.

        Args:
            name: name of the dataset, or ``NAME@VERSION``.
            version: version to remove; all by default.

        Raises:
            NotFoundError: there is no such dataset or version.
            LockedError: a writer has locked the volume; the message names it.
            DeviceError: a device failed.
        """
        requested = self._request(name, version)
        with self._transaction(f"dlfs removing dataset {requested}") as transaction:
            committed = transaction.commit(
                removed=self._choose(transaction.base.catalog, requested)
            )
        self._refresh_after(committed)

    def prune(
        self, name: str | bytes, *, keep: int, expected: Collection[UUID] | None = None
    ) -> list[DatasetInfo]:
        """Remove the older versions of a dataset, all in one commit.

        Args:
            name: name of the dataset.
            keep: number of newest versions that stay, >= 1.
            expected: UUIDs of the versions that the caller expects to be removed; if others would
                be, nothing is removed. By default any versions.

        Returns:
            The removed versions, by number; none if there are at most ``keep``.

        Raises:
            UsageError: ``keep`` is below 1, or the name is ``NAME@VERSION``.
            StaleError: other versions than the expected ones would be removed.
            NotFoundError, LockedError, DeviceError: as ``remove``.
        """
        action = f"prune dataset {quote(name)}"
        count = check_integer(keep, 1, None, option="keep", action=action)
        requested = self._request(name)
        if requested.version is not None:
            raise UsageError(f"{action}: expected the name of a dataset without a version")
        with self._transaction(f"dlfs pruning dataset {requested}") as transaction:
            committed = None
            doomed = self._choose(transaction.base.catalog, requested)[:-count]
            uuids = {record.uuid for record in doomed}
            if expected is not None and uuids != set(expected):
                versions = ", ".join(str(record.version) for record in doomed) or "none"
                raise StaleError(
                    f"{action}: its versions changed meanwhile: expected to remove others than "
                    f"these now: {versions}; nothing was removed"
                )
            if doomed:
                committed = transaction.commit(removed=doomed)
        self._refresh_after(committed)
        return describe_datasets(doomed, transaction.geometry)

    def rename(self, name: str | bytes, new_name: str | bytes) -> list[DatasetInfo]:
        """Give a dataset another name, atomically. Programs that have it open read on.

        Its versions keep their numbers, unless the new name had such a number before: then all are
        raised, because ``NAME@VERSION`` never means other samples.

        Args:
            name: name of the dataset with all its versions; ``NAME@VERSION`` renames that one.
            new_name: the new name, which no dataset has; the rules are those of ``writer``.

        Returns:
            The renamed versions, by number.

        Raises:
            ExistsError: a dataset has the new name.
            UsageError: the new name is not allowed.
            NotFoundError, LockedError, DeviceError: as ``remove``.
        """
        raw = new_dataset_name(new_name)
        requested = self._request(name)
        with self._transaction(f"dlfs renaming dataset {requested}") as transaction:
            base = transaction.base
            chosen = self._choose(transaction.base.catalog, requested)
            renamed = rename_records(base.catalog, base.superblock, chosen, raw)
            committed = transaction.commit(removed=chosen, added=renamed)
        self._refresh_after(committed)
        return self.versions(raw)

    def grow(
        self, members: Members, *, size_bytes: int | None = None, force: bool = False
    ) -> VolumeInfo:
        """Add devices to the volume, whose space new datasets then use. No data is moved.

        ``rebalance`` spreads the existing datasets over all devices.

        The devices become one group of members. Their URIs are recorded on the volume, so programs
        that are given only its earlier members find the new ones.

        Args:
            members: URIs of the new devices, at least as many as the volume has replicas, or one
                text with commas.
            size_bytes: size of each that is a new or empty file.
            force: True to overwrite data on the devices.

        Returns:
            The grown volume.

        Raises:
            ExistsError: a device holds data, and ``force`` was not given.
            UsageError: a device is a member already, or there are too few, or they are too small.
            LimitError: the volume would have more than 64 members or 20 groups of them.
            LockedError: a writer has locked the volume or a device, or workers import into it.
            SpaceError: the volume has no room for another catalog.
            DeviceError: a device failed.
        """
        from dlfs.store.growing import grow_volume

        opener = self._local("change").options.opener
        with self._transaction("dlfs grow") as transaction:
            grow_volume(transaction, members, size_bytes=size_bytes, force=force, opener=opener)
        self.refresh()
        return self.info()

    def rebalance(
        self, *, progress: Callable[[int, int], None] = lambda _done, _total: None
    ) -> RebalanceReport:
        """Move data so that each dataset lies on all devices. Readers go on.

        If this is interrupted, the volume can be read and written, and rebalancing it again
        continues. On a volume that is balanced it moves nothing.

        Args:
            progress: called with the bytes moved and the total bytes.

        Returns:
            The number of bytes that were moved.

        Raises:
            SpaceError: the devices that should get data are full; nothing was changed.
            LockedError: a writer has locked the volume.
            DeviceError: a device failed.
        """
        from dlfs.store.balancing import rebalance_volume

        with self._transaction("dlfs rebalance") as transaction:
            report = rebalance_volume(transaction, progress)
        self.refresh()
        return report

    def shrink(
        self,
        members: Sequence[int | str],
        *,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> ShrinkReport:
        """Move all data off some members, and remove them from the volume. Readers go on.

        Members leave as they came: all devices of one ``grow`` together. If this is interrupted,
        the volume can be read and written, and shrinking it again continues. Two seconds after it
        has returned, the removed devices may be detached: programs have opened the others.

        Args:
            members: numbers or URIs of members; all members of their groups are removed.
            progress: called with the bytes moved and the total bytes.

        Returns:
            The removed devices, which no longer belong to a volume.

        Raises:
            UsageError: there is no such member, or no member would be left.
            SpaceError: the data does not fit on the other members; nothing was changed.
            LockedError: a writer has locked the volume, or workers import into it.
            DeviceError: a device failed.
        """
        from dlfs.store.shrinking import shrink_volume

        chosen = [
            member if isinstance(member, int) else split_uris(member)[0] for member in members
        ]
        with self._transaction("dlfs shrink") as transaction:
            report = shrink_volume(transaction, chosen, progress)
        self.refresh()
        return report

    def _request(self, name: str | bytes, version: int | None = None) -> DatasetName:
        """Parse the name of a dataset that is to be changed, and look for the newest generation.

        Raises:
            NotFoundError: there is no such dataset or version.
        """
        self.refresh()
        self._find(name, version)
        return self._parse_request(name, version)

    def _choose(self, catalog: Catalog, requested: DatasetName) -> Records:
        """Return the records that a name refers to in the volume as it is now; at least one.

        Raises:
            NotFoundError: another writer removed or renamed them before the volume was locked.
        """
        chosen = catalog.find(requested.name, requested.version)
        if not chosen:
            raise no_such_dataset(catalog, requested.name, requested.version, where=self.uri)
        return chosen

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
        opener = connection.options.opener
        check_writable(connection.uris, volume_uuid=self.uuid, opener=opener)

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
        from dlfs.volume.verification import verify_volume

        self.refresh()
        session = self._local("verify")
        records = session.catalog.records if name is None else self._find(name, version)
        return verify_volume(session.generation, records, progress or (lambda _done, _total: None))
