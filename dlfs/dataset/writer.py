"""``DatasetWriter``: packs samples into chunks and seals them as one new dataset version.

A ``SamplePacker`` packs the samples, which layout ``shuffled`` permutes by the seed within each
stage of ``STAGE_BYTES_SHUFFLED``: an exact shuffle of datasets up to that size. Only a
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
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self
from uuid import UUID, uuid4

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs._native.device import as_bytes_array
from dlfs.attributes import AttributeNames, Attributes, AttributesBuilder, AttributeTable
from dlfs.attributes.merging import Columns
from dlfs.base.arguments import Layout, check_choice, check_integer
from dlfs.base.units import format_bytes, format_count
from dlfs.connection.previous_version import PreviousVersion
from dlfs.connection.stored_samples import encoded_samples, stored_version
from dlfs.connection.unfinished import UnfinishedSteps
from dlfs.dataset.sample_packer import STAGE_BYTES_ORDERED, STAGE_BYTES_SHUFFLED, SamplePacker
from dlfs.dataset.sealing import (
    EncodedVersion,
    Stream,
    Tick,
    attribute_chunks,
    merge_samples,
    write_version,
)
from dlfs.directory.builder import DirectoryBuilder, segment_bytes_max
from dlfs.errors import ClosedError, ExistsError, LimitError, SpaceError, UsageError
from dlfs.fields import FIELDS_COLUMN, FieldEncoder
from dlfs.format.bad_records import BadReport, bad_records_tags
from dlfs.format.catalog import LAYOUTS, DatasetRecord
from dlfs.format.constants import SAMPLE_BYTES_MAX, TAG_BAD_RECORDS, TAG_SOURCE
from dlfs.format.journal import Cursor, StepHeader, encode_step_header
from dlfs.format.paths import PathLike, display, path_bytes
from dlfs.reader.reserved import check_no_reserved, check_reserved, has_reserved
from dlfs.store.info import DatasetInfo, describe_dataset
from dlfs.store.journal import Step
from dlfs.store.sample_buffer import SampleBuffer, check_batch
from dlfs.store.space import count_chunks, joined_runs
from dlfs.store.transaction import Generation, Transaction, after_commit, now_ns

if TYPE_CHECKING:
    from dlfs._native.device import BytesLike

SEED_MAX = (1 << 64) - 1

NAMES_GROWTH = 2
"""Factor by which the names of an earlier version may grow when others come between them: the first
name of each block is stored as a whole, and the blocks begin at other names then."""

_NO_ATTRIBUTES: Attributes = {}
_NO_NAMES: frozenset[str] = frozenset()


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
        new_count: number of samples that were added.
        new_bytes: sum of their lengths, in bytes.
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
        self._encoder = None if fields is None else self._declare(fields)
        self._has_bytes = False  # samples of bytes were added
        self._earlier_bytes = 0, 0  # of paths and attributes, in the steps before
        self._attributes = AttributesBuilder()
        self._names = AttributeNames(defaults or {})
        if stage is None:
            shuffles = layout == "shuffled" and not source_shuffled
            default = STAGE_BYTES_SHUFFLED if shuffles else STAGE_BYTES_ORDERED
            stage = SampleBuffer(default if stage_bytes is None else stage_bytes)
        self._packing = SamplePacker(
            transaction,
            stage,
            layout=layout,
            seed=self._seed,
            part=part,
            stage_count=part_windows,
            source_shuffled=source_shuffled,
            reserve=self._sealing_chunks,
        )
        self._path_bytes = 0
        self._state = "open"
        self._columns: Columns = {}
        self.new_count = 0
        self.new_bytes = 0
        if unfinished is not None:
            self._go_on(unfinished)
        elif previous is not None:
            self._begin_with(previous)
        self._check_space(expected_bytes, expected_samples)

    def __repr__(self) -> str:
        name, version = display(self._name), self._version
        size = f"{format_count(self.sample_count, 'sample')}, {format_bytes(self.sample_bytes)}"
        return f"<DatasetWriter of dataset {name!r} version {version}: {size}, {self._state}>"

    def _begin_with(self, previous: PreviousVersion) -> None:
        """Expect what the samples of an earlier version have, and declared attributes besides."""
        self._attributes.expect(previous.columns)
        self._encoder = previous.encoder
        self._has_bytes = previous.record.sample_count > 0 and previous.encoder is None
        if previous.record.sample_count or previous.columns:
            known = dict.fromkeys(previous.names, ())
            completed = self._names.complete(known, 0, None)
            new = {name: value for name, value in completed.items() if name not in known}
            self._attributes.append(self._attributes.prepare(new, 0), 0)
            self._names.settle(completed)

    def _go_on(self, unfinished: UnfinishedSteps) -> None:
        self._attributes.expect(unfinished.columns)
        self._names.settle(dict.fromkeys(unfinished.names, ()))
        self._encoder = unfinished.encoder
        self._has_bytes = unfinished.encoder is None
        self._earlier_bytes = unfinished.path_bytes, unfinished.attributes_bytes

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
        added = path in self._packing
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
        if isinstance(data, Mapping):
            check_no_reserved(attributes, raw)
            array, columns = self._encode_fields(raw, data)
            attributes = {**attributes, **columns}
        else:
            array = as_bytes_array(data)
            self._check_bytes_allowed(raw)
            if has_reserved(attributes):
                given = {name: [value] for name, value in attributes.items()}
                check_reserved(given, np.array([array.size]), display(self._name))
        if array.size > SAMPLE_BYTES_MAX:
            raise LimitError(
                f"add the sample {display(raw)!r}: expected at most {SAMPLE_BYTES_MAX} bytes, "
                f"got {array.size}"
            )
        values = {name: [value] for name, value in attributes.items()}
        self._note([raw], array.size, values)
        with self._aborted_on_error():
            self._packing.add(raw, array)

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
        raw = path_bytes(path)
        self._packing.directory.add_directory(raw)
        self._path_bytes += len(raw) + 1

    def _declare(self, fields: Mapping[str, str]) -> FieldEncoder:
        try:
            return FieldEncoder(fields)
        except UsageError as error:
            name = display(self._name)
            raise UsageError(f"write the dataset {name!r}: {error}") from error

    def _encode_fields(
        self, path: bytes, values: Mapping[str, Any]
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Return the bytes of a sample with fields, and its reserved attributes."""
        where = f"add the sample {display(path)!r}"
        if self._has_bytes:
            raise UsageError(f"{where}: expected bytes as in the samples before, got fields")
        encoder = self._encoder or FieldEncoder.of_sample(values, where)
        encoded = encoder.encode(values, where)
        self._encoder = encoder
        return encoded

    def _check_bytes_allowed(self, path: bytes) -> None:
        if self._encoder is not None:
            fields = ", ".join(self._encoder.fields)
            raise UsageError(
                f"add the sample {display(path)!r}: expected the fields {fields}, got bytes"
            )
        self._has_bytes = True

    def _check_fields_allowed(self, path: bytes, texts: list[str]) -> None:
        """Check that fields which the caller encoded are those of the samples before."""
        expected = "bytes" if self._has_bytes else self._encoder and self._encoder.text
        if expected and any(text != expected for text in texts):
            raise UsageError(
                f"add the sample {display(path)!r}: expected {expected} as in the samples before, "
                f"got the fields {texts[0]}"
            )

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
        if len(paths) and FIELDS_COLUMN in attributes:  # importers encode fields themselves
            self._check_fields_allowed(paths[0], np.asarray(attributes[FIELDS_COLUMN]).tolist())
        elif len(paths):
            self._check_bytes_allowed(paths[0])
        check_reserved(attributes, sizes, display(self._name))
        known = None if self.previous is None else self.previous.find_known(paths)
        if known is not None:
            raise ExistsError(f"add the sample {display(known)!r}: it was added already")
        self._note(paths, int(sizes.sum()), attributes)
        with self._aborted_on_error():
            self._packing.add_batch(paths, source, starts, sizes, begins_chunk)

    def _note(self, paths: Sequence[bytes], sample_bytes: int, attributes: Attributes) -> None:
        """Count samples and record their attributes, in the row order of the directory."""
        samples = len(paths)
        if attributes or self._names.names != _NO_NAMES:
            values = self._names.complete(attributes, samples, paths[0] if samples else None)
            self._attributes.append(self._attributes.prepare(values, samples), self.new_count)
            if samples or attributes:
                self._names.settle(values)
        self.new_count += samples
        self.new_bytes += sample_bytes
        self._path_bytes += sum(map(len, paths))

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
        return self._packing.window_count

    def commit_step(
        self,
        source_count: int,
        source: bytes,
        cursor: Cursor | None = None,
        tags: Sequence[tuple[int, bytes]] = (),
        *,
        ends_part: bool = False,
    ) -> UnfinishedSteps:
        """Commit the added samples as a step of an unfinished import; the writer has ended then.

        No reader sees them as a dataset, and the volume is unlocked.

        Args:
            source_count: samples of the part of the source that this step and those of the part
                before it have used.
            source: describes the source and the options of the import.
            cursor: the last cursor that the source gave for them; its count is of the part.
            tags: further tagged values of the record, which those of later steps keep.
            ends_part: True if no more samples of the part follow.

        Returns:
            The steps of the import, this one included.

        Raises:
            DlfsError: as ``seal``.
        """
        self._check_open()
        with self._aborted_on_error():
            steps = self._write_step(source_count, source, cursor, tags, ends_part)
            generation = self._transaction.commit(removed=self._replaced, added=[steps.record])
        self._end("a step of an import", generation)
        return steps

    @property
    def _replaced(self) -> list[DatasetRecord]:
        return [] if self._unfinished is None else [self._unfinished.record]

    def _write_step(
        self,
        source_count: int,
        source: bytes,
        cursor: Cursor | None,
        tags: Sequence[tuple[int, bytes]],
        ends_part: bool,
    ) -> UnfinishedSteps:
        """Write the last window and the journal of the step; return the steps with this one."""
        chunks = self._packing.finish()
        chunk_bytes = self._transaction.geometry.chunk_bytes
        own_bytes = chunks.chunk_count * chunk_bytes
        columns = self._attributes.freeze(self.uuid, self._packing.directory.rows())
        columns = columns if len(columns) > 1 else []
        segment = self._packing.directory.freeze(
            self.uuid, own_bytes, chunk_bytes=chunk_bytes, parts=self._packing.parts
        )
        before = self._unfinished and self._unfinished.record
        own = TAG_SOURCE, TAG_BAD_RECORDS
        others = [tag for tag in (before.tags if before else ()) if tag[0] not in own]
        bad = bad_records_tags(self.bad, self._transaction.base.superblock.catalog_bytes)
        header = StepHeader(
            number=len(self._unfinished.steps) if self._unfinished else 0,
            first_chunk=before.data_bytes // chunk_bytes if before else 0,
            chunk_count=chunks.chunk_count,
            sample_count=self.new_count,
            sample_bytes=self.new_bytes,
            path_bytes=self._path_bytes,
            source_count=source_count,
            window_count=self._packing.stage_count,
            entries_bytes=segment.entries.nbytes,
            names_bytes=segment.names.nbytes,
            attributes_bytes=sum(column.nbytes for column in columns),
            attributes_head_bytes=columns[0].nbytes if columns else 0,
            part=self._part,
            ends_part=ends_part,
            cursor_count=cursor.count if cursor else 0,
            cursor_json=cursor.json if cursor else b"",
        )
        raw = np.frombuffer(encode_step_header(header, self.uuid), np.uint8)
        journal = self._transaction.write_segment([raw, segment.entries, segment.names, *columns])
        record = DatasetRecord(
            name=self._name,
            version=0,
            uuid=self.uuid,
            created_ns=before.created_ns if before else now_ns(),
            sample_count=self.new_count + (before.sample_count if before else 0),
            sample_bytes=self.new_bytes + (before.sample_bytes if before else 0),
            layout=self.layout,
            seed=self._seed,
            data_runs=joined_runs(before.data_runs if before else (), chunks.runs),
            data_bytes=own_bytes + (before.data_bytes if before else 0),
            directory_runs=(),
            entries_bytes=0,
            names_bytes=0,
            tags=((TAG_SOURCE, source), *bad, *tags, *others),
            state="unfinished",
            journal_runs=joined_runs(before.journal_runs if before else (), journal),
            journal_bytes=count_chunks(journal) * chunk_bytes
            + (before.journal_bytes if before else 0),
        )
        step = Step(header, before.journal_bytes if before else 0)
        earlier = self._unfinished.steps if self._unfinished else ()
        if self._unfinished is not None and not self.new_count:
            return replace(self._unfinished, record=record, steps=[*earlier, step])
        table = AttributeTable.of_parts(columns) if columns else AttributeTable.empty(self.uuid, 0)
        return UnfinishedSteps.of(record, [*earlier, step], table)

    def _write_version(self, tick: Tick) -> DatasetRecord:
        """Write the last window, the attributes and the directory; return the record."""
        chunks = self._packing.finish()
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
        if len(self._attributes):
            self._columns = self._attributes.dtypes
            attributes = self._attributes.freeze(self.uuid, self._packing.directory.rows())
        chunks = chunk_count + attribute_chunks(attributes, chunk_bytes)
        directory = self._packing.directory.freeze(
            self.uuid, chunks * chunk_bytes, chunk_bytes=chunk_bytes, parts=self._packing.parts
        )
        return EncodedVersion(directory, attributes)

    def _merge(self, previous: PreviousVersion, own: EncodedVersion, tick: Tick) -> EncodedVersion:
        """Merge the samples of the earlier version with the added ones."""
        self._packing.directory = DirectoryBuilder()
        previous.close()
        parts = own.directory.entries, own.directory.names
        added = encoded_samples(parts, own.attributes, self.uuid, self.new_count)
        base = self._transaction.base
        return merge_samples(
            [
                Stream(stored_version(base, previous.record), 0, count_chunks(previous.runs)),
                Stream(added, count_chunks(previous.runs), self._packing.chunks.chunk_count),
            ],
            uuid=self.uuid,
            chunk_bytes=base.geometry.chunk_bytes,
            directories=[],
            columns=self._columns,
            defaults=self._names.stored_defaults,
            encoder=self._encoder,
            tick=tick,
        )

    def abort(self) -> None:
        """Discard the new dataset. The volume is unchanged. Idempotent."""
        if self._state == "open":
            self._end("aborted", None)

    @contextmanager
    def _aborted_on_error(self) -> Iterator[None]:
        """Abort after an error, which leaves a part of the samples packed."""
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def _end(self, state: str, generation: Generation | None) -> None:
        self._state = state
        with after_commit(self._transaction.committed):
            try:
                self._packing.close()
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
        chunks = self._overhead_chunks(self.sample_count, self._path_bytes, self.sample_bytes)
        if self._unfinished is not None:
            # The seal writes the directory and the attributes of all samples before the journals
            # become free.
            record, chunk_bytes = self._unfinished.record, self._transaction.geometry.chunk_bytes
            path_bytes, attributes_bytes = self._earlier_bytes
            chunks -= -attributes_bytes // chunk_bytes
            chunks += self._overhead_chunks(
                self.sample_count + record.sample_count,
                self._path_bytes + path_bytes,
                self.sample_bytes + record.sample_bytes,
            )
        return chunks

    def _overhead_chunks(self, samples: int, path_bytes: int, sample_bytes: int) -> int:
        """Return the chunks to reserve for attributes, directory and catalog."""
        chunk_bytes = self._transaction.geometry.chunk_bytes
        attributes_bytes = self._attributes.size_bytes
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
        packed_bytes = earlier_bytes + self._packing.size_bytes
        chunks = packed_bytes // chunk_bytes * 65 // 64 + 3 + 3 * self._sealing_chunks()
        return chunks * chunk_bytes, self._transaction.space.chunk_count * chunk_bytes

    def _check_space(self, expected_bytes: int, expected_samples: int) -> None:
        chunk_bytes = self._transaction.geometry.chunk_bytes
        samples = self.sample_count + expected_samples
        overhead = self._overhead_chunks(
            samples, self._path_bytes, self.sample_bytes + expected_bytes
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
