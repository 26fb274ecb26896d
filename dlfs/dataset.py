"""A sealed dataset: looking samples up, reading them, going through them in an epoch's order.

A ``Dataset`` opens its devices, directory and reader by itself, so it outlives the ``Volume`` it
came from. What belongs to a process (queue pairs, reader) is made anew, on first use, in a forked
child and where a pickle is loaded; both look the dataset up by its UUID and say so when it is gone.
Any thread may use it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, overload
from uuid import UUID

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs.block import BlockDevice, MissingDevice, open_device
from dlfs.directory import (
    DirectoryIdentity,
    DirectorySizes,
    Entry,
    FrozenDirectory,
    load_directory,
)
from dlfs.errors import (
    ClosedError,
    DeviceError,
    DlfsError,
    FormatError,
    NotFoundError,
    StaleError,
    UsageError,
)
from dlfs.format.catalog import DatasetRecord
from dlfs.format.geometry import DataSpace
from dlfs.format.paths import PathLike, display
from dlfs.reader import Batch, Epoch, ReaderOptions, SampleReader, Where
from dlfs.sequence import WINDOW_CHUNKS, EpochState
from dlfs.store.chunk_reader import Choice, alternatives, read_into
from dlfs.store.info import DatasetInfo, describe_dataset
from dlfs.store.losses import report_loss, report_members, report_return
from dlfs.store.members import Opener, close_devices, open_members
from dlfs.store.transaction import Generation, load_generation
from dlfs.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """How a volume and its datasets are opened.

    Attributes:
        memory_bytes: of the sample memory of each open dataset: cached, read ahead, lent to
            batches.
        depth: operations in flight per member and thread.
        engine: of file devices: ``auto``, ``uring`` or ``threads``.
        opener: of devices.
    """

    memory_bytes: int = 256 * MIB
    depth: int = 128
    engine: str = "auto"
    opener: Opener = open_device


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


@dataclass(eq=False)
class _Access:
    """A process's way to a dataset."""

    generation: Generation
    record: DatasetRecord
    directory: FrozenDirectory
    reader: SampleReader

    def close(self) -> None:
        self.reader.close()
        close_devices(self.generation.devices)


def find_record(generation: Generation, uuid: UUID) -> DatasetRecord | None:
    """The catalog record of a dataset; None when it was removed."""
    return next((r for r in generation.catalog.datasets if r.uuid == uuid), None)


def check_present(devices: Sequence[BlockDevice], record: DatasetRecord) -> None:
    """Find out whether what was just read can be trusted to be the dataset's.

    Raises:
        StaleError: the newest generation does not have the dataset any more.
        DlfsError: as ``load_generation``.
    """
    if find_record(load_generation(devices), record.uuid) is None:
        raise stale_error(display(record.name), record.version, record.uuid)


def stale_error(name: str, version: int, uuid: UUID) -> StaleError:
    """The error of a dataset that was removed."""
    return StaleError(f"read dataset {name!r} version {version} ({uuid}): it was removed")


def load_segment(
    generation: Generation, record: DatasetRecord, *, shared: bool = True
) -> FrozenDirectory:
    """Load a dataset's directory.

    Args:
        generation: with the open devices.
        record: of the dataset.
        shared: use the copy that other processes of the node may have; else what is on media now.

    Raises:
        FormatError: it is malformed (ChecksumError); names dataset, member and offset.
        StaleError: it was removed since.
        DeviceError: a read failed.
    """
    space = DataSpace(generation.geometry, record.directory_runs)
    member, offset_bytes = space.resolve(0)
    label = (
        f"the directory of dataset {display(record.name)!r} version {record.version}, "
        f"on {generation.devices[member].uri} from byte {offset_bytes} on"
    )

    def read_part(choice: Choice, address: int, memory: memoryview) -> None:
        part = np.frombuffer(memory, np.uint8)
        read_into(generation.sources, space, address, part, choice)
        # Names are read late, when the dataset may be gone and something else in its chunks.
        if address:
            check_present(generation.devices, record)

    readers = [partial(read_part, choice) for choice in alternatives(generation.geometry)]
    place: dict[str, Any] = {} if shared else {"root": None}
    try:
        directory = load_directory(
            DirectoryIdentity(generation.superblock.volume_uuid, record.uuid, label),
            DirectorySizes(record.entries_bytes, record.names_bytes),
            readers[0],
            others=readers[1:],
            **place,
        )
    except FormatError:
        check_present(generation.devices, record)
        raise
    if (len(directory), directory.data_bytes) != (record.sample_count, record.data_bytes):
        got = len(directory), directory.data_bytes
        directory.close()
        raise FormatError(
            f"open {label}: expected {record.sample_count} samples in {record.data_bytes} bytes, "
            f"got {got[0]} in {got[1]}"
        )
    return directory


