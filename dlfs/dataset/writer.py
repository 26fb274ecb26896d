"""``DatasetWriter``: packs samples into chunks and seals them as one new dataset version.

A ``StepBuilder`` collects and packs the samples, which layout ``shuffled`` permutes by the seed
within each stage of ``STAGE_BYTES_SHUFFLED``: an exact shuffle of datasets up to that size. Only a
``StepWriter`` shuffles larger ones.

Attributes are collected in columns, in the order of the calls, and written behind the samples in
index order. All samples have the attributes of the first one; the caller may declare the value of
samples that are added without one.

A dataset has either samples of bytes or samples with fields. The fields are those that the caller
declares, else those of the first sample; see ``dlfs.fields``.

An appended version begins with the samples of an earlier one, which stay in their chunks. The seal
merges their directory and attributes with those of the added samples (``dataset.sealing``).

Nothing changes on the volume before ``seal``; earlier writes go to free chunks.

Threads: one. Memory: the stage, the windows, and columns and paths of the added samples; those of
an earlier version as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from uuid import UUID, uuid4

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs._native.device import as_bytes_array
from dlfs.attributes import Attributes
from dlfs.attributes.merging import Columns
from dlfs.base.arguments import Layout, check_choice, check_integer
from dlfs.base.units import format_bytes, format_count
from dlfs.block import BlockDevice
from dlfs.connection.previous_version import PreviousVersion
from dlfs.connection.stored_samples import encoded_samples, stored_version
from dlfs.connection.unfinished import UnfinishedSteps
from dlfs.dataset.sample_packer import STAGE_BYTES_ORDERED, STAGE_BYTES_SHUFFLED
from dlfs.dataset.schema import Schema
from dlfs.dataset.sealing import (
    EncodedVersion,
    Stream,
    Tick,
    attribute_chunks,
    merge_samples,
    write_version,
)
from dlfs.dataset.step_builder import StepBuilder
from dlfs.dataset.step_content import StepEnd, new_import, write_steps
from dlfs.directory.builder import DirectoryBuilder, segment_bytes_max
from dlfs.errors import ClosedError, ExistsError, SpaceError
from dlfs.format.bad_records import BadReport
from dlfs.format.catalog import LAYOUTS, DatasetRecord
from dlfs.format.geometry import ChunkRun, Geometry
from dlfs.format.paths import PathLike, display, path_bytes
from dlfs.store.info import DatasetInfo, describe_dataset
from dlfs.store.sample_buffer import SampleBuffer, check_batch
from dlfs.store.space import count_chunks, joined_runs
from dlfs.store.transaction import Generation, Transaction, after_commit

if TYPE_CHECKING:
    from dlfs._native.device import BytesLike

SEED_MAX = (1 << 64) - 1

NAMES_GROWTH = 2
"""Factor by which the names of an earlier version may grow when others come between them: the first
name of each block is stored as a whole, and the blocks begin at other names then."""

_NO_ATTRIBUTES: Attributes = {}
_NO_NAMES: frozenset[str] = frozenset()


def _find_schema(
    unfinished: UnfinishedSteps | None, previous: PreviousVersion | None
) -> Schema | None:
    """Return what the samples before those of a writer have; None without any."""
    found = None if unfinished is None else Schema.of_steps(unfinished)
    if found is None and previous is not None:
        found = Schema.of_version(previous)
    return found


@dataclass(slots=True)
class _Allocation:
    """Allocates chunks of a transaction, and leaves enough of them free to seal the samples.

    Attributes:
        transaction: the transaction.
        reserve: returns the number of chunks to leave free.
    """

    transaction: Transaction
    reserve: Callable[[], int]

    @property
    def devices(self) -> Sequence[BlockDevice]:
        """Devices of the members, in order."""
        return self.transaction.devices

    @property
    def geometry(self) -> Geometry:
        """Layout of the chunks over the members."""
        return self.transaction.geometry

    def take(self, count: int) -> ChunkRun:
        """Allocate 1 to ``count`` chunks in one run; see ``FreeSpace.take``."""
        self.transaction.space.reserve = self.reserve()
        return self.transaction.space.take(count)


class DatasetWriter:
    """Writes one dataset. A context manager: a clean exit seals it, an exception aborts it.

    Args:
        transaction: transaction with the lock on the volume; the writer ends it.
        name: name of the new dataset.
        version: version of the new dataset.
        layout: order in which samples are packed.
        seed: seed of the shuffled order, 64 bits.
        source_shuffled: True if samples arrive in a shuffled order and are packed in it.
        expected_bytes: sum of the samples' lengths, if known: free space is checked first.
        expected_samples: number of samples, if known: free space is checked first.
        stage_bytes: size of the stage; by default it depends on the layout.
        stage: an empty stage to use instead; it is empty again when the writer has ended.
        fields: type of each field of the samples by name; by default those of the first sample.
        defaults: value of each attribute for samples that are added without it.
        previous: an earlier version, whose samples the new one has as well; closed by the seal.
        unfinished: steps of an unfinished import, which the samples go on: ``commit_step`` adds
            them as one more step.
        part: number of the part of the source that the samples are of.
        part_windows: windows of the shuffle in the steps of the part before.
        uuid: UUID of the new dataset, for callers that need it before the seal; random by default.
        on_end: called once with the new generation, or with None after an abort.

    Attributes:
        layout: order in which samples are packed.
        previous: the earlier version whose samples the new one has as well; None without.
        bad: records that imports left out of the dataset, at first those of the earlier version.

    Raises:
        SpaceError: the expected samples do not fit.
        ExistsError: a dataset has the UUID.

    Threads: one at a time.
    """

    def __init__(
        self,
        transaction: Transaction,
        name: bytes,
        version: int,
        *,
        layout: Layout = "shuffled",
        seed: int = 0,
        source_shuffled: bool = False,
        expected_bytes: int = 0,
        expected_samples: int = 0,
        stage_bytes: int | None = None,
        stage: SampleBuffer | None = None,
        fields: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
        previous: PreviousVersion | None = None,
        unfinished: UnfinishedSteps | None = None,
        part: int = 0,
        part_windows: int = 0,
        uuid: UUID | None = None,
        on_end: Callable[[Generation | None], None] = lambda _: None,
    ) -> None:
        self._transaction = transaction
        self._on_end = on_end
        self._name = name
        action = f"write {display(name)!r}"
        check_choice(layout, LAYOUTS, option="layout", action=action)
        self._seed = check_integer(seed, 0, SEED_MAX, option="seed", action=action)
        self._version = version
        self.layout = layout
        self._unfinished = unfinished
        self._part = part
        self.uuid: UUID = uuid or uuid4()
        if unfinished is not None:
            self.uuid = unfinished.record.uuid
        elif transaction.base.catalog.has_uuid(self.uuid):
            raise ExistsError(
                f"write the dataset {display(name)!r}: a dataset has the UUID {self.uuid}"
            )
        self.previous = previous
        self.bad = BadReport() if previous is None else previous.bad
        self._earlier_bytes = 0, 0  # of paths and attributes, in the steps before
        if stage is None:
            shuffles = layout == "shuffled" and not source_shuffled
            default = STAGE_BYTES_SHUFFLED if shuffles else STAGE_BYTES_ORDERED
            stage = SampleBuffer(default if stage_bytes is None else stage_bytes)
        self._chunks = _Allocation(transaction, self._sealing_chunks)
        self._samples = StepBuilder(
            self._chunks,
            name=name,
            uuid=self.uuid,
            stage=stage,
            layout=layout,
            seed=self._seed,
            source_shuffled=source_shuffled,
            part=part,
            part_windows=part_windows,
            fields=fields,
            defaults=defaults,
            schema=_find_schema(unfinished, previous),
        )
        self._state = "open"
        self._columns: Columns = {}
        if unfinished is not None:
            self._earlier_bytes = unfinished.path_bytes, unfinished.attributes_bytes
        self._check_space(expected_bytes, expected_samples)

    def __repr__(self) -> str:
        name, version = display(self._name), self._version
        size = f"{format_count(self.sample_count, 'sample')}, {format_bytes(self.sample_bytes)}"
        return f"<DatasetWriter of dataset {name!r} version {version}: {size}, {self._state}>"

    @property
    def new_count(self) -> int:
        """Number of samples that were added."""
        return self._samples.new_count

    @property
    def new_bytes(self) -> int:
        """Sum of their lengths, in bytes."""
        return self._samples.new_bytes

    @property
    def journal_bytes(self) -> int:
        """Bytes of the paths and attributes of the samples added so far, at most."""
        return self._samples.journal_bytes

    @property
    def sample_count(self) -> int:
        """Number of samples: those that were added, and those of the earlier version."""
        return self.new_count + (self.previous.record.sample_count if self.previous else 0)

    @property
    def sample_bytes(self) -> int:
        """Sum of the lengths of these samples, in bytes."""
        return self.new_bytes + (self.previous.record.sample_bytes if self.previous else 0)

    def __contains__(self, path: object) -> bool:
        """Return True if a sample of this path was added, or is in the earlier version."""
        added = path in self._samples
        return added or (self.previous is not None and path in self.previous)

    # ---- adding ----------------------------------------------------------------------------------

    def add(
        self,
        path: PathLike,
        data: BytesLike | Mapping[str, Any],
        *,
        attributes: Mapping[str, Any] = _NO_ATTRIBUTES,
    ) -> None:
        """Add one sample: its bytes, or its fields.

        After a SpaceError, a DeviceError or a late ExistsError the writer has aborted.

        Args:
            path: path of the sample; bytes, or text in UTF-8.
            data: bytes of the sample, at most 2^40 - 1; copied before the call returns. Or a value
                for each field: bytes, text, or an array, a list or a number. Without declared
                fields, the first sample determines their types; all dimensions of its arrays vary.
            attributes: value of each column: bool, number, string, or a vector of numbers. The
                first sample determines the columns and their types; all samples have the same ones.

        Raises:
            ExistsError: the path was added already, or is a directory of another path. A clash
                between buffered samples may be reported by a later call.
            UsageError: the path is malformed, an attribute is missing, new or of another type than
                its column, or a field is missing, unknown or of another type; or bytes and fields
                are mixed; or a reserved attribute, whose name begins with ``dlfs:``, does not fit
                the sample.
            LimitError: the path or the sample is too long.
            SpaceError: the volume is full.
            DeviceError: a write failed.
            ClosedError: the writer has ended.
        """
        self._check_open()
        raw = path_bytes(path)
        if raw in self:
            raise ExistsError(f"add the sample {display(raw)!r}: it was added already")
        with self._aborted_if_broken():
            self._samples.add(raw, data, attributes)

    def add_directory(self, path: PathLike) -> None:
        """Add a directory, which stays in the dataset if no sample lies below it.

        Directories of samples need not be added. One that was added already stays as it is.

        Raises:
            ExistsError: the path is that of a sample, or lies below one. A clash with a buffered
                sample may be reported by a later call.
            UsageError, LimitError: the path is malformed, or too long.
            ClosedError: the writer has ended.
        """
        self._check_open()
        self._samples.add_directory(path)

    def add_batch(
        self,
        paths: Sequence[bytes],
        data: BytesLike,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        *,
        attributes: Mapping[str, ArrayLike] = _NO_ATTRIBUTES,
        begins_chunk: bool | None = None,
    ) -> None:
        """Add many samples of bytes at once.

        Args:
            paths: paths of the samples.
            data: contiguous buffer with the samples; copied or packed before the call returns.
            offsets: offset of each sample in ``data``, ``int64[n_samples]``.
            lengths: length of each sample in bytes, ``int64[n_samples]``.
            attributes: ``[n_samples]`` values of each column: bool, integers, floats or strings; or
                ``[n_samples, k]`` for vectors.
            begins_chunk: None to pack by the layout. Else the samples are packed as they come,
                behind those before, or, if it is True, from the next chunk on.

        Raises:
            UsageError: the arrays differ in length, a sample lies outside ``data``, or attributes
                are missing, new or of another type than their column.
            DlfsError: as ``add``; a clash of paths in the batch may be reported by a later call.
        """
        self._check_open()
        source = as_bytes_array(data)
        starts, sizes = np.asarray(offsets, np.int64), np.asarray(lengths, np.int64)
        check_batch(len(paths), source.size, starts, sizes)
        known = None if self.previous is None else self.previous.find_known(paths)
        if known is not None:
            raise ExistsError(f"add the sample {display(known)!r}: it was added already")
        with self._aborted_if_broken():
            self._samples.add_batch(
                paths, source, starts, sizes, attributes=attributes, begins_chunk=begins_chunk
            )

    # ---- the end ---------------------------------------------------------------------------------

    def seal(self, tick: Tick = lambda _samples: None) -> DatasetInfo:
        """Commit the added samples as one dataset, atomically.

        A writer without samples makes an empty dataset. An import, or the seal of a mount's
        ``incoming``, does so only with ``allow_empty``.

        Args:
            tick: called while samples are merged with those of an earlier version, with the number
                of samples since the last call. What it raises ends the seal.

        Returns:
            The new dataset.

        Raises:
            DlfsError: as ``add`` and as a commit; the volume is unchanged. Only after a device
                error in the last writes may it have the new generation; a note of the error then
                says so.
            ClosedError: the writer has ended.
        """
        self._check_open()
        with self._aborted_on_error():
            record = self._write_version(tick)
            generation = self._transaction.commit(removed=self._replaced, added=[record])
        self._end("sealed", generation)
        return describe_dataset(record, self._transaction.geometry)

    @property
    def window_count(self) -> int:
        """Number of windows of the shuffle in the part so far, of all of its steps."""
        return self._samples.packing.window_count

    def commit_step(
        self, end: StepEnd, source: bytes, tags: Sequence[tuple[int, bytes]] = ()
    ) -> UnfinishedSteps:
        """Commit the added samples as a step of an unfinished import; the writer has ended then.

        No reader sees them as a dataset, and the volume is unlocked.

        Args:
            end: where the step ends in the source.
            source: describes the source and the options of the import.
            tags: further tagged values of the record, which those of later steps keep.

        Returns:
            The steps of the import, this one included.

        Raises:
            DlfsError: as ``seal``.
        """
        self._check_open()
        with self._aborted_on_error():
            before = self._unfinished
            if before is None:
                before = new_import(self._name, self.uuid, self.layout, self._seed)
            content = self._samples.finish(end)
            steps = write_steps(
                self._transaction, before, [content], source=source, bad=self.bad, tags=tags
            )
            generation = self._transaction.commit(removed=self._replaced, added=[steps.record])
        self._end("a step of an import", generation)
        return steps

    @property
    def _replaced(self) -> list[DatasetRecord]:
        return [] if self._unfinished is None else [self._unfinished.record]

    def _write_version(self, tick: Tick) -> DatasetRecord:
        """Write the last window, the attributes and the directory; return the record."""
        chunks = self._samples.packing.finish()
        encoded = self._encode(chunks.chunk_count)
        previous, runs = self.previous, chunks.runs
        if previous is not None:
            encoded = self._merge(previous, encoded, tick)
            runs = list(joined_runs(previous.runs, runs))
        return write_version(
            self._transaction,
            encoded,
            name=self._name,
            version=self._version,
            uuid=self.uuid,
            layout=self.layout,
            seed=self._seed,
            runs=runs,
            bad=self.bad,
        )

    def _encode(self, chunk_count: int) -> EncodedVersion:
        """Encode the directory and the attributes of the added samples."""
        chunk_bytes = self._transaction.geometry.chunk_bytes
        attributes: Sequence[NDArray[np.uint8]] = []
        samples = self._samples
        if len(samples.attributes):
            self._columns = samples.attributes.dtypes
            attributes = samples.attributes.freeze(self.uuid, samples.packing.directory.rows())
        chunks = chunk_count + attribute_chunks(attributes, chunk_bytes)
        directory = samples.packing.directory.freeze(
            self.uuid, chunks * chunk_bytes, chunk_bytes=chunk_bytes, parts=samples.packing.parts
        )
        return EncodedVersion(directory, attributes)

    def _merge(self, previous: PreviousVersion, own: EncodedVersion, tick: Tick) -> EncodedVersion:
        """Merge the samples of the earlier version with the added ones."""
        packing = self._samples.packing
        packing.directory = DirectoryBuilder()
        previous.close()
        parts = own.directory.entries, own.directory.names
        added = encoded_samples(parts, own.attributes, self.uuid, self.new_count)
        base = self._transaction.base
        return merge_samples(
            [
                Stream(stored_version(base, previous.record), 0, count_chunks(previous.runs)),
                Stream(added, count_chunks(previous.runs), packing.chunks.chunk_count),
            ],
            uuid=self.uuid,
            chunk_bytes=base.geometry.chunk_bytes,
            directories=[],
            columns=self._columns,
            defaults=self._samples.names.stored_defaults,
            encoder=self._samples.encoder,
            tick=tick,
        )

    def abort(self) -> None:
        """Discard the new dataset. The volume is unchanged. Idempotent."""
        if self._state == "open":
            self._end("aborted", None)

    @contextmanager
    def _aborted_on_error(self) -> Iterator[None]:
        """Abort after an error."""
        try:
            yield
        except BaseException:
            self.abort()
            raise

    @contextmanager
    def _aborted_if_broken(self) -> Iterator[None]:
        """Abort after an error that leaves a part of the samples packed."""
        try:
            yield
        except BaseException:
            if self._samples.is_broken:
                self.abort()
            raise

    def _end(self, state: str, generation: Generation | None) -> None:
        self._state = state
        self._chunks.reserve = int  # which a cycle of references would keep
        with after_commit(self._transaction.committed):
            try:
                self._samples.close()
            finally:
                self._transaction.close()
                self._on_end(generation)

    def _check_open(self) -> None:
        if self._state != "open":
            name = display(self._name)
            raise ClosedError(f"write the dataset {name!r}: the writer is {self._state}")

    # ---- space -----------------------------------------------------------------------------------

    def _sealing_chunks(self) -> int:
        """Return the chunks that the next commit, and the seal, take besides samples."""
        chunks = self._overhead_chunks(
            self.sample_count, self._samples.path_bytes, self.sample_bytes
        )
        if self._unfinished is not None:
            # The seal writes the directory and the attributes of all samples before the journals
            # become free.
            record, chunk_bytes = self._unfinished.record, self._transaction.geometry.chunk_bytes
            path_bytes, attributes_bytes = self._earlier_bytes
            chunks -= -attributes_bytes // chunk_bytes
            chunks += self._overhead_chunks(
                self.sample_count + record.sample_count,
                self._samples.path_bytes + path_bytes,
                self.sample_bytes + record.sample_bytes,
            )
        return chunks

    def _overhead_chunks(self, samples: int, path_bytes: int, sample_bytes: int) -> int:
        """Return the chunks to reserve for attributes, directory and catalog."""
        chunk_bytes = self._transaction.geometry.chunk_bytes
        attributes_bytes = self._samples.attributes.size_bytes
        if self.previous is not None:
            record = self.previous.record
            path_bytes += NAMES_GROWTH * record.names_bytes
            extent = record.attribute_extent
            attributes_bytes += 0 if extent is None else extent.segment_bytes
        directory = segment_bytes_max(samples, path_bytes, sample_bytes // chunk_bytes)
        attributes = -(-attributes_bytes // chunk_bytes)
        return attributes - (-directory // chunk_bytes) + self._transaction.next_catalog_chunks

    def room_for_second_pass(self) -> tuple[int, int]:
        """Return the bytes that packing all samples once more takes, and the free bytes."""
        chunk_bytes = self._transaction.geometry.chunk_bytes
        earlier_bytes = self._unfinished.record.data_bytes if self._unfinished else 0
        packed_bytes = earlier_bytes + self._samples.packing.size_bytes
        chunks = packed_bytes // chunk_bytes * 65 // 64 + 3 + 3 * self._sealing_chunks()
        return chunks * chunk_bytes, self._transaction.space.chunk_count * chunk_bytes

    def _check_space(self, expected_bytes: int, expected_samples: int) -> None:
        chunk_bytes = self._transaction.geometry.chunk_bytes
        samples = self.sample_count + expected_samples
        overhead = self._overhead_chunks(
            samples, self._samples.path_bytes, self.sample_bytes + expected_bytes
        )
        needed = -(-expected_bytes // chunk_bytes) + overhead
        free = self._transaction.space.chunk_count
        if needed > free:
            self.abort()
            raise SpaceError(
                f"write the dataset {display(self._name)!r}: expected "
                f"{format_bytes(needed * chunk_bytes)} of free space, got "
                f"{format_bytes(free * chunk_bytes)}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        if kind is None and self._state == "open":
            self.seal()
        else:
            self.abort()
