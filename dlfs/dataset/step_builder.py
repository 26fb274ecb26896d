"""``StepBuilder``: collects the samples of one dataset, or of one step of it.

A ``SamplePacker`` packs the samples. Attributes are collected in columns, in the order of the
calls. All samples have the attributes of the first one; the caller may declare the value of samples
that are added without one. They are either samples of bytes or samples with fields: those that the
caller declares, else those of the first sample; see ``dlfs.fields``.

``finish`` returns the samples as a ``StepContent``. A ``DatasetWriter`` without steps seals them as
they are.

Threads: one. Memory: the stage, the windows, and columns and paths of the samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlfs._native.device import as_bytes_array
from dlfs.attributes import AttributeNames, Attributes, AttributesBuilder
from dlfs.base.arguments import Layout
from dlfs.dataset.sample_packer import ChunkSource, SamplePacker
from dlfs.dataset.schema import Schema
from dlfs.dataset.step_content import StepContent, StepEnd
from dlfs.errors import ExistsError, LimitError, UsageError
from dlfs.fields import FIELDS_COLUMN, FieldEncoder
from dlfs.format.constants import SAMPLE_BYTES_MAX
from dlfs.format.paths import PathLike, display, path_bytes
from dlfs.reader.reserved import check_no_reserved, check_reserved, has_reserved
from dlfs.store.sample_buffer import SampleBuffer, check_batch

if TYPE_CHECKING:
    from dlfs._native.device import BytesLike

_NO_ATTRIBUTES: Attributes = {}
_NO_NAMES: frozenset[str] = frozenset()


class StepBuilder:
    """Collects samples, and packs them into chunks.

    Args:
        chunks: where the chunks come from.
        name: name of the dataset.
        uuid: UUID of the dataset.
        stage: empty stage; empty again after ``close``.
        layout: order in which samples are packed.
        seed: seed of the shuffled order.
        source_shuffled: True if samples arrive in a shuffled order and are packed in it.
        part: number of the part of the source that the samples are of.
        part_windows: windows of the shuffle in the steps of the part before.
        fields: type of each field of the samples by name; by default those of the first sample.
        defaults: value of each attribute for samples that are added without it.
        schema: what the samples before have; None without any.

    Attributes:
        packing: packs the samples.
        attributes: their columns.
        names: names of their attributes.
        encoder: encoder of their fields; None for samples of bytes, and before the first one.
        path_bytes: sum of the lengths of their paths.
        new_count: number of samples.
        new_bytes: sum of their lengths, in bytes.
        is_broken: True after an error in the middle of packing: the samples cannot be used.
    """

    def __init__(
        self,
        chunks: ChunkSource,
        *,
        name: bytes,
        uuid: UUID,
        stage: SampleBuffer,
        layout: Layout,
        seed: int,
        source_shuffled: bool,
        part: int = 0,
        part_windows: int = 0,
        fields: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
        schema: Schema | None = None,
    ) -> None:
        self._name, self._uuid, self._part = name, uuid, part
        self.encoder = None if fields is None else self._declare(fields)
        self._has_bytes = False  # samples of bytes were added
        self.attributes = AttributesBuilder()
        self.names = AttributeNames(defaults or {})
        self.path_bytes = self.new_count = self.new_bytes = 0
        self.is_broken = False
        self.packing = SamplePacker(
            chunks,
            stage,
            layout=layout,
            seed=seed,
            part=part,
            stage_count=part_windows,
            source_shuffled=source_shuffled,
        )
        if schema is not None:
            self.expect(schema)

    def expect(self, schema: Schema) -> None:
        """Expect what the samples before have, and declared attributes besides.

        Call it before the first sample is added.
        """
        self.attributes.expect(schema.columns)
        self.encoder = schema.encoder
        self._has_bytes = schema.fields == ""
        known = dict.fromkeys(schema.names, ())
        completed = self.names.complete(known, 0, None)
        new = {name: value for name, value in completed.items() if name not in known}
        self.attributes.append(self.attributes.prepare(new, 0), 0)
        self.names.settle(completed)

    @property
    def schema(self) -> Schema | None:
        """What the samples so far have; None before the first one."""
        fields = None if self.encoder is None else self.encoder.text
        if fields is None and self._has_bytes:
            fields = ""
        if fields is None and not len(self.attributes):
            return None
        return Schema(self.attributes.dtypes, self.names.names or _NO_NAMES, fields)

    @property
    def journal_bytes(self) -> int:
        """Bytes of the paths and attributes of the samples, at most."""
        return self.path_bytes + self.attributes.size_bytes

    def __contains__(self, path: object) -> bool:
        """Return True if a sample of this path was added."""
        return path in self.packing

    # ---- adding ----------------------------------------------------------------------------------

    def add(
        self, raw: bytes, data: BytesLike | Mapping[str, Any], attributes: Mapping[str, Any]
    ) -> None:
        """Add one sample: its bytes, or its fields; see ``DatasetWriter.add``."""
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
        with self._broken_on_error():
            self.packing.add(raw, array)

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
        """Add many samples of bytes at once; see ``DatasetWriter.add_batch``."""
        source = as_bytes_array(data)
        check_batch(len(paths), source.size, offsets, lengths)
        if len(paths) and FIELDS_COLUMN in attributes:  # importers encode fields themselves
            self._check_fields_allowed(paths[0], np.asarray(attributes[FIELDS_COLUMN]).tolist())
        elif len(paths):
            self._check_bytes_allowed(paths[0])
        check_reserved(attributes, lengths, display(self._name))
        self._note(paths, int(lengths.sum()), attributes)
        with self._broken_on_error():
            self.packing.add_batch(paths, source, offsets, lengths, begins_chunk)

    def add_directory(self, path: PathLike) -> None:
        """Add a directory; see ``DatasetWriter.add_directory``."""
        raw = path_bytes(path)
        self.packing.directory.add_directory(raw)
        self.path_bytes += len(raw) + 1

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
        encoder = self.encoder or FieldEncoder.of_sample(values, where)
        encoded = encoder.encode(values, where)
        self.encoder = encoder
        return encoded

    def _check_bytes_allowed(self, path: bytes) -> None:
        if self.encoder is not None:
            fields = ", ".join(self.encoder.fields)
            raise UsageError(
                f"add the sample {display(path)!r}: expected the fields {fields}, got bytes"
            )
        self._has_bytes = True

    def _check_fields_allowed(self, path: bytes, texts: list[str]) -> None:
        """Check that fields which the caller encoded are those of the samples before."""
        expected = "bytes" if self._has_bytes else self.encoder and self.encoder.text
        if expected and any(text != expected for text in texts):
            raise UsageError(
                f"add the sample {display(path)!r}: expected {expected} as in the samples before, "
                f"got the fields {texts[0]}"
            )

    def _note(self, paths: Sequence[bytes], sample_bytes: int, attributes: Attributes) -> None:
        """Count samples and record their attributes, in the row order of the directory."""
        samples = len(paths)
        if attributes or self.names.names != _NO_NAMES:
            values = self.names.complete(attributes, samples, paths[0] if samples else None)
            self.attributes.append(self.attributes.prepare(values, samples), self.new_count)
            if samples or attributes:
                self.names.settle(values)
        self.new_count += samples
        self.new_bytes += sample_bytes
        self.path_bytes += sum(map(len, paths))

    @contextmanager
    def _broken_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.is_broken = True
            raise

    # ---- the end ---------------------------------------------------------------------------------

    def finish(self, end: StepEnd) -> StepContent:
        """Write the last window, and return the samples as a step; the data is durable then.

        Raises:
            SpaceError: there are too few chunks.
            DeviceError: a write failed.
        """
        with self._broken_on_error():
            chunks = self.packing.finish()
            columns = self.attributes.freeze(self._uuid, self.packing.directory.rows())
            columns = columns if len(columns) > 1 else []
            segment = self.packing.directory.freeze(
                self._uuid,
                chunks.chunk_count * self.packing.chunk_bytes,
                chunk_bytes=self.packing.chunk_bytes,
                parts=self.packing.parts,
            )
        return StepContent(
            part=self._part,
            end=end,
            runs=tuple(chunks.runs),
            sample_count=self.new_count,
            sample_bytes=self.new_bytes,
            path_bytes=self.path_bytes,
            window_count=self.packing.stage_count,
            entries=segment.entries,
            names=segment.names,
            attributes=columns,
            attributes_head_bytes=columns[0].nbytes if columns else 0,
        )

    def close(self) -> None:
        """Close the windows, and empty the stage. Idempotent."""
        self.packing.close()