class Dataset:
    """One version of a dataset, open for reading.

    Args:
        uris: of the volume's members.
        uuid: of the dataset's version.
        name: what errors call it.
        version: likewise.
        options: how to open.

    Threads: any at once; ``close`` by one.
    """

    def __init__(
        self, uris: Sequence[str], uuid: UUID, name: str, version: int, options: OpenOptions
    ) -> None:
        self._uris = tuple(uris)
        self._options = options
        self._closed = False
        self._mutex = threading.Lock()
        self._pid = os.getpid()
        self._access: _Access | None = None
        self._inherited: list[_Access] = []
        self.uuid = uuid
        self.name = name
        self.version = version

    def __repr__(self) -> str:
        return f"<Dataset {self.name!r} version {self.version} on {','.join(self._uris)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Dataset, (self._uris, self.uuid, self.name, self.version, self._options)

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

    def _opened(self) -> _Access:
        if self._pid == os.getpid() and self._access is not None:
            return self._access
        if self._closed:
            raise ClosedError(f"use dataset {self.name!r}: it is closed")
        if self._pid != os.getpid():
            self._adopt()
        with self._mutex:
            if self._access is None:
                self._access = self._make_access()
            return self._access

    def _adopt(self) -> None:
        """In a forked child: leave the parent's handles alone, and a lock that it may hold."""
        self._mutex = threading.Lock()
        if self._access is not None:
            self._inherited.append(self._access)
        self._access = None
        self._pid = os.getpid()

    def _make_access(self) -> _Access:
        options = self._options
        devices = open_members(self._uris, engine=options.engine, opener=options.opener)
        try:
            generation = load_generation(devices)
            report_members(generation)
            record = find_record(generation, self.uuid)
            if record is None:
                raise self._stale()
            directory = self._inherited_directory() or load_segment(generation, record)
            reader = self._make_reader(generation, record, directory)
        except BaseException:
            close_devices(devices)
            raise
        return _Access(generation, record, directory, reader)

    def _inherited_directory(self) -> FrozenDirectory | None:
        return self._inherited[-1].directory if self._inherited else None

    def _make_reader(
        self, generation: Generation, record: DatasetRecord, directory: FrozenDirectory
    ) -> SampleReader:
        return SampleReader(
            [None if isinstance(s, MissingDevice) else s.native for s in generation.sources],
            generation.geometry,
            record.data_runs,
            directory,
            Where(self.name, tuple(device.uri for device in generation.devices)),
            ReaderOptions(memory_bytes=self._options.memory_bytes, depth=self._options.depth),
            self._diagnose,
            lambda number, reason: _report(generation, number, reason),
        )

    def _diagnose(self) -> DlfsError | None:
        """Why samples may have failed: the dataset was removed since."""
        access = self._access
        if access is None:
            return None
        try:
            newest = load_generation(access.generation.devices)
        except (FormatError, DeviceError, NotFoundError, UsageError):
            return None  # the samples' own errors say more
        return None if find_record(newest, self.uuid) is not None else self._stale()

    def _stale(self) -> StaleError:
        return stale_error(self.name, self.version, self.uuid)

    def close(self) -> None:
        """Close devices and reader; batches given out stay good. Idempotent."""
        self._closed = True
        access, self._access = self._access, None
        if access is None or self._pid != os.getpid():
            return
        access.close()
        if not self._inherited:
            access.directory.close()

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
        return describe_dataset(access.record, access.generation.geometry)

    @property
    def sample_bytes(self) -> int:
        """The sum of all samples' lengths."""
        return self._opened().record.sample_bytes

    @property
    def directory(self) -> FrozenDirectory:
        """The sample directory."""
        return self._opened().directory

    def __len__(self) -> int:
        return self._opened().record.sample_count

    # ---- samples ---------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice | ArrayLike) -> Batch: ...

    def __getitem__(self, index: int | slice | ArrayLike) -> bytes | Batch:
        """One sample by its index, negative ones from the end; or a ``Batch`` of several.

        Raises:
            IndexError: there is no such sample.
            DlfsError: as ``read``.
        """
        if isinstance(index, int | np.integer):
            return self._opened().reader.get(self._position(int(index)))
        if isinstance(index, slice):
            return self.read(np.arange(*index.indices(len(self)), dtype=np.int64))
        wanted = np.asarray(index)
        if wanted.dtype == np.bool_:
            if wanted.shape != (len(self),):
                raise IndexError(f"expected a mask of {len(self)} samples, got {wanted.shape}")
            return self.read(np.flatnonzero(wanted))
        if wanted.size and wanted.dtype.kind == "i":
            wanted = np.where(wanted < 0, wanted + len(self), wanted)
        return self.read(wanted)

    def _position(self, index: int) -> int:
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"sample {index} of {count} in dataset {self.name!r}")
        return index % count

    def get(self, path: PathLike) -> bytes:
        """One sample by its path.

        Raises:
            NotFoundError: there is no such sample.
            DlfsError: as ``read``.
        """
        return self._opened().reader.get(self.index(path))

    def get_kept(self, index: int) -> bytes | None:
        """One sample by its index, or None if a device would have to be waited for."""
        return self._opened().reader.get_kept(self._position(index))

    def read(self, indices: ArrayLike, *, on_error: str = "raise") -> Batch:
        """Read samples as one batch, in the order asked for.

        Args:
            indices: integers 0..N-1, one dimension; one may stand in it more than once.
            on_error: ``raise``; ``skip`` leaves bad samples out; ``replace`` reads another in
                place.

        Raises:
            UsageError: an index is out of range, or there is no such policy.
            ChecksumError: a sample is damaged; the message names dataset, path, member and offset.
            StaleError: the dataset was removed.
            DeviceError: a device failed.
        """
        return self._opened().reader.read(indices, on_error=on_error)

    def batches(
        self,
        batch_size: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        shuffle: str | None = "global",
        window_chunks: int = WINDOW_CHUNKS,
        drop_last: bool = False,
        on_error: str = "raise",
        plan: str = "auto",
    ) -> Epoch:
        """One rank's batches of one epoch, read ahead.

        Args:
            batch_size: samples of this rank in a batch.
            seed: of the order; with ``epoch`` it decides all of it.
            epoch: each has an order of its own.
            rank: 0..world_size-1.
            world_size: ranks that share the epoch's samples.
            shuffle: ``global``: a uniform permutation; ``chunk``: of chunks, then of samples within
                windows of them, at sequential speed; None: storage order.
            window_chunks: of ``chunk``.
            drop_last: leave out a last global batch that is not full.
            on_error: as for ``read``.
            plan: how to read ahead; ``auto`` decides.

        Raises:
            UsageError: an argument is out of range.
        """
        state = EpochState(str(self.uuid), shuffle, seed, epoch, window_chunks, position=0)
        return Epoch(
            lambda: self._opened().reader,
            state,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            on_error=on_error,
            plan=plan,
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
            raise NotFoundError(
                f"look up {display(raw)!r} in dataset {self.name!r}: no such sample"
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
        space = DataSpace(access.generation.geometry, access.record.data_runs)
        address = int(directory.addresses([position])[0])
        if address >= space.size_bytes:  # an empty sample behind the last byte
            address = max(0, space.size_bytes - 1)
        member, offset_bytes = space.resolve(address) if space.size_bytes else (0, 0)
        return SampleInfo(
            position,
            directory.name(position),
            int(directory.lengths([position])[0]),
            int(directory.crcs([position])[0]),
            access.generation.devices[member].uri,
            offset_bytes,
        )

    def stats(self) -> dict[str, int]:
        """The reader's counters, by their names in ``dlfs_reader_stats``."""
        return self._opened().reader.stats()


def _report(generation: Generation, number: int, reason: str | None) -> None:
    """Tell of a member that was lost, or is back."""
    if reason is None:
        report_return(generation, number)
    else:
        report_loss(generation, number, reason)


def _raw(path: PathLike) -> bytes:
    """A path to look up; nothing is checked: a malformed one is simply not there."""
    plain = os.fspath(path)
    return plain if isinstance(plain, bytes) else plain.encode("utf-8", "surrogateescape")
