"""``Dataset``: reads the samples of one sealed dataset, one by one or in the order of an epoch.

A ``Dataset`` opens a session of its own from a ``Connection``: the devices or a service, the sample
directory and the reader. It therefore outlives the ``Volume`` that made it. A session belongs to
one process. A forked child and a loaded pickle open another one on first use. They find the dataset
by its UUID and raise ``StaleError`` if it was removed. Any threads may use a dataset at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload
from uuid import UUID

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs.attributes import AttributeTable
from dlfs.base.arguments import OnError, as_integer
from dlfs.base.closing import Closing
from dlfs.base.forks import Lock, OwnerProcess
from dlfs.base.units import format_bytes, format_count
from dlfs.base.wording import quote, show_value
from dlfs.connection.connection import Connection, DatasetSession
from dlfs.connection.identity import DatasetIdentity
from dlfs.directory import (
    Entry,
    FrozenDirectory,
    as_array,
    check_indices,
    check_position,
    find_outside,
    near_paths,
)
from dlfs.epoch.options import EpochKeywords, EpochOptions, OrderKeywords, make_options
from dlfs.epoch.order import Sequence as EpochSequence
from dlfs.epoch.selection import select
from dlfs.errors import ClosedError, DlfsError, NotFoundError, UsageError
from dlfs.fields import find_fields, measure_field
from dlfs.fields.batch_fields import name_types
from dlfs.format.bad_records import BadReport, read_bad_records
from dlfs.format.digests import Digests
from dlfs.format.geometry import DataSpace
from dlfs.format.paths import PathLike
from dlfs.reader import Batch, Epoch, follow, pick_fields, read_into, read_pieces
from dlfs.store.info import DatasetInfo, SampleInfo, describe_dataset

if TYPE_CHECKING:
    import pyarrow
    from typing_extensions import Buffer

T = TypeVar("T")


class Dataset(Closing):
    """One version of a dataset, open for reading.

    Args:
        connection: opens the sessions of this dataset.
        identity: UUID, name and version of the dataset.
        shared: open dataset whose session this one uses in this process, as long as it is open.
        release: called once by ``close``, instead of closing the shared session.

    Attributes:
        uuid: UUID of this version.
        digests: digests of content and packing, which copies on other volumes have as well.
        name: name of the dataset.
        version: version of the dataset.

    Threads: any at once; ``close`` by one.
    """

    def __init__(
        self,
        connection: Connection,
        identity: DatasetIdentity,
        *,
        shared: Dataset | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        self._connection = connection
        self._identity = identity
        self._closed = False
        self._mutex = Lock()
        self._owner = OwnerProcess()
        self._shared, self._release = shared, release
        self._session: DatasetSession | None = None if shared is None else shared.session
        self._inherited: list[DatasetSession] = []
        self.uuid: UUID = identity.uuid
        self.digests: Digests = identity.digests
        self.name = identity.name
        self.version = identity.version

    def __repr__(self) -> str:
        where = f"{self.name!r} version {self.version} on {self._connection.uri}"
        if self._closed:
            return f"<Dataset {where}, closed>"
        if self._session is None:  # a loaded pickle: an attempt to open it could fail
            return f"<Dataset {where}>"
        record = self._session.record
        count = format_count(record.sample_count, "sample")
        return f"<Dataset {where}: {count}, {format_bytes(record.sample_bytes)}>"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows: thumbnails of some samples, and the columns."""
        from dlfs.notebook import show_dataset

        return show_dataset(self, lambda: self.attributes)

    def __reduce__(self) -> tuple[Any, ...]:
        return Dataset, (self._connection, self._identity)

    # ---- opening ---------------------------------------------------------------------------------

    def open(self) -> Self:
        """Open devices, directory and reader now instead of on first use.

        Raises:
            StaleError: the dataset was removed.
            FormatError: the volume or the directory is damaged.
            DeviceError: a device cannot be read.
            ClosedError: the dataset was closed.
        """
        self._opened()
        return self

    def _opened(self) -> DatasetSession:
        if self._shared is not None and not self._closed and self._owner.is_current():
            self._session = self._shared.session  # another one once the dataset was moved
        session = self.present_session
        if session is not None:
            return session
        self._check_open()
        with self._mutex:
            if not self._owner.is_current():
                self._leave_to_parent()
            session = self._session
            if session is None or session.is_lost():
                # A lost session is not closed: another thread may be in one of its calls.
                # The directory that this process or its parent has open is used on.
                known = [*self._inherited, *filter(None, [session])]
                directory = known[-1].directory if known else None
                self._session = session = self._connection.open_dataset(self._identity, directory)
                try:
                    self._check_open()
                except ClosedError:  # closed by another thread, which did not see this session
                    self._session = None
                    session.close(with_directory=not self._inherited)
                    raise
            return session

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"use dataset {self.name!r}: it is closed")

    def _follow(self, use: Callable[[DatasetSession], T]) -> T:
        """Use the session of this process; if the samples are moved meanwhile, a new one."""
        return follow(self._opened, use)

    @property
    def session(self) -> DatasetSession:
        """Session of this process: the open reader, directory and devices, for the node service."""
        return self._opened()

    @property
    def present_session(self) -> DatasetSession | None:
        """Session of this process, or None if ``session`` would have to open one."""
        owner = self._owner  # read first: in a child, a parent's session is gone before it changes
        session = self._session
        usable = session is not None and owner.is_current() and not session.is_lost()
        return session if usable else None

    def _leave_to_parent(self) -> None:
        """Set the parent's session aside in a forked child; its directory is used on."""
        if self._session is not None:
            self._inherited.append(self._session)
        self._session = None
        self._owner = OwnerProcess()

    def close(self) -> None:
        """Close devices and reader. Batches given out stay valid. Idempotent.

        An epoch in progress raises ``ClosedError`` at its next batch.
        """
        self._closed = True
        session, self._session = self._session, None
        release, self._release = self._release, None
        if release is not None:
            release()
        elif session is not None and self._shared is None and self._owner.is_current():
            session.close(with_directory=not self._inherited)

    # ---- properties ------------------------------------------------------------------------------

    @property
    def info(self) -> DatasetInfo:
        """Catalog entry of the dataset."""
        session = self._opened()
        return describe_dataset(session.record, session.geometry)

    def bad_records(self) -> BadReport:
        """Return the records that the imports of the dataset left out (``skip_bad``).

        Raises:
            FormatError: the report is malformed.
        """
        return read_bad_records(self._opened().record.tags)

    @property
    def sample_bytes(self) -> int:
        """Sum of the lengths of all samples, in bytes."""
        return self._opened().record.sample_bytes

    @property
    def directory(self) -> FrozenDirectory:
        """Sample directory: names, locations and checksums."""
        return self._opened().directory

    @property
    def attributes(self) -> AttributeTable:
        """Columns of attributes as stored; users call ``columns`` and ``column``."""
        return self._follow(lambda session: session.attributes())

    def __len__(self) -> int:
        return self._opened().record.sample_count

    # ---- samples ---------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice | ArrayLike) -> Batch: ...

    def __getitem__(self, index: int | slice | ArrayLike) -> bytes | Batch:
        """Read one sample by its index as bytes, or several samples as a ``Batch``.

        Args:
            index: an integer, negative from the end; or a slice, a list of integers, or a mask
                (``bool[n_samples]``).

        Raises:
            IndexError: there is no such sample, or the mask has another length.
            UsageError: the index has another type, such as floats, text or one bool.
            DlfsError: as ``read``.
        """
        if isinstance(index, slice):
            return self.read(np.arange(*index.indices(len(self)), dtype=np.int64))
        if _is_scalar(index):
            position = self._position(index)
            return self._follow(lambda session: session.reader.get(position))
        wanted = as_array(index, option="indices", action="read samples")
        if wanted.dtype == np.bool_:
            if wanted.shape != (len(self),):
                raise IndexError(
                    f"read samples of dataset {self.name!r}: expected a mask of {len(self)} "
                    f"samples, got one of shape {wanted.shape}"
                )
            return self.read(np.flatnonzero(wanted))
        return self._read_from_either_end(index, wanted)

    def _read_from_either_end(self, indices: ArrayLike, array: NDArray[Any]) -> Batch:
        """Read samples by indices, of which negative ones count from the end.

        Args:
            indices: indices as the caller gave them.
            array: the same indices as an array.

        Raises:
            IndexError: an index is out of range.
            DlfsError: as ``read``.
        """
        count = len(self)
        wanted = array if array.dtype.kind in "iu" else indices
        if array.dtype.kind == "i" and array.size and array.min() < 0:
            array = array.astype(np.int64)
            wanted = np.where((array < 0) & (array >= -count), array + count, array)
        try:
            return self.read(wanted)
        except UsageError as error:
            problem = find_outside(indices, -count, count, option="indices")
            if problem is None:
                raise
            raise IndexError(f"read samples of dataset {self.name!r}: {problem}") from error

    def _position(self, index: object) -> int:
        """Return the index 0..N-1 for an index that may count from the end.

        Raises:
            IndexError: there is no such sample.
            UsageError: the index is no integer.
        """
        hint = "; get(path) takes paths" if isinstance(index, str | bytes | os.PathLike) else ""
        return check_position(index, len(self), where=f"dataset {self.name!r}", hint=hint)

    def get(self, path: PathLike) -> bytes:
        """Read one sample by its path.

        Raises:
            NotFoundError: there is no such sample.
            DlfsError: as ``read``.
        """
        index = self.index(path)
        return self._follow(lambda session: session.reader.get(index))

    def get_if_cached(self, index: int) -> bytes | None:
        """Return a sample of at most 1 MiB if it is cached; None if it must be read first."""
        return self._opened().reader.get_if_cached(self._position(index))

    def read(
        self,
        indices: ArrayLike,
        *,
        on_error: OnError = "raise",
        fields: Sequence[str] | None = None,
    ) -> Batch:
        """Read samples as one batch, in the order of the indices.

        Args:
            indices: integers 0..N-1, one dimension; an index may occur more than once.
            on_error: policy for samples that cannot be read: ``raise``; ``skip`` leaves them out;
                ``replace`` reads the next readable sample of the dataset in path order.
            fields: names of the fields that the batch has; by default all. Only the part of each
                sample from the first of them to the last one is read and verified.

        Raises:
            UsageError: an index is out of range, or there is no such policy or field.
            ChecksumError: a sample is damaged; the message names path, member and offset.
            StaleError: the dataset was removed.
            DeviceError: a device failed.
        """

        def use(session: DatasetSession) -> Batch:
            reader = session.reader if fields is None else session.readers.reader(fields)
            return reader.read(indices, on_error=on_error)

        batch = self._follow(use)
        return batch if fields is None else batch.with_fields(fields)

    def read_into(self, index: int, buffer: Buffer, *, offset_bytes: int = 0) -> int:
        """Read a sample, or a range of it, into a buffer. A large sample has no other copy.

        What is read is verified: of a sample larger than a chunk, the chunks that the range lies
        in; they stay in memory for the next range, as it has room. Of any other, the whole sample.

        Args:
            index: index of the sample, negative from the end.
            buffer: contiguous, writable memory: a ``bytearray``, an array, a mapped file. It is
                filled as far as the sample goes. After an error its content is undefined.
            offset_bytes: offset in the sample at which to start.

        Returns:
            The number of bytes read; 0 behind the sample's end.

        Raises:
            IndexError: there is no such sample.
            UsageError: the offset is negative, or the buffer cannot be written to.
            DlfsError: as ``read``.
        """
        position = self._position(index)
        number = as_integer(offset_bytes)
        if number is None or number < 0:
            raise UsageError(
                f"read sample {position} of dataset {self.name!r}: expected an offset of 0 bytes "
                f"or more, got {show_value(offset_bytes)}"
            )
        return self._follow(lambda session: read_into(session.reader, position, buffer, number))

    def read_pieces(self, index: int) -> Iterator[memoryview]:
        """Read a sample in pieces of up to 8 MiB, in bounded memory.

        Each piece is verified before it is returned.

        Args:
            index: index of the sample, negative from the end.

        Returns:
            The pieces. A piece is valid until the next one is requested.

        Raises:
            IndexError: there is no such sample.
            ChecksumError: the piece is damaged, and none follows.
            DlfsError: as ``read``.
        """
        return read_pieces(lambda: self._opened().reader, self._position(index))

    # ---- arrays ----------------------------------------------------------------------------------

    @overload
    def read_arrays(self, indices: ArrayLike, *, stack: Literal[True] = True) -> NDArray[Any]: ...

    @overload
    def read_arrays(self, indices: ArrayLike, *, stack: Literal[False]) -> list[NDArray[Any]]: ...

    def read_arrays(
        self, indices: ArrayLike, *, stack: bool = True
    ) -> NDArray[Any] | list[NDArray[Any]]:
        """Read samples as the arrays that they contain; see ``Batch.arrays``.

        Args:
            indices: integers 0..N-1, one dimension.
            stack: True to copy them to one array, which requires one dtype and shape; False for a
                list.

        Returns:
            ``dtype[n, *shape]``, or with ``stack=False`` a list of read-only views.

        Raises:
            UsageError: a sample is no array or has a wrong length, or the forms differ and are to
                be stacked; the message names the sample.
            DlfsError: as ``read`` and ``column``.
        """
        batch = self.read(indices)
        return batch.arrays() if stack else batch.arrays(stack=False)

    def array(self, index: int) -> NDArray[Any]:
        """Read one sample as the array that it contains, read-only.

        Args:
            index: index of the sample; negative indices count from the end.

        Raises:
            IndexError: there is no such sample.
            UsageError: the index is no integer; or as ``read_arrays``.
            DlfsError: as ``read_arrays``.
        """
        return self.read([self._position(index)]).arrays(stack=False)[0]

    # ---- epochs ----------------------------------------------------------------------------------

    def batches(self, batch_size: int, **options: Unpack[EpochKeywords]) -> Epoch:
        """Return one rank's batches of one epoch, which are read ahead.

        Args:
            batch_size: samples of this rank in a batch, >= 1.
            seed: seed of the order; seed and epoch determine the order completely.
            epoch: number of the epoch; each epoch has an order of its own.
            rank: rank of this process, 0..world_size-1, of those that share the epoch. By default
                the first batch finds it, as ``dlfs.epoch.ranks`` says: from ``torch.distributed``,
                torchrun, Slurm or MPI. ``rank=0, world_size=1`` reads all samples in each of them.
            world_size: number of ranks.
            placement: instead of these numbers, which ranks take different samples: a
                ``DeviceMesh`` of one data dimension, ``(mesh, names of its data dimensions)``, a
                process group, ``Replicated(K)`` for K consecutive ranks that read the same,
                ``Placement(rank, world_size)``, or a function that returns one of these when the
                first batch is taken.
            worker: number of this consumer within its rank, 0..workers-1.
            workers: consumers, each of which takes every ``workers``-th batch of the rank.
            shuffle: ``global`` is a uniform permutation. ``chunk`` permutes chunks, then samples
                within windows of chunks, and reads at sequential speed. None is storage order.
            window_chunks: window of ``chunk`` shuffle, in chunks, within the memory budget. A small
                one is enough for samples that were packed in a random order, as imports do. For
                samples packed class by class, take as many chunks as a global batch has samples.
            where: samples to take, each once, as ``bool[n_samples]`` or indices.
            weights: weight of each sample, a column's name, or a function of the epoch.
            draws: samples of a weighted epoch, which repeat; by default those that are drawn from.
            order: indices of the epoch's samples in their order, such as ``range(len(dataset))``.
            drop_last: True to leave out a last global batch that is not full.
            on_error: policy for samples that cannot be read; see ``read``.
            plan: how samples are read ahead; ``auto`` decides.
            fields: names of the fields that batches have and that are read; see ``read``.

        Raises:
            UsageError: an argument is out of range.
        """
        return self.start_epoch(
            make_options(Dataset.batches, EpochKeywords, options, batch_size=batch_size)
        )

    def start_epoch(self, options: EpochOptions) -> Epoch:
        """Return the batches of an epoch, as ``batches``; for callers that keep the options.

        Raises:
            UsageError: the options do not fit the dataset.
        """
        if options.fields is not None:
            pick_fields(self.fields, options.fields, self.name)
        return Epoch(
            lambda: self._opened().readers.reader(options.fields),
            options,
            dataset=self.name,
            digests=self.digests,
            sample_count=len(self),
            selection=select(self.directory, self.column, options),
            choose=lambda other: select(self.directory, self.column, other),
            explain_other=self._explain_other,
        )

    def _explain_other(self, content: str) -> UsageError:
        """Return the error for a checkpoint of another dataset, named if the volume has it."""
        record = None
        with suppress(DlfsError, ValueError), closing(self._connection.open_volume()) as volume:
            record = volume.catalog.find_content(content)
        other = None if record is None else DatasetIdentity.of(record)
        return self._identity.other_checkpoint(content, other, self._connection.uri)

    def sequence(self, *, epoch: int = 0, **options: Unpack[OrderKeywords]) -> EpochSequence:
        """Return the order of the epoch that ``batches`` reads with the same arguments.

        No sample is read. The arguments are described at ``batches``.

        Raises:
            UsageError: an argument is out of range.
        """
        return self.order_epoch(make_options(Dataset.sequence, OrderKeywords, options, epoch=epoch))

    def order_epoch(self, options: EpochOptions) -> EpochSequence:
        """Return the order of an epoch, as ``sequence``; for callers that keep the options.

        Raises:
            UsageError: ``where``, ``weights``, ``draws`` or ``order`` do not fit the dataset.
        """
        reader = self._opened().reader
        return EpochSequence(
            reader.directory,
            options,
            chunk_bytes=reader.chunk_bytes,
            selection=select(self.directory, self.column, options),
        )

    # ---- columns and fields ----------------------------------------------------------------------

    @property
    def columns(self) -> dict[str, np.dtype[Any]]:
        """Dtype of each column of attributes, by name, as ``column`` returns it."""
        return self.attributes.dtypes

    def column(self, name: str, indices: ArrayLike | None = None) -> NDArray[Any]:
        """Return a column of attributes: one value for each sample.

        Args:
            name: name of the column.
            indices: indices of the samples; by default all in index order.

        Returns:
            ``dtype[n]``, read-only. A whole column of numbers or bools is not copied. Strings are
            an ``object`` array of ``str``.

        Raises:
            NotFoundError: there is no such column.
            UsageError: an index is out of range.
            FormatError: the column is damaged (ChecksumError).
            StaleError: the dataset was removed.
            DeviceError: it cannot be read.
        """
        return follow(lambda: self.attributes, lambda table: table.column(name, indices))

    def attributes_to_arrow(self) -> pyarrow.Table:
        """Return all columns as an Arrow table, in index order; only bools are copied.

        Raises:
            UsageError: pyarrow is not installed.
            DlfsError: as ``column``.
        """
        return follow(lambda: self.attributes, lambda table: table.to_arrow())

    @property
    def fields(self) -> dict[str, str]:
        """Type of each field of the samples by name, as ``Volume.writer`` takes them; or empty.

        All samples have the same fields. A batch checks this for its samples.

        Raises:
            FormatError: the column of the fields is malformed.
            DlfsError: as ``column``.
        """
        none = np.empty(0, np.uint64)
        found = follow(lambda: self.attributes, lambda table: find_fields(table, none, self.name))
        return name_types(found)

    def field_lengths(self, name: str, indices: ArrayLike) -> NDArray[np.int64]:
        """Return the length of a field of some samples in bytes, ``int64[n_samples]``.

        Raises:
            UsageError: there is no such field, or an index is out of range.
            FormatError: the columns of the fields are malformed.
            DlfsError: as ``column``.
        """

        def measure(table: AttributeTable) -> NDArray[np.int64]:
            fields = find_fields(table, np.empty(0, np.uint64), self.name)
            pick_fields(fields, (name,), self.name)
            action = f"read fields of dataset {self.name!r}"
            chosen = check_indices(indices, len(table), option="indices", action=action)
            return measure_field(table, name, fields[name], chosen, self.name)[0]

        return follow(lambda: self.attributes, measure)

    def sample(self, index: int) -> dict[str, Any]:
        """Read the fields of one sample: ``memoryview``, ``str`` or read-only array by name.

        Args:
            index: index of the sample; negative indices count from the end.

        Raises:
            IndexError: there is no such sample.
            UsageError: the index is no integer, or the samples have no fields.
            FormatError: the columns of the fields, or a text, are malformed.
            DlfsError: as ``read`` and ``column``.
        """
        return self.read([self._position(index)]).sample(0)

    # ---- paths and indices -----------------------------------------------------------------------

    def index(self, path: PathLike) -> int:
        """Return the index of a path.

        Raises:
            NotFoundError: there is no such sample.
        """
        raw = _raw(path)
        index = self.directory.find_one(raw)
        if index < 0:
            hint = near_paths(self.directory, raw)
            raise NotFoundError(
                f"look up {quote(raw)} in dataset {quote(self.name)}: no such sample; {hint}"
            )
        return index

    def index_of(self, paths: Sequence[PathLike]) -> NDArray[np.int64]:
        """Return the indices of paths, ``int64[n_paths]``; -1 where there is no such sample."""
        return self.directory.find([_raw(path) for path in paths])

    def __contains__(self, path: object) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        return self.directory.find_one(_raw(path)) >= 0

    def path(self, index: int) -> bytes:
        """Return the path of a sample; negative indices count from the end.

        Raises:
            IndexError: there is no such sample.
        """
        return self.directory.name(self._position(index))

    def paths(self, first: int = 0, count: int | None = None) -> list[bytes]:
        """Return paths in index order: ``count`` from ``first`` on, or all of them."""
        return self.directory.names(first, count)

    def paths_of(self, indices: ArrayLike) -> list[bytes]:
        """Return the paths of samples by their indices, in any order, by one call."""
        return self.directory.names_of(indices)

    def lower_bound(self, path: bytes) -> int:
        """Return the index of the first sample whose path is >= path; N if there is none."""
        return self.directory.lower_bound(path)

    def lengths(self, indices: ArrayLike | None = None) -> NDArray[np.int64]:
        """Return the lengths of some or all samples in bytes, ``int64[n_samples]``."""
        return self.directory.lengths(indices)

    def children(self, prefix: bytes = b"", start_after: bytes | None = None) -> Sequence[Entry]:
        """List one directory of the tree of paths."""
        return list(self.directory.children(prefix, start_after))

    def empty_directories(self) -> list[bytes]:
        """Return the deepest directories without samples; those that contain them exist, too."""
        return self.directory.empty_directories()

    def stat(self, index: int) -> SampleInfo:
        """Return location, length and checksum of a sample without reading it.

        Raises:
            IndexError: there is no such sample.
        """
        position = self._position(index)
        session = self._opened()
        directory = session.directory
        space = DataSpace(session.geometry, session.record.data_runs)
        address = int(directory.addresses([position])[0])
        if address >= space.size_bytes:  # an empty sample behind the last byte
            address = max(0, space.size_bytes - 1)
        member, offset_bytes = space.resolve(address) if space.size_bytes else (0, 0)
        return SampleInfo(
            position,
            directory.name(position),
            int(directory.lengths([position])[0]),
            int(directory.crcs([position])[0]),
            session.members[member],
            offset_bytes,
        )

    def stats(self) -> dict[str, int]:
        """Return the reader's counters by their names in ``dlfs_reader_stats``."""
        return self._opened().readers.stats()

    def member_stats(self) -> list[dict[str, Any]]:
        """Return the counters of each member's reads; see ``SampleReader.member_stats``."""
        return self._opened().readers.member_stats()


def _is_scalar(index: object) -> bool:
    """Return True if a value is no list or array: one index, or a wrong type."""
    is_list = hasattr(index, "__len__") and getattr(index, "ndim", 1) > 0
    return not is_list or isinstance(index, str | bytes)


def _raw(path: PathLike) -> bytes:
    """Return a path as bytes for a look-up, unchecked: a malformed path is not found."""
    plain = os.fspath(path)
    return plain if isinstance(plain, bytes) else plain.encode("utf-8", "surrogateescape")
