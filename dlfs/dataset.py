"""A sealed dataset: looking samples up, reading them, going through them in an epoch's order.

A ``Dataset`` has its directory and reader opened for itself, so it outlives the ``Volume`` it came
from. What belongs to a process (queue pairs, reader) is made anew, on first use, in a forked child
and where a pickle is loaded; both look the dataset up by its UUID and say so when it is gone. Any
thread may use it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload
from uuid import UUID

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs.arguments import OnError, ReadPlan, Shuffle, as_integer
from dlfs.attributes import AttributeTable
from dlfs.connection import Connection, DatasetIdentity, DatasetSession, find_record
from dlfs.directory import Entry, FrozenDirectory, as_array, find_outside, near_paths
from dlfs.epoch_options import WINDOW_CHUNKS, EpochOptions
from dlfs.errors import ClosedError, DlfsError, NotFoundError, UsageError
from dlfs.forks import OwnerProcess
from dlfs.format.catalog import DatasetRecord
from dlfs.format.geometry import DataSpace
from dlfs.format.paths import PathLike
from dlfs.reader import Batch, ColumnAccess, Epoch, read_into, read_pieces
from dlfs.selection import select
from dlfs.sequence import Sequence as EpochSequence
from dlfs.store.info import DatasetInfo, describe_dataset
from dlfs.wording import quote, show_value

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True)
class SampleInfo:
    """Where one sample lies and what it is.

    Attributes:
        index: in the dataset.
        path: of the sample.
        length_bytes: of its bytes.
        crc32c: of its bytes.
        member: URI of the member that it starts on.
        offset_bytes: on that member.
    """

    index: int
    path: bytes
    length_bytes: int
    crc32c: int
    member: str
    offset_bytes: int


class Dataset(ColumnAccess):
    """One version of a dataset, open for reading.

    Args:
        connection: what opens it.
        identity: which dataset it is.

    Attributes:
        uuid: of this version.
        name: of the dataset.
        version: of the dataset.

    Threads: any at once; ``close`` by one.
    """

    def __init__(self, connection: Connection, identity: DatasetIdentity) -> None:
        self._connection = connection
        self._identity = identity
        self._closed = False
        self._mutex = threading.Lock()
        self._owner = OwnerProcess()
        self._access: DatasetSession | None = None
        self._inherited: list[DatasetSession] = []
        self.uuid: UUID = identity.uuid
        self.name = identity.name
        self.version = identity.version

    def __repr__(self) -> str:
        return f"<Dataset {self.name!r} version {self.version} on {self._connection.uri}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Dataset, (self._connection, self._identity)

    # ---- opening ---------------------------------------------------------------------------------

    def open(self) -> Self:
        """Open devices, directory and reader now rather than on first use.

        Raises:
            StaleError: the dataset was removed.
            FormatError: volume or directory are damaged.
            DeviceError: a device cannot be read.
            ClosedError: the dataset was closed.
        """
        self._opened()
        return self

    def _opened(self) -> DatasetSession:
        access = self._access
        if access is not None and self._owner.is_current() and not access.is_lost():
            return access
        if self._closed:
            raise ClosedError(f"use dataset {self.name!r}: it is closed")
        if not self._owner.is_current():
            self._adopt()
        with self._mutex:
            if self._access is None or self._access.is_lost():
                # A lost one is left to its last user: another thread may be in a call of it.
                self._access = self._connection.open_dataset(
                    self._identity, self._known_directory()
                )
            return self._access

    @property
    def access(self) -> DatasetSession:
        """What this object stands on, in this process: for a service of the dataset."""
        return self._opened()

    def _known_directory(self) -> FrozenDirectory | None:
        """The directory that this process, or the one it was forked from, has already."""
        known = [*self._inherited, *filter(None, [self._access])]
        return known[-1].directory if known else None

    def _adopt(self) -> None:
        """In a forked child: leave the parent's handles alone, and a lock that it may hold."""
        self._mutex = threading.Lock()
        if self._access is not None:
            self._inherited.append(self._access)
        self._access = None
        self._owner = OwnerProcess()

    def close(self) -> None:
        """Close devices and reader; batches given out stay good. Idempotent.

        An epoch that is under way is closed by its next call.
        """
        self._closed = True
        access, self._access = self._access, None
        if access is None or not self._owner.is_current():
            return
        access.close(with_directory=not self._inherited)

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
    def info(self) -> DatasetInfo:
        """Its catalog entry."""
        access = self._opened()
        return describe_dataset(access.record, access.geometry)

    @property
    def sample_bytes(self) -> int:
        """The sum of all samples' lengths."""
        return self._opened().record.sample_bytes

    @property
    def directory(self) -> FrozenDirectory:
        """The sample directory."""
        return self._opened().directory

    @property
    def attributes(self) -> AttributeTable:
        """The columns as they are stored; ``columns`` and ``column`` are for users."""
        return self._opened().attributes()

    def __len__(self) -> int:
        return self._opened().record.sample_count

    # ---- samples ---------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice | ArrayLike) -> Batch: ...

    def __getitem__(self, index: int | slice | ArrayLike) -> bytes | Batch:
        """One sample by its index, negative ones from the end; or a ``Batch`` of several.

        Args:
            index: an integer; or a slice, integers of one dimension, or a mask
                (``bool[n_samples]``).

        Raises:
            IndexError: there is no such sample, or the mask is of another length.
            UsageError: it is none of these: floats, text, one bool.
            DlfsError: as ``read``.
        """
        if isinstance(index, slice):
            return self.read(np.arange(*index.indices(len(self)), dtype=np.int64))
        if _is_scalar(index):
            return self._opened().reader.get(self._position(index))
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
        """Read samples by indices of which the negative ones count from the end.

        Args:
            indices: as given.
            array: the same as an array.

        Raises:
            IndexError: one is out of range.
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
        """The index of a sample, 0..N-1, of one that may count from the end.

        Raises:
            IndexError: there is no such sample.
            UsageError: it is no integer.
        """
        number = as_integer(index)
        if number is None:
            raise UsageError(
                f"look up a sample of dataset {self.name!r}: expected an integer, got "
                f"{show_value(index)}{_by_path(index)}"
            )
        count = len(self)
        if not -count <= number < count:
            raise IndexError(
                f"look up a sample of dataset {self.name!r}: expected an index "
                f"{-count}..{count - 1}, got {number}"
            )
        return number % count

    def get(self, path: PathLike) -> bytes:
        """One sample by its path.

        Raises:
            NotFoundError: there is no such sample.
            DlfsError: as ``read``.
        """
        return self._opened().reader.get(self.index(path))

    def get_kept(self, index: int) -> bytes | None:
        """One sample of at most 1 MiB by its index; None if it would have to be waited for."""
        return self._opened().reader.get_kept(self._position(index))

    def read(self, indices: ArrayLike, *, on_error: OnError = "raise") -> Batch:
        """Read samples as one batch, in the order asked for.

        Args:
            indices: integers 0..N-1, one dimension; one may stand in it more than once.
            on_error: ``raise``; ``skip`` leaves bad samples out; ``replace`` reads the next
                good one of the dataset in path order, which ``batches`` may not have chosen.

        Raises:
            UsageError: an index is out of range, or there is no such policy.
            ChecksumError: a sample is damaged; the message names dataset, path, member and offset.
            StaleError: the dataset was removed.
            DeviceError: a device failed.
        """
        return self._opened().reader.read(indices, on_error=on_error)

    def read_into(self, index: int, buffer: Buffer, *, offset_bytes: int = 0) -> int:
        """Read a sample, or a part of it, into a buffer: its only copy in memory if it is large.

        A whole sample is verified. A part is not: the checksum is that of the whole sample; see
        ``read_pieces``.

        Args:
            index: of the sample, negative ones from the end.
            buffer: contiguous, writable memory: a ``bytearray``, an array, a mapped file. As much
                is read as it has room for; the rest of it stays as it was. After an error it has
                nothing of use.
            offset_bytes: where in the sample to begin.

        Returns:
            The bytes read; 0 behind the sample's end.

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
        return read_into(self._opened().reader, position, buffer, number)

    def read_pieces(self, index: int) -> Iterator[memoryview]:
        """Read a sample in pieces of up to 8 MiB, in bounded memory however long it is.

        A sample of up to 64 MiB is verified before its first piece is given. A longer one is
        verified as it goes: its last piece is given only if the checksum is right.

        Args:
            index: of the sample, negative ones from the end.

        Returns:
            The pieces; each may change when the next one is asked for.

        Raises:
            IndexError: there is no such sample.
            ChecksumError: it is damaged; a note says how much of it was given before.
            DlfsError: as ``read``.
        """
        return read_pieces(self._opened().reader, self._position(index))

    def batches(
        self,
        batch_size: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        worker: int = 0,
        workers: int = 1,
        shuffle: Shuffle | None = "global",
        window_chunks: int = WINDOW_CHUNKS,
        where: ArrayLike | None = None,
        weights: str | ArrayLike | None = None,
        draws: int | None = None,
        order: ArrayLike | None = None,
        drop_last: bool = False,
        on_error: OnError = "raise",
        plan: ReadPlan = "auto",
    ) -> Epoch:
        """One rank's batches of one epoch, read ahead.

        By default an epoch goes over all samples, each once. ``where`` chooses some of them,
        ``weights`` draws with replacement, in proportion, and ``order`` gives the order itself.

        Args:
            batch_size: samples of this rank in a batch.
            seed: of the order; with ``epoch`` it decides all of it.
            epoch: each has an order of its own.
            rank: 0..world_size-1.
            world_size: ranks that share the epoch's samples.
            worker: 0..workers-1.
            workers: consumers that share this rank's batches, such as worker processes: each takes
                every ``workers``-th of them.
            shuffle: ``global``: a uniform permutation; ``chunk``: of chunks, then of samples within
                windows of them, at sequential speed; None: storage order.
            window_chunks: of ``chunk``. Samples that were packed in a random order, as import does
                by default, need no large one. Where they lie class by class, take as many chunks
                as a batch of all ranks has samples, or more: classes vary 1 + batch / window times
                as much as in a global order. The memory budget must hold a window.
            where: ``bool[n_samples]`` or indices: the samples to take, each once, permuted
                (``global``) or in storage order (None).
            weights: ``[n_samples]`` or the name of a column, 0 or more each.
            draws: samples of a weighted epoch; as many as there are to draw from by default.
            order: indices, taken as they stand.
            drop_last: leave out a last global batch that is not full.
            on_error: as for ``read``.
            plan: how to read ahead; ``auto`` decides.

        Raises:
            UsageError: an argument is out of range.
        """
        return self.start_epoch(
            EpochOptions(
                batch_size=batch_size,
                seed=seed,
                epoch=epoch,
                rank=rank,
                world_size=world_size,
                worker=worker,
                workers=workers,
                shuffle=shuffle,
                window_chunks=window_chunks,
                where=where,
                weights=weights,
                draws=draws,
                order=order,
                drop_last=drop_last,
                on_error=on_error,
                plan=plan,
            )
        )

    def start_epoch(self, options: EpochOptions) -> Epoch:
        """Return the batches of an epoch, as ``batches``; for callers that keep the options.

        Raises:
            UsageError: ``where``, ``weights``, ``draws`` or ``order`` do not fit the dataset.
        """
        return Epoch(
            lambda: self._opened().reader,
            options,
            dataset=self.name,
            dataset_uuid=self.uuid,
            sample_count=len(self),
            selection=select(self.directory, self.column, options),
            explain_other=self._explain_other,
        )

    def _explain_other(self, uuid: str) -> UsageError:
        """The error of a checkpoint of another dataset; it names that if the volume has it."""
        expected = f"expected dataset {quote(self.name)} version {self.version} ({self.uuid})"
        record = self._find_elsewhere(uuid)
        if record is None:
            return UsageError(
                f"resume an epoch: this checkpoint is of another version or dataset: {expected}, "
                f"got {quote(uuid)}, which is not on {self._connection.uri}"
            )
        other = DatasetIdentity.of(record)
        what = "version" if other.name == self.name else "dataset"
        return UsageError(
            f"resume an epoch: this checkpoint is of another {what}: {expected}, got dataset "
            f"{quote(other.name)} version {other.version} ({other.uuid}); open that {what} to go "
            "on from it"
        )

    def _find_elsewhere(self, uuid: str) -> DatasetRecord | None:
        """The record of another dataset of the volume, as it is now; None if it has none such."""
        try:
            volume = self._connection.open_volume()
            try:
                return find_record(volume.catalog, UUID(uuid))
            finally:
                volume.close()
        except (DlfsError, ValueError):
            return None

    def sequence(
        self,
        *,
        shuffle: Shuffle | None = "global",
        seed: int = 0,
        epoch: int = 0,
        window_chunks: int = WINDOW_CHUNKS,
        where: ArrayLike | None = None,
        weights: str | ArrayLike | None = None,
        draws: int | None = None,
        order: ArrayLike | None = None,
    ) -> EpochSequence:
        """Return the order of the epoch that ``batches`` reads with the same arguments.

        No sample is read. The arguments are described at ``batches``.

        Raises:
            UsageError: an argument is out of range.
        """
        return self.order_epoch(
            EpochOptions(
                shuffle=shuffle,
                seed=seed,
                epoch=epoch,
                window_chunks=window_chunks,
                where=where,
                weights=weights,
                draws=draws,
                order=order,
            )
        )

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

    # ---- paths and indices -----------------------------------------------------------------------

    def index(self, path: PathLike) -> int:
        """The index of a sample.

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
        """Indices of paths, int64[n_paths]; -1 where there is no such sample."""
        return self.directory.find([_raw(path) for path in paths])

    def __contains__(self, path: object) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        return self.directory.find_one(_raw(path)) >= 0

    def path(self, index: int) -> bytes:
        """The path of a sample; negative indices count from the end.

        Raises:
            IndexError: there is no such sample.
        """
        return self.directory.name(self._position(index))

    def paths(self, first: int = 0, count: int | None = None) -> list[bytes]:
        """Paths in index order, all from ``first`` on unless ``count`` says how many."""
        return self.directory.names(first, count)

    def lower_bound(self, path: bytes) -> int:
        """The index of the first sample whose path is >= path; N when there is none."""
        return self.directory.lower_bound(path)

    def lengths(self, indices: ArrayLike | None = None) -> NDArray[np.int64]:
        """Lengths in bytes of some samples, or of all, int64[n_samples]."""
        return self.directory.lengths(indices)

    def children(self, prefix: bytes = b"", start_after: bytes | None = None) -> Sequence[Entry]:
        """List one directory of the tree of paths."""
        return list(self.directory.children(prefix, start_after))

    def stat(self, index: int) -> SampleInfo:
        """What is known of a sample without reading it.

        Raises:
            IndexError: there is no such sample.
        """
        position = self._position(index)
        access = self._opened()
        directory = access.directory
        space = DataSpace(access.geometry, access.record.data_runs)
        address = int(directory.addresses([position])[0])
        if address >= space.size_bytes:  # an empty sample behind the last byte
            address = max(0, space.size_bytes - 1)
        member, offset_bytes = space.resolve(address) if space.size_bytes else (0, 0)
        return SampleInfo(
            position,
            directory.name(position),
            int(directory.lengths([position])[0]),
            int(directory.crcs([position])[0]),
            access.members[member],
            offset_bytes,
        )

    def stats(self) -> dict[str, int]:
        """The reader's counters, by their names in ``dlfs_reader_stats``."""
        return self._opened().reader.stats()

    def member_stats(self) -> list[dict[str, Any]]:
        """What the volume's members did for this dataset: see ``SampleReader.member_stats``."""
        return self._opened().reader.member_stats()


def _is_scalar(index: object) -> bool:
    """Return True for what stands for one sample at most, an index or not."""
    has_length = hasattr(index, "__len__") and getattr(index, "ndim", 1) > 0
    return not has_length or isinstance(index, str | bytes)


def _by_path(index: object) -> str:
    """What to do instead, for a path that was given in place of an index."""
    return "; get(path) takes paths" if isinstance(index, str | bytes | os.PathLike) else ""


def _raw(path: PathLike) -> bytes:
    """A path to look up; nothing is checked: a malformed one is simply not there."""
    plain = os.fspath(path)
    return plain if isinstance(plain, bytes) else plain.encode("utf-8", "surrogateescape")
